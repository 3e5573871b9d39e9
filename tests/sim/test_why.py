"""`elastipod why` in staged situations: the objects are those of the operator as it is shipped, in virtual time."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tests.sim.events import Event
from tests.sim.plain_workloads import PlainGang
from tests.sim.random_schedules import Schedule
from tests.sim.scripted_jobs import scripted_job as job
from tests.sim.scripted_queue_schedules import SMALL, WHOLE
from tests.sim.scripted_queue_schedules import _schedule as queued
from tests.sim.staged import Play, no_image, no_room, stage, too_much_memory

from elastipod_client.explanation import Explanation, explain
from elastipod_client.situation import Situation


@dataclass(frozen=True)
class Stage:
    """A schedule, the moment that is explained, and what a kubelet or scheduler does that the model lacks."""

    schedule: Schedule
    at: float
    play: Play | None = None
    total_steps: int | None = None
    until: str = ""
    signals: str = ""

    def objects(self) -> Situation:
        return stage(self.schedule, self.at, self.play, self.total_steps, self.until, self.signals)


# What depends on the model's delays and draws: times, which pod or node was hit, how far the training was.
DRAWN = (
    (r"\d\d:\d\d:\d\d UTC", "T"),
    (r"for \d+ s\b", "for AGE"),
    (r"\(\d+ (?:s|min)\)", "(AGE)"),
    (r"\d+ (?:s|min) after it was created", "AGE after it was created"),
    (r"; its node node-\d+ is cordoned", ""),
    (r"node-\d+", "node-N"),
    (r"train-workers-\d+(?:-\d+)?", "train-workers-N"),
    (r"rank \d+", "rank N"),
    (r"no step after \d+", "no step after N"),
    (r"log rule \w+: ", ""),
    (r" It trained for \d+% of [^.]+\.", ""),
    (r"cause Worker\w+|Worker\w+(?=: group rank)", "WorkerCrash"),
)


def without_times(text: str) -> str:
    """Replace what no reader needs to be the same in each run."""
    for pattern, word in DRAWN:
        text = re.sub(pattern, word, text)
    return text


STAGES = {
    "trains at its maximum": Stage(job(), 60),
    "its pods were created a moment ago": Stage(job(), 0.4),
    "trains, and no node has room for more": Stage(job(nodes=3), 60, no_room),
    "too few nodes to start": Stage(job(nodes=1), 60, no_room),
    "no scheduler knows the pods": Stage(job(nodes=1), 60),
    "grows": Stage(job(Event(60, "add_node"), nodes=3), 61, no_room, until="Resizing"),
    "a growth waits for the snooze": Stage(
        job(Event(60, "crash_worker", 0), Event(65, "add_node"), nodes=3, scaleUpSnoozeTimeInSeconds=90), 100, no_room
    ),
    "recovers from the loss of a node": Stage(job(Event(100, "kill_node", 1)), 100, no_room, until="Recovering"),
    "trains with fewer after the loss of a node": Stage(job(Event(100, "kill_node", 1)), 200, no_room),
    "a worker failed": Stage(job(Event(100, "crash_worker", 1)), 100, until="Recovering"),
    "made no progress": Stage(job(*(Event(100 + 8 * n, "crash_worker", n) for n in range(5))), 145),
    "used up its retries": Stage(job(*(Event(100 + 10 * n, "crash_worker", n) for n in range(4)), retries=2), 160),
    "a node is drained": Stage(job(Event(100, "drain_node", 1)), 100, until="Resizing"),
    "a node's condition drains it": Stage(
        job(Event(100, "sicken_gpu", 1)), 100, until="Resizing", signals="drain condition GpuUnhealthy=True"
    ),
    "left a node whose condition drains it": Stage(
        job(Event(100, "sicken_gpu", 1)), 200, no_room, signals="drain condition GpuUnhealthy=True"
    ),
    "no pod is placed on a node with a condition": Stage(
        job(Event(60, "add_node"), Event(60, "sicken_gpu", 3), nodes=3),
        120,
        no_room,
        signals="stop-placing condition GpuUnhealthy=True",
    ),
    "a node announces what is to be ignored": Stage(
        job(Event(100, "taint_node", 1)), 130, signals="ignore taint karpenter.sh/disrupted"
    ),
    "left a node that failed again": Stage(
        job(
            *(Event(100 + 60 * n, "crash_worker", 0) for n in range(2)),
            maxNumRepeatOffendersToAvoid=1,
            evalPeriodSeconds=900,
        ),
        240,
        no_room,
    ),
    "was scaled down": Stage(job(Event(100, "scale", 1)), 130),
    "is suspended": Stage(job(Event(100, "suspend", 0, 100)), 180),
    "stops its workers for a suspension": Stage(job(Event(100, "suspend", 0, 100)), 100, until="SuspendedByUser"),
    "no agent answers": Stage(job(Event(100, "hide_all", 0, 100)), 140),
    "a ResourceQuota refuses its pods": Stage(job(Event(0, "creates_refused", 0, 100)), 40),
    "a ResourceQuota refuses its growth": Stage(
        job(Event(100, "creates_refused", 0, 300), Event(101, "force_delete_pod", 2)), 200
    ),
    "its spec was edited to nonsense": Stage(job(Event(60, "break_spec", 4, 120)), 100),
    "its template was edited": Stage(job(Event(60, "edit_template", 7)), 100),
    "is being deleted": Stage(job(Event(100, "delete_job")), 100.5),
    "its pods cannot be deleted": Stage(job(Event(99, "deletes_refused", 0, 100), Event(100, "suspend", 0, 100)), 180),
    "there is no operator": Stage(job(Event(0.001, "operator_dies", 1, 300)), 60),
    "has completed": Stage(job(), 200, None, 60),
    "waits for the quota of its base": Stage(queued(plain_gangs=(PlainGang(0.0, 3, 0, runs_s=100.0),)), 60),
    "lost the quota of its increments": Stage(queued(plain_gangs=(SMALL,)), 140),
    "was preempted and waits": Stage(queued(plain_gangs=(WHOLE,)), 130),
    "is being preempted": Stage(queued(plain_gangs=(WHOLE,)), 99, until="Preempted"),
    "its Workload was deactivated": Stage(queued(Event(100.0, "deactivate", 0, 60.0)), 130),
    "Kueue is away": Stage(queued(Event(0.0, "kueue_away", 0, 60.0)), 40),
    "an image cannot be pulled": Stage(job(), 60, no_image),
    "a container used too much memory": Stage(
        job(Event(100, "kill_container", 0), low=1, high=1, nodes=1), 100, too_much_memory, until="Recovering"
    ),
    "did not start in time": Stage(job(nodes=1, deadlines={"startupDeadlineSeconds": 60}), 100, no_room),
    "room for a part of an increment": Stage(
        job(low=2, high=6, nodes=5, specs=[{"name": "workers", "replicas": 2, "maxReplicas": 6}], step=4), 170, no_room
    ),
}


PARAGRAPHS = dict(
    (section.split("\n", 1)[0], " ".join(section.split("\n", 1)[1].split()))
    for section in (Path(__file__).parent / "why_paragraphs.txt").read_text().split("\n## ")[1:]
)


def test_every_situation_has_a_paragraph_and_there_are_many() -> None:
    assert set(PARAGRAPHS) == set(STAGES)
    assert len(STAGES) >= 30


@pytest.mark.parametrize("name", STAGES)
def test_the_paragraph(name: str) -> None:
    assert without_times(explain(STAGES[name].objects()).text) == PARAGRAPHS[name]


def explained(schedule: Schedule, at: float) -> Explanation:
    return explain(stage(schedule, at))


@pytest.mark.parametrize(
    ("schedule", "at", "expected"),
    [
        pytest.param(job(), 60.0, False, id="training at the maximum"),
        pytest.param(job(Event(100, "suspend", 0, 100)), 180.0, False, id="suspended on purpose"),
        pytest.param(queued(plain_gangs=(WHOLE,)), 130.0, False, id="waiting for quota"),
        pytest.param(job(Event(100, "hide_all", 0, 100)), 140.0, True, id="no agent answers"),
        pytest.param(job(Event(60, "break_spec", 4, 120)), 100.0, True, id="an invalid edit"),
    ],
)
def test_only_what_a_person_must_look_at_needs_attention(schedule: Schedule, at: float, expected: bool) -> None:
    assert explained(schedule, at).needs_attention is expected


def test_times_are_those_of_what_is_told() -> None:
    """The wait for nodes began when the smaller generation began to train, not with the job's first condition Scaling."""
    staged = Stage(job(nodes=3), 300.0, no_room).objects()
    (blocker,) = explain(staged).blockers
    started = explain(staged).since
    assert started is not None
    assert blocker.since is not None
    assert abs((blocker.since - started).total_seconds()) < 5
    assert (staged.now - blocker.since).total_seconds() > 200


