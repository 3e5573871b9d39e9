"""The metrics: counted where things happen, in a text that Prometheus' own parser reads."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.nonempty import every, some

from elastipod_agent import __version__
from elastipod_agent.core.states import AgentState as S
from elastipod_agent.metrics import FAMILIES, Metrics, MetricsPage, Sources, count_changes
from elastipod_agent.server.http import Request
from elastipod_agent.status import Status, StatusStore
from elastipod_agent.workers.failure import Failure

WORKER = {"step": 7, "samples": 70, "loss": 0.25, "samples_per_s": None, "world_size": 4, "time": 1.5e9}
FAILURE = Failure(global_rank=0, local_rank=0, exitcode=1, signal=None, message="m", time="t")


def parsed(text: str) -> dict[tuple[str, ...], float]:
    """Read the text as Prometheus does: {(name, label value, ...): value}."""
    families = list(text_string_to_metric_families(text))
    assert every(family.type in ("counter", "gauge") and family.documentation for family in families)
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def page(metrics: Metrics, status: Status | None = None, worker: dict[str, Any] | None = None) -> MetricsPage:
    return MetricsPage(
        metrics,
        Sources(status=lambda: status or Status(), worker=lambda: worker or {}, output_bytes=lambda: 12345),
    )


async def scrape(made: MetricsPage) -> dict[tuple[str, ...], float]:
    response = await made.handle(Request("GET", "/metrics", {}))
    assert response.status == 200
    assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    return parsed(response.body.decode())


async def test_a_scrape_tells_the_state_the_workers_and_the_agents_own_cost() -> None:
    found = await scrape(page(Metrics(), Status(state=S.RUNNING, generation=3, version=9, assigned_rank=1), WORKER))
    assert {
        name: found[f"elastipod_agent_{name}",] for name in ("generation", "group_rank", "status_changes_total")
    } == {
        "generation": 3,
        "group_rank": 1,
        "status_changes_total": 9,
    }
    assert [state for state in S if found["elastipod_agent_state", state.value] == 1] == [S.RUNNING]
    assert (found["elastipod_agent_worker_step",], found["elastipod_agent_worker_loss",]) == (7, 0.25)
    assert ("elastipod_agent_worker_samples_per_second",) not in found, "what nobody knows is left out"
    assert found["elastipod_agent_output_bytes_total",] == 12345
    assert found["elastipod_agent_resident_memory_bytes",] > 1e6
    assert found["elastipod_agent_open_fds",] > 2


async def test_a_report_of_the_last_generation_is_not_shown_for_the_next() -> None:
    worker: dict[str, Any] = dict(WORKER)
    made = page(Metrics(), worker=worker)
    await scrape(made)
    worker.clear()
    assert ("elastipod_agent_worker_step",) not in await scrape(made)


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/", 404), ("POST", "/metrics", 405)])
async def test_there_is_nothing_else_on_the_port(method: str, path: str, status: int) -> None:
    assert (await page(Metrics()).handle(Request(method, path, {}))).status == status


def test_any_label_and_any_number_survives_the_way() -> None:
    metrics = Metrics()
    metrics.count("faults_total", reason='Log"Hang\\_a\nb')
    for value in (float("inf"), float("-inf"), 1e300, 0.1, -3, 2**52):
        metrics.set("worker_loss", value)
        found = parsed(metrics.render())
        assert found["elastipod_agent_worker_loss",] == value
        assert found["elastipod_agent_faults_total", 'Log"Hang\\_a\nb'] == 1
    metrics.set("worker_loss", float("nan"))
    assert str(parsed(metrics.render())["elastipod_agent_worker_loss",]) == "nan"


def test_a_name_that_nobody_declared_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="nonsense is not a metric"):
        Metrics().count("nonsense")


def test_counters_are_named_as_counters() -> None:
    counters = {name for name, (kind, _) in FAMILIES.items() if kind == "counter"}
    assert {name for name in some(counters) if not name.endswith("_total")} == set()


def test_counting_from_many_threads_loses_nothing() -> None:
    metrics = Metrics()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: metrics.count("worker_starts_total", kind="warm"), range(4000)))
    assert metrics.value("worker_starts_total", kind="warm") == 4000


def test_a_life_is_counted() -> None:
    metrics, ticks = Metrics(), count()
    board = StatusStore(lambda: f"t{next(ticks)}")
    board.on_change = lambda before, after: count_changes(before, after, metrics)

    def start(generation: int) -> None:
        board.enter(S.RUNNING, generation=generation, failure=None, drained=False, reason=None)

    board.enter(S.READY)
    start(1)
    board.enter(S.FAULTED, reason="WorkerCrash", failure=FAILURE)
    board.enter(S.STOPPING, reason=None)
    board.enter(S.READY)
    start(2)
    board.enter(S.STOPPING, S.READY, drained=True)
    start(2)  # a plain operator counts its generations anew
    board.enter(S.COMPLETED)
    names = ("starts_total", "restarts_total", "drains_total", "completed_total")
    assert [metrics.value(name) for name in names] == [3, 2, 1, 1]
    assert metrics.value("faults_total", reason="WorkerCrash") == 1


@pytest.mark.parametrize(
    ("after", "counted"),
    [
        pytest.param({"failure": FAILURE, "reason": "LogHang_loss"}, 1, id="a fault"),
        pytest.param({"terminating": True}, 0, id="something else"),
    ],
)
def test_a_fault_is_counted_by_its_reason(after: dict[str, Any], counted: int) -> None:
    metrics = Metrics()
    before = Status(state=S.RUNNING)
    count_changes(before, replace(before, **after), metrics)
    count_changes(replace(before, **after), replace(before, **after, version=5), metrics)
    assert metrics.value("faults_total", reason="LogHang_loss") == counted


async def test_the_version_and_the_start_are_told_before_anything_happens() -> None:
    before = time.time()
    metrics = Metrics()
    found = await scrape(page(metrics))
    python = ".".join(map(str, sys.version_info[:3]))
    assert found["elastipod_agent_build_info", python, __version__] == 1
    assert before <= found["elastipod_agent_start_time_seconds",] <= time.time()
    labelled = {"worker_starts_total", "faults_total", "calls_total", "refused_calls_total"}
    counters = {name for name, (kind, _) in FAMILIES.items() if kind == "counter"} - labelled
    assert {name for name in counters if (f"elastipod_agent_{name}",) in found} == counters
    assert found["elastipod_agent_starts_total",] == 0
    assert found["elastipod_agent_terminating",] == 0


async def test_other_paths_and_methods_are_refused() -> None:
    made = page(Metrics())
    other = await made.handle(Request("GET", "/", {}))
    assert (other.status, other.body) == (404, b"only /metrics is here\n")
    assert other.headers == {"Content-Type": "text/plain"}
    posted = await made.handle(Request("POST", "/metrics", {}))
    assert (posted.status, posted.body, posted.headers) == (405, None, {"Allow": "GET"})


async def test_a_reason_that_is_no_valid_text_leaves_the_other_metrics_readable() -> None:
    metrics = Metrics()
    metrics.count("faults_total", reason="file \udcff is missing")
    found = await scrape(page(metrics))
    assert found["elastipod_agent_faults_total", "file ? is missing"] == 1
