"""Looking at the job: what is read from the API server and the logs, and waits that end with what was seen."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.patience import PATIENCE_S
from tests.unit.demo.runs import CREATED, GROW_SHRINK_CRASH, log

from elastipod_local.demo import watcher as watcher_module
from elastipod_local.demo.watcher import (
    EVENTS,
    JobEvent,
    JobSnapshot,
    Progress,
    Watcher,
    is_about,
    read_job,
    read_progress,
)
from elastipod_local.errors import LocalClusterError


def job(state: str = "Running") -> dict[str, Any]:
    return {
        "kind": "HyperPodPyTorchJob",
        "metadata": {
            "name": "lm",
            "annotations": {"elastipod.io/size": "2/4/4", "elastipod.io/history": json.dumps(GROW_SHRINK_CRASH[:1])},
        },
        "status": {
            "conditions": [{"type": "Created"}, {"type": state, "reason": "Resizing", "message": "2 replicas train"}]
        },
    }


def event(uid: str, reason: str, *, count: int = 1, about: str = "lm") -> dict[str, Any]:
    return {
        "kind": "Event",
        "metadata": {"uid": uid, "creationTimestamp": CREATED},
        "involvedObject": {"kind": "HyperPodPyTorchJob", "name": about},
        "reason": reason,
        "message": "said\nso",
        "count": count,
    }


class Api:
    """Answers each look, at first for jobs and then for Events, with the next of a list; the last one stays. None: no answer."""

    def __init__(self, *answers: list[dict[str, Any]] | None) -> None:
        self._answers = list(answers)

    def get(self, path: str) -> dict[str, Any] | None:
        is_of_events = path == EVENTS
        answer = self._answers.pop(0) if is_of_events and len(self._answers) > 1 else self._answers[0]
        if answer is None:
            return None
        return {"items": [item for item in answer if (item["kind"] == "Event") is is_of_events]}


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Api], Watcher]:
    monkeypatch.setattr("elastipod_local.demo.watcher.POLL_EVERY_S", 0.01)
    events: list[str] = []

    def make(api: Api) -> Watcher:
        watcher = Watcher(api, name="lm", shared=tmp_path, on_snapshot=lambda snapshot: None, on_event=events.append)
        watcher.shown = events  # type: ignore[attr-defined]
        return watcher

    return make


def write_log(folder: Path, generation: int, rank: int, lines: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"gen-{generation:06}-rank-{rank:05}.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )


def test_the_present_state_is_the_last_condition() -> None:
    facts = read_job(job())
    assert (facts["state"], facts["reason"], facts["size"]) == ("Running", "Resizing", "2/4/4")
    assert [entry.size for entry in facts["history"]] == [2]


def test_a_job_that_nobody_has_looked_at_yet_has_no_state() -> None:
    assert read_job({"metadata": {}})["state"] == "not seen by the operator yet"


def test_progress_is_that_of_the_newest_generation_that_made_a_step(tmp_path: Path) -> None:
    logs = tmp_path / "lm" / "samples"
    write_log(logs, 1, 0, log(1, 0, 2, steps={1: 1.0, 2: 1.5, 3: 2.0}, loss=2.5))
    write_log(logs, 2, 0, log(2, 0, 4, steps={}))
    progress = read_progress(tmp_path, "lm")
    assert progress is not None
    assert (progress.generation, progress.step, progress.loss, progress.samples_per_s) == (1, 3, 2.5, 16.0)


def test_steps_since_the_last_checkpoint_are_counted(tmp_path: Path) -> None:
    lines = log(2, 0, 2, resumed_step=10, steps={11: 1.0, 12: 2.0})
    write_log(tmp_path / "lm", 2, 0, lines)
    assert read_progress(tmp_path, "lm").unsaved_steps == 12  # type: ignore[union-attr]
    first = [*log(1, 0, 2, steps={10: 0.5}), {"kind": "saved", "step": 8, "t": 0.4}]
    write_log(tmp_path / "lm", 1, 0, first)
    assert read_progress(tmp_path, "lm").unsaved_steps == 4  # type: ignore[union-attr]  # step 10 was in memory
    write_log(tmp_path / "lm", 2, 0, [*lines, {"kind": "saved", "step": 12, "t": 3.0}])
    assert read_progress(tmp_path, "lm").unsaved_steps == 0  # type: ignore[union-attr]


def test_there_is_no_progress_before_the_first_log(tmp_path: Path) -> None:
    assert read_progress(tmp_path, "lm") is None


def test_a_wait_ends_with_what_was_waited_for(watch: Callable[[Api], Watcher]) -> None:
    with watch(Api([], [job()])) as watcher:
        assert (
            watcher.wait_for(lambda snapshot: snapshot.state == "Running", "running", deadline_s=PATIENCE_S).size
            == "2/4/4"
        )


def test_a_wait_that_runs_out_says_what_was_seen_last(watch: Callable[[Api], Watcher]) -> None:
    with watch(Api([job(), event("1", "Resized")])) as watcher:
        watcher.wait_for(lambda snapshot: bool(snapshot.last_events), "an event", deadline_s=PATIENCE_S)
        with pytest.raises(
            LocalClusterError, match=r"waited 0 s for 4 replicas; last seen: lm: state Running .*Resized: said so"
        ):
            watcher.wait_for(lambda snapshot: False, "4 replicas", deadline_s=0)


def test_a_job_that_ends_early_ends_the_wait(watch: Callable[[Api], Watcher]) -> None:
    with (
        watch(Api([job("Failed")])) as watcher,
        pytest.raises(LocalClusterError, match="lm ended before 4 replicas"),
    ):
        watcher.wait_for(lambda snapshot: False, "4 replicas", deadline_s=PATIENCE_S)


def test_a_job_is_waited_for_as_long_as_it_makes_steps(
    watch: Callable[[Api], Watcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slow the machine is: here a minute passes between two looks, and each of them sees one step more."""
    looks = itertools.count(1)
    now = 0.0

    def progress(*_: Any) -> Progress:
        nonlocal now
        now += 60
        return Progress(1, next(looks), None, None)

    monkeypatch.setattr(watcher_module, "monotonic", lambda: now)
    monkeypatch.setattr(watcher_module, "read_progress", progress)
    with watch(Api(*[[job()]] * 9, [job("Completed")])) as watcher:
        assert watcher.wait_for_end(stall_s=100).state == "Completed"
    assert now >= 600


