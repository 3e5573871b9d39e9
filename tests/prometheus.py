"""A real Prometheus and its promtool, from the package of the machine's Debian or Ubuntu."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

import yaml
from tests.debian import unpacked
from tests.free_ports import free_port
from tests.patience import PATIENCE_S


def program(name: str) -> Path:
    """Give the path of prometheus or promtool. Skips the test where there is no apt-get to fetch it with."""
    found = shutil.which(name)
    if found is not None:
        return Path(found)
    return unpacked("prometheus") / "usr/bin" / name


class Prometheus:
    """A running Prometheus."""

    def __init__(self, port: int) -> None:
        self._address = f"http://127.0.0.1:{port}"

    def get(self, path: str, **parameters: str) -> Any:
        """Give the data of an answer of its API. Raises AssertionError for a query that it refuses, OSError until it is ready."""
        address = f"{self._address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(address, timeout=PATIENCE_S) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            if error.code == HTTPStatus.SERVICE_UNAVAILABLE:
                raise
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error
        assert answer["status"] == "success"
        return answer["data"]

    def query(self, expression: str) -> list[Any]:
        """Give the samples of an expression at this moment."""
        result: list[Any] = self.get("query", query=expression)["result"]
        return result

    def query_range(self, expression: str, start: float, end: float, step: float) -> list[Any]:
        """Give the series of an expression from one time to another, a sample for each step of seconds."""
        times = {"start": f"{start:.3f}", "end": f"{end:.3f}", "step": f"{step:g}"}
        result: list[Any] = self.get("query_range", query=expression, **times)["result"]
        return result

    def firing(self) -> list[dict[str, Any]]:
        """Give the alerts that fire at this moment, with labels and annotations."""
        return [alert for alert in self.get("alerts")["alerts"] if alert["state"] == "firing"]


# The times in a rule: its `for`, the range of a selector, its offset, and what the age of a phase is compared with.
FOR, RANGE = re.compile(r"(?<=for: )(\d+)([mh])$", re.MULTILINE), re.compile(r"(?<=\[)(\d+)([mh])(?=\])")
OFFSET = re.compile(r"(?<= offset )(\d+)([mh])\b")
AGE = re.compile(r"(?<=elastipod_job_phase_start_time_seconds)(\{[^}]+\}\)) > (\d+)")
SECONDS = {"m": 60, "h": 3600}


def hurried(rules: Path, haste: int) -> str:
    """Give the text of a rule file in which all times are shorter by this factor; nothing else is changed."""

    def shorter(time: re.Match[str]) -> str:
        return f"{int(time[1]) * SECONDS[time[2]] * 1000 // haste}ms"

    text = rules.read_text(encoding="utf-8")
    for times in (FOR, RANGE, OFFSET):
        text, count = times.subn(shorter, text)
        assert count, times
    text, count = AGE.subn(lambda age: f"{age[1]} > {int(age[2]) / haste:g}", text)
    assert count == text.count("phase_start_time_seconds"), "each rule about the age of a phase is hurried"
    return text


@contextmanager
def prometheus(folder: Path, target: str, rules: Path) -> Iterator[Prometheus]:
    """Run Prometheus, which scrapes one target every second and evaluates the rules of one file."""
    with prometheus_that_finds({"static_configs": [{"targets": [target]}]}, folder, rules) as running:
        yield running


@contextmanager
def prometheus_that_finds(targets: Mapping[str, Any], folder: Path, rules: Path) -> Iterator[Prometheus]:
    """Run Prometheus with these settings for what it scrapes every second."""
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(rules)],
        "scrape_configs": [{"job_name": "elastipod", "honor_labels": True, **targets}],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    port, log = free_port(), folder / "prometheus.log"
    command = [
        str(program("prometheus")),
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        running = Prometheus(port)
        _wait_for_samples(running, process, log)
        yield running
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def _wait_for_samples(running: Prometheus, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if running.query("up == 1"):
                return
        except OSError:
            pass  # it is still starting
        time.sleep(0.1)
    raise AssertionError(f"Prometheus has scraped nothing: {log.read_text(encoding='utf-8')[-2000:]}")
