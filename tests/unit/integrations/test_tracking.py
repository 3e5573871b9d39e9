"""What a job's run in a tracker says of its generations: who writes, why each began, and which ones are refused."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import suppress

import pytest

from elastipod import elastic_event, elastic_event_detected
from elastipod.elastic_event import reset_elastic_event
from elastipod.errors import FencedError
from elastipod.integrations.tracking import CAUSE, RunOutcome, TrackedRun


class RunInMemory:
    """A tracker that keeps the tags and the metrics of one run, and how each process left it."""

    def __init__(self) -> None:
        self.tags: dict[str, str] = {}
        self.metrics: list[tuple[int, dict[str, float]]] = []
        self.closed: list[RunOutcome] = []
        self.causes: list[str] = []

    def open(self, job_uid: str, name: str) -> Mapping[str, str]:
        assert (job_uid, name) == ("uid", "team/llm")
        return dict(self.tags)

    def tag(self, tags: Mapping[str, str]) -> None:
        self.tags.update(tags)
        self.causes += [tags[CAUSE]] if CAUSE in tags else []

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.metrics.append((step, dict(metrics)))

    def close(self, outcome: RunOutcome) -> None:
        self.closed.append(outcome)


class Pod:
    """The environment of this process, as the agent changes it between generations."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        for name, value in (("ELASTIPOD_RUN_ID", "uid"), ("ELASTIPOD_JOB", "team/llm")):
            monkeypatch.setenv(name, value)

    def generation(self, number: int, size: int, rank: int = 0) -> None:
        for name, value in (("ELASTIPOD_GENERATION", number), ("NNODES", size), ("RANK", rank)):
            self._monkeypatch.setenv(name, str(value))

    def new_process(self) -> None:
        self._monkeypatch.setattr(elastic_event, "_detector", None)
        self._monkeypatch.setattr(elastic_event, "_has_left", False)


@pytest.fixture
def pod(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pod]:
    for name in ("ELASTIPOD_WORKER_FILE", "WORLD_SIZE", elastic_event.COORDINATION_ENV):
        monkeypatch.delenv(name, raising=False)
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    pod = Pod(monkeypatch)
    pod.new_process()
    yield pod
    signal.signal(signal.SIGUSR1, before)


def event() -> None:
    elastic_event_detected()
    signal.raise_signal(signal.SIGUSR1)
    assert elastic_event_detected()


def test_each_process_says_why_its_generation_began(pod: Pod) -> None:
    tracker = RunInMemory()
    for number, size, is_left in ((1, 2, True), (2, 4, True), (3, 4, False), (4, 3, True)):
        pod.new_process()
        pod.generation(number, size)
        run = TrackedRun(tracker)
        run.log(number, loss=1.0)
        if is_left:
            with run:
                event()
    assert tracker.causes == ["start", "resize", "restart", "recovery"], "nobody left generation 3: it was killed"
    assert tracker.closed == [RunOutcome.LEFT] * 3


@pytest.mark.parametrize("after_fault", [False, True])
def test_a_process_that_stays_tells_a_resize_from_a_recovery(pod: Pod, after_fault: bool) -> None:
    tracker = RunInMemory()
    run = TrackedRun(tracker)
    pod.generation(1, 4)
    run.log(1, loss=1.0)
    if after_fault:
        elastic_event_detected()
    else:
        event()
    reset_elastic_event(is_abandoned=after_fault)
    pod.generation(2, 3)
    run.log(2, loss=0.5)
    assert tracker.causes == ["start", "recovery" if after_fault else "resize"]
    assert tracker.closed == [RunOutcome.LOST if after_fault else RunOutcome.LEFT]
    assert [step for step, metrics in tracker.metrics if "loss" in metrics] == [1, 2]


def test_a_fault_during_a_drain_is_a_recovery(pod: Pod) -> None:
    run = TrackedRun(tracker := RunInMemory())
    pod.generation(1, 4)
    run.log(1, loss=1.0)
    event()
    reset_elastic_event(is_abandoned=True)
    pod.generation(2, 3)
    run.log(1, loss=1.0)
    assert tracker.causes == ["start", "recovery"]


def test_a_kept_process_that_becomes_rank_0_knows_that_the_old_one_left(pod: Pod) -> None:
    """The old rank 0 may still be leaving, without its tag."""
    tracker = RunInMemory()
    pod.generation(1, 4)
    TrackedRun(tracker).log(1, loss=1.0)
    event()
    reset_elastic_event()
    pod.generation(2, 3)
    TrackedRun(tracker).log(2, loss=1.0)
    assert tracker.causes == ["start", "resize"]


def test_a_rank_that_is_no_longer_0_closes_the_run_and_writes_nothing(pod: Pod) -> None:
    run = TrackedRun(tracker := RunInMemory())
    pod.generation(1, 2)
    run.log(1, loss=1.0)
    pod.generation(2, 3, rank=1)
    written = len(tracker.metrics)
    run.log(2, loss=1.0)
    run.log(3, loss=1.0)
    assert len(tracker.metrics) == written
    assert len(tracker.closed) == 1


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, RunOutcome.COMPLETED),
        (SystemExit(0), RunOutcome.COMPLETED),
        (SystemExit(1), RunOutcome.FAILED),
        (ValueError("boom"), RunOutcome.FAILED),
    ],
)
def test_how_the_block_ends_is_how_the_run_ends(pod: Pod, error: BaseException | None, outcome: RunOutcome) -> None:
    tracker = RunInMemory()
    pod.generation(1, 2)
    run = TrackedRun(tracker)
    with suppress(SystemExit, ValueError), run:
        run.log(1, loss=1.0)
        if error is not None:
            raise error
    assert tracker.closed == [outcome]


def test_a_replaced_generation_is_refused_and_changes_nothing(pod: Pod) -> None:
    tracker = RunInMemory()
    pod.generation(3, 2)
    TrackedRun(tracker).log(1, loss=1.0)
    before = dict(tracker.tags), list(tracker.metrics)
    pod.generation(2, 4)
    with pytest.raises(FencedError, match="generation 3 writes the tracker's run; this is generation 2"):
        TrackedRun(tracker).log(1, loss=1.0)
    assert (tracker.tags, tracker.metrics) == before
