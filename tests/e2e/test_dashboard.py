"""The dashboard over a real run: Prometheus scrapes the operator's pods while `make demo` runs, and every panel has data.

The panels are drawn as a page and photographed: `.run/dashboard.png`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from PIL import Image
from tests.chromium import photograph
from tests.dashboard_page import WIDTH, Span, page, panels, series_of
from tests.e2e.conftest import OPERATOR_NAMESPACE, ROOT
from tests.long_runs import LongRun
from tests.nonempty import some
from tests.prometheus import Prometheus, prometheus_that_finds

from elastipod_local.cluster import Cluster
from elastipod_local.errors import LocalClusterError
from elastipod_local.host import wait_until
from elastipod_local.paths import cluster_dir

DEMO = ("-m", "elastipod_local.demo.main")
NAME, PORT = "demo", 8081
DEMO_S = 1500
STEP_S = 2.0


@contextmanager
def pods_of_the_operator(folder: Path) -> Iterator[dict[str, object]]:
    """Give settings with which Prometheus finds them in a file: Debian's build of it does not know Kubernetes."""
    found, is_over = folder / "targets.json", threading.Event()

    def follow() -> None:
        while not is_over.wait(0.5):
            if not (cluster_dir(NAME) / "kubeconfig").exists():
                continue
            with suppress(LocalClusterError):  # it is starting, or already going
                pods = Cluster.attach(NAME).api_server.get(f"/api/v1/namespaces/{OPERATOR_NAMESPACE}/pods") or {}
                addresses = sorted(pod["status"].get("podIP", "") for pod in pods.get("items", ()))
                draft = found.with_suffix(".new")
                draft.write_text(json.dumps([{"targets": [f"{address}:{PORT}" for address in addresses if address]}]))
                draft.rename(found)

    thread = threading.Thread(target=follow, name="finds the operator's pods")
    thread.start()
    try:
        yield {"file_sd_configs": [{"files": [str(found)], "refresh_interval": "1s"}]}
    finally:
        is_over.set()
        thread.join(60)


def time_with_jobs(running: Prometheus, since: float) -> Span:
    (jobs,) = running.query_range("sum(elastipod_jobs) > 0", since, time.time(), STEP_S)
    times = [float(at) for at, _ in jobs["values"]]
    return Span(times[0], times[-1], STEP_S)


@pytest.mark.timeout(2000)
@pytest.mark.long("dashboard")
def test_every_panel_has_data_of_a_real_run(tmp_path: Path, long_run: LongRun) -> None:
    began = time.time()
    assert not (cluster_dir(NAME) / "kubeconfig").exists(), "a demo is up already"
    with (tmp_path / "demo.log").open("wb") as log:
        demo = subprocess.Popen([sys.executable, *DEMO], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        wait_until(
            lambda: (cluster_dir(NAME) / "kubeconfig").exists() or demo.poll() is not None,
            deadline_s=DEMO_S,
            what="the demo's control plane",
        )
        rules = ROOT / "charts/elastipod/alerts/elastipod.yaml"
        with pods_of_the_operator(tmp_path) as targets, prometheus_that_finds(targets, tmp_path, rules) as running:
            assert demo.wait(DEMO_S) == 0, (tmp_path / "demo.log").read_text()[-3000:]
            span = time_with_jobs(running, began)

            def ask(expression: str, over: Span) -> list[object]:
                return running.query_range(expression, over.start, over.end, over.step)

            shown = [(panel, [one for one in series_of(panel, ask, span) if not one.is_empty]) for panel in panels()]
    finally:
        demo.terminate()  # it takes its cluster down
        demo.wait(300)
    drawn = [(panel, series) for panel, series in some(shown) if panel["type"] != "row"]
    assert [panel["title"] for panel, series in drawn if not series] == []
    long_run.count(
        panels=len(drawn), series=sum(len(series) for _, series in drawn), seconds=round(span.end - span.start)
    )

    origin = f"Data of one run of make demo at {long_run.commit}, scraped by Prometheus; panels and queries of"
    text, height = page(
        "Elastipod", f"{origin} charts/elastipod/dashboards/elastipod.json, drawn without Grafana.", span, shown
    )
    path, picture = tmp_path / "dashboard.html", ROOT / ".run" / "dashboard.png"
    path.write_text(text, encoding="utf-8")
    photograph(path, picture, WIDTH, height)
    with Image.open(picture) as image:
        assert image.size == (WIDTH, height)
        assert len(image.convert("RGB").getcolors(1 << 20) or ()) > 100, "it shows something"