def test_of_a_cluster_that_may_not_be_read_the_rest_is_explained() -> None:
    staged = replace(Stage(job(nodes=3), 60.0, no_room).objects(), nodes={}, unread={"nodes": "nodes is forbidden"})
    text = explain(staged).text
    assert "WaitingForCapacity: 1 more replica is wanted" in text
    assert "Not read, so there may be more: nodes: nodes is forbidden." in text
    assert "does not exist any more" not in text


def queue_of(kind: str, name: str, **more: Any) -> dict[str, Any]:
    active = {"type": "Active", "status": "False", "reason": "Stopped", "message": f"{kind} {name} is stopped"}
    return {"metadata": {"name": name}, "status": {"conditions": [active]}, **more}


WAITING = Stage(queued(plain_gangs=(WHOLE,)), 130.0)


def test_a_queue_that_is_gone() -> None:
    text = explain(replace(WAITING.objects(), local_queue=None)).text
    assert "QueueMissing: LocalQueue training does not exist in the job's namespace. To do: create it" in text


def test_a_cluster_queue_that_is_stopped() -> None:
    staged = replace(WAITING.objects(), cluster_queue=queue_of("ClusterQueue", "gpus", spec={"stopPolicy": "Hold"}))
    assert "QueueStopped: ClusterQueue gpus admits nothing: ClusterQueue gpus is stopped" in explain(staged).text