def test_a_job_without_a_further_step_is_given_up(watch: Callable[[Api], Watcher]) -> None:
    said = "waited 0 s for its end or a further step; last seen: lm: state Running"
    with watch(Api([job()])) as watcher:
        watcher.wait_for(lambda snapshot: snapshot.state == "Running", "running", deadline_s=PATIENCE_S)
        with pytest.raises(LocalClusterError, match=said):
            watcher.wait_for_end(stall_s=0)


def test_an_api_server_that_does_not_answer_is_not_the_end(watch: Callable[[Api], Watcher]) -> None:
    with watch(Api(None, [job()])) as watcher:
        watcher.wait_for(lambda snapshot: snapshot.state == "Running", "running", deadline_s=PATIENCE_S)


def test_a_failure_of_the_watch_itself_reaches_the_one_who_waits(watch: Callable[[Api], Watcher]) -> None:
    with watch(Api([{"kind": "HyperPodPyTorchJob"}])) as watcher, pytest.raises(KeyError):
        watcher.wait_for(lambda snapshot: False, "anything", deadline_s=PATIENCE_S)


def test_each_event_of_the_job_is_told_once_and_again_when_repeated(watch: Callable[[Api], Watcher]) -> None:
    api = Api(
        [job(), event("1", "Started")],
        [job(), event("1", "Started"), event("9", "Other", about="another")],
        [job("Completed"), event("1", "Started", count=2)],
    )
    with watch(api) as watcher:
        watcher.wait_for_end(stall_s=PATIENCE_S)
    assert watcher.shown == ["Started: said so", "Started: said so"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("kind", "name", "is_ours"),
    [
        pytest.param("HyperPodPyTorchJob", "lm", True, id="the job"),
        pytest.param("HyperPodPyTorchJob", "lm-2", False, id="another job"),
        pytest.param("Workload", "lm-base-13de4", True, id="its base"),
        pytest.param("Workload", "lm-more-1-13de4", True, id="an increment of it"),
        pytest.param("Workload", "lm-2-base-13de4", False, id="the base of another job"),
        pytest.param("Pod", "lm-worker-0", False, id="a pod"),
    ],
)
def test_events_of_a_job_are_its_own_and_those_of_its_workloads(kind: str, name: str, is_ours: bool) -> None:
    assert is_about({"involvedObject": {"kind": kind, "name": name}}, "lm") is is_ours


def test_what_kueue_says_of_a_workload_is_kept_and_not_shown(watch: Callable[[Api], Watcher]) -> None:
    evicted = event("2", "EvictedDueToPreempted", about="lm-more-1-13de4")
    evicted["involvedObject"]["kind"] = "Workload"
    with watch(Api([job("Completed"), evicted])) as watcher:
        watcher.wait_for_end(stall_s=PATIENCE_S)
        assert watcher.events == (JobEvent("Workload", "EvictedDueToPreempted", "said so"),)
    assert watcher.shown == []  # type: ignore[attr-defined]


def test_each_watcher_sees_its_own_job(watch: Callable[[Api], Watcher]) -> None:
    other = job("Failed")
    other["metadata"]["name"] = "another"
    with watch(Api([other, job()])) as watcher:
        snapshot = watcher.wait_for(lambda snapshot: snapshot.state == "Running", "running", deadline_s=PATIENCE_S)
    assert snapshot.job == "lm"


def test_the_training_size_is_that_of_the_generation_that_makes_steps() -> None:
    assert JobSnapshot().training_size == 0
