"""What the status command says about an agent."""

from __future__ import annotations

from typing import Any

import pytest

from elastipod_agent import status_text
from elastipod_agent.authentication import Credentials
from elastipod_agent.status_text import AgentAddress, describe

NONE = Credentials()
TARGET = AgentAddress("127.0.0.1", 7000, NONE)
NOW = 1_800_000_000.0
RUNNING: dict[str, Any] = {
    "status": "running", "transitions": {"RUNNING": "2027-01-15T07:58:20Z"}, "agent_version": "0.1.0", "generation": 3,
    "assigned_rank": "1", "spare": "False", "drained": False, "failure": None, "progress": None,
    "worker": {"step": 12, "samples": 960, "loss": 0.25, "samples_per_s": 81.25, "world_size": 4, "time": NOW - 2},
    "details": {"job": "team/a", "pod": "a-0", "nproc": 2, "nnodes": 2, "is_warm": True, "warm_starts": 4, "cold_starts": 1,
                "restarts": 2},
}  # fmt: skip


def told(status: dict[str, Any]) -> dict[str, str]:
    """Give the text by the name in front of it."""
    found: dict[str, str] = {}
    name = ""
    for line in describe(status, TARGET, NOW):
        name = line[:12].strip() or name
        found[name] = f"{found[name]}\n{line[12:]}" if name in found else line[12:]
    return found


def test_a_run_is_described_in_plain_words() -> None:
    assert told(RUNNING) == {
        "agent": "team/a, pod a-0, port 7000, version 0.1.0",
        "state": "running for 100 s (since 2027-01-15 07:58:20 UTC)",
        "generation": "3, group rank 1 of 2, 2 restarts on this pod",
        "workers": "2 on this pod, world size 4, 4 warm starts, 1 cold start",
        "training": "step 12, 960 samples, 81.25 samples/s, loss 0.25, reported 2 s ago",
        "drain": "none",
        "last fault": "none",
        "checkpoint": "none reported",
    }


@pytest.mark.parametrize(
    ("changes", "name", "text"),
    [
        ({"generation": 0}, "generation", "none yet: the operator has not started workers here"),
        ({"spare": "True"}, "generation", "3, group rank 1 of 2, held as a spare, 2 restarts on this pod"),
        ({"worker": {"step": None}}, "training", "no step reported yet"),
        ({"preparation": "ready", "details": {}}, "workers", "prepared for the next generation"),
        ({"preparation": "failed", "details": {}}, "workers", "could not be prepared for the next generation (see the log)"),
        ({"status": "stopping"}, "drain", "stopping now"),
        ({"status": "ready", "drained": True}, "drain", "done: the workers saved a checkpoint and exited"),
        ({"status": "ready", "reason": "DrainTimedOut"}, "drain", "failed: the workers did not exit in time"),
        (
            {"status": "faulted", "reason": "WorkerCrash", "failure": {"message": "one\n\x1b[2Jtwo", "time": "2027-01-15T07:59:50Z"}},
            "last fault",
            "WorkerCrash, 10 s ago (2027-01-15 07:59:50 UTC)\none\n?[2Jtwo",
        ),
        ({"progress": {"main": {"progressCount": 9, "progressData": "/d"}}}, "checkpoint", "main: step 9, /d"),
        ({"terminating": True, "transitions": {}}, "state", "running; the pod is being terminated (SIGTERM)"),
    ],
)  # fmt: skip
def test_what_else_there_is_to_tell(changes: dict[str, Any], name: str, text: str) -> None:
    assert told({**RUNNING, **changes})[name] == text


def test_an_agent_of_another_make_tells_what_it_can() -> None:
    found = told({"status": "faulted", "reason": "WorkerCrash", "message": "boom"})
    assert (found["state"], found["last fault"], found["workers"]) == ("faulted", "WorkerCrash: boom", "unknown")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (119, "119 s"), (120, "2 min"), (7199, "119 min"), (7200, "2 h 0 min"), (200_000, "2 d 7 h")],
)
def test_spans_of_time(seconds: float, text: str) -> None:
    assert status_text._span(seconds) == text


def test_every_field_of_an_answer_that_has_it() -> None:
    """The same answer with each part missing in turn says less, and nothing wrong."""
    seen = told({**RUNNING, "reason": "Testing", "details": {**RUNNING["details"], "is_warm": False, "restarts": 1}})
    assert seen["state"].endswith(", Testing")
    assert seen["workers"] == "2 on this pod, world size 4, 4 warm starts, 1 cold start, warm starts are off"
    assert seen["generation"] == "3, group rank 1 of 2, 1 restart on this pod"
    bare = told({"status": "ready"})
    assert bare["agent"] == "port 7000, version unknown"
    assert bare["checkpoint"] == "none reported"
    assert bare["last fault"] == "none"
    assert told({**RUNNING, "details": {}})["generation"] == "3, group rank 1 of unknown"
    assert told({"status": "faulted"})["last fault"] == "unknown: no message"
    assert told({"status": "faulted", "reason": "R", "failure": {"time": "?"}})["last fault"] == "R\nno message"
    assert told({"status": "faulted", "failure": {"message": "m"}})["last fault"] == "fault\nm"
    two = {"progress": {"b": {"progressCount": 1}, "a": {"progressData": "/a"}, "c": 7}}
    assert told({**RUNNING, **two})["checkpoint"] == "a: step unknown, /a\nb: step 1, "
    partial = {"worker": {"step": 0, "samples": 0, "loss": 0.0}}
    assert told({**RUNNING, **partial})["training"] == "step 0, 0 samples, loss 0"
    assert told({**RUNNING, "spare": "true"})["generation"].endswith("held as a spare, 2 restarts on this pod")
    assert told({**RUNNING, "worker_note": 1, "message": "a\tb"})["drain"] == "none"