def test_a_cluster_queue_that_lacks_something() -> None:
    staged = replace(WAITING.objects(), cluster_queue=queue_of("ClusterQueue", "gpus"))
    assert "QueueInactive: ClusterQueue gpus admits nothing" in explain(staged).text


def test_how_full_the_queue_is() -> None:
    """What others use is said once, with what waits for it."""
    resources = [{"name": "cpu", "nominalQuota": "4", "total": "4"}]
    full = {
        "metadata": {"name": "gpus"},
        "spec": {"resourceGroups": [{"flavors": [{"name": "x", "resources": resources}]}]},
        "status": {"flavorsUsage": [{"name": "x", "resources": resources}], "pendingWorkloads": 1},
    }
    text = explain(replace(WAITING.objects(), cluster_queue=full)).text
    assert text.count("(ClusterQueue gpus: 4 of 4 cpu used (flavor x), pending Workloads: 1)") == 1


def test_pods_that_should_have_ended() -> None:
    staged = Stage(job(Event(100, "delete_job")), 100.5).objects()
    late = [
        {**pod, "metadata": {**pod["metadata"], "deletionTimestamp": "2026-01-01T00:00:30Z"}} for pod in staged.pods
    ]
    text = explain(replace(staged, pods=late)).text
    assert "pod train-workers-0 on node" in text
    assert "should have ended by now, and is still there" in text


def test_where_the_time_went() -> None:
    """Only of a job that has trained; a suspension is not its own time."""
    trained = explain(Stage(job(Event(100, "suspend", 0, 100), Event(250, "crash_worker", 1)), 300).objects())
    assert re.search(
        r" It trained for \d\d% of the 3 min outside queues and suspensions; resizes and recoveries took \d\d s until new steps\.",
        trained.text,
    ), trained.text
    assert trained.as_json()["goodput"] in trained.text
    assert not explain(Stage(job(), 1).objects()).goodput
