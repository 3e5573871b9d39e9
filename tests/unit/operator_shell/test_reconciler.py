"""The shell around the decisions: what it writes, in which order, and that nothing ends its care for a job."""

from __future__ import annotations

import asyncio
import copy
import math
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from prometheus_client import REGISTRY
from tests.unit.agents.fake_agent import until
from tests.unit.kube.bodies import JOB_UID, job_body
from tests.unit.operator_shell.shells import Decisions, Shell, decide_again, settled

from elastipod_operator import pod_control
from elastipod_operator.core.names import ANNOTATION_STATE, FINALIZER, PodId
from elastipod_operator.core.phase_accounting import Phase
from elastipod_operator.core.reasons import OpenReason
from elastipod_operator.core.record import PhaseTimes, Record, Transition, TransitionKind
from elastipod_operator.core.record_codec import encode
from elastipod_operator.kube.applied import pending_edits

Body = dict[str, Any]


async def test_the_record_is_written_first_then_the_status_then_the_pods(shell: Shell) -> None:
    shell.submit()
    await settled(shell)
    writes = [call for call in shell.server.calls if call[0] != "GET"]
    assert writes[:3] == [("PATCH", "job"), ("PATCH", "status"), ("POST", "pods")]
    assert writes.count(("POST", "pods")) == 4
    meta = shell.server.jobs["job"]["metadata"]
    assert FINALIZER in meta["finalizers"]
    assert ANNOTATION_STATE in meta["annotations"]
    assert shell.state()["type"] == "Created"


async def test_events_that_take_their_time_keep_no_decision_waiting_and_are_written_at_the_end(
    shell: Shell, decisions: Decisions
) -> None:
    shell.server.hold_events.clear()
    shell.submit({"replicas": 1, "elasticPolicy": {"minReplicas": 9, "maxReplicas": 2}})
    await until(lambda: shell.state().get("reason") == "InvalidSpec" and ("POST", "events") in shell.server.calls)
    await decide_again(shell, decisions)
    assert shell.server.events == []
    shell.server.hold_events.set()
    await shell.reconciler.close()
    assert [event["reason"] for event in shell.server.events] == ["InvalidSpec"]


async def test_what_is_as_it_should_be_is_not_written_again(shell: Shell, decisions: Decisions) -> None:
    shell.submit()
    await settled(shell)
    await decide_again(shell, decisions)
    before = len(shell.server.calls)
    await decide_again(shell, decisions)
    assert shell.server.calls[before:] == []


async def test_every_decision_knows_when_the_pods_were_listed(shell: Shell, decisions: Decisions) -> None:
    shell.submit()
    await until(lambda: len(decisions) >= 1)
    assert decisions[0].pods_listed_at is not None


async def test_a_job_that_nobody_wrote_to_is_taken_to_have_no_pods(shell: Shell, decisions: Decisions) -> None:
    shell.submit()
    await settled(shell)
    await decide_again(shell, decisions)
    assert ("GET", "pods") not in shell.server.calls


async def test_pods_are_listed_when_another_operator_has_just_taken_the_job_up(shell: Shell) -> None:
    untouched = copy.deepcopy(shell.server.put(shell.server.jobs, job_body()))
    shell.watch_shows(untouched)
    await settled(shell)
    shell.reconciler.forget(JOB_UID)
    before = len(shell.server.calls)
    shell.watch_shows(untouched)
    await until(lambda: ("GET", "pods") in shell.server.calls[before:])
    await until(lambda: len(shell.store.jobs[JOB_UID].pods) == 4)
    assert ("POST", "pods") not in shell.server.calls[before:]


async def test_a_job_that_went_while_the_watch_was_broken_is_forgotten(shell: Shell) -> None:
    shell.watch_shows(job_body())
    await until(lambda: shell.store.jobs == {})


async def test_a_job_made_anew_under_its_name_is_taken_up_before_the_watch_tells(shell: Shell) -> None:
    shell.server.put(shell.server.jobs, job_body(uid="new"))
    shell.watch_shows(job_body())
    await until(lambda: len(shell.server.pods) == 4)
    assert list(shell.store.jobs) == ["new"]
    owners = {pod["metadata"]["ownerReferences"][0]["uid"] for pod in shell.server.pods.values()}
    assert owners == {"new"}


async def test_a_write_on_an_old_version_is_decided_anew(shell: Shell) -> None:
    old = job_body()
    shell.server.put(shell.server.jobs, job_body({"replicas": 1}))
    shell.watch_shows(old)
    await until(lambda: len(shell.server.pods) == 1)


async def test_an_edit_that_comes_with_the_answer_to_a_write_is_not_missed(shell: Shell) -> None:
    def edit(job: Body) -> None:
        job["spec"]["runPolicy"] = {"suspend": True}

    shell.server.before_status = edit
    shell.submit()
    await until(lambda: "Suspended" in str(shell.server.jobs["job"].get("status")))


async def test_a_name_that_is_taken_by_a_foreign_pod_is_told(shell: Shell) -> None:
    foreign = {"metadata": {"name": "job-workers-0", "namespace": "team", "uid": "foreign"}}
    shell.server.put(shell.server.pods, foreign)
    shell.submit()
    await until(lambda: shell.condition("PodsReady").get("reason") == "PodsRefused")
    assert "pod job-workers-0 exists and does not belong to this job" in shell.condition("PodsReady")["message"]
    assert len(shell.server.pods) == 4


async def test_a_quota_is_told_and_asked_again_later(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_control, "REFUSAL_FIRST_S", 0.05)
    shell.server.refuse_pods = (403, "exceeded quota: compute")
    shell.submit()
    await until(lambda: "exceeded quota: compute" in shell.condition("PodsReady").get("message", ""))
    shell.server.refuse_pods = None
    await settled(shell)
    await until(lambda: shell.condition("PodsReady") == {})


async def test_a_job_that_is_deleted_goes_and_is_forgotten(shell: Shell) -> None:
    shell.submit(deletionTimestamp="2026-03-01T12:00:01Z", finalizers=[FINALIZER])
    await until(lambda: shell.server.jobs == {})
    await until(lambda: shell.store.jobs == {})


async def test_a_spec_that_cannot_be_used_is_told_and_its_job_can_be_deleted(shell: Shell) -> None:
    shell.submit({"elasticPolicy": {"minReplicas": 9, "maxReplicas": 2}})
    await until(lambda: shell.state().get("reason") == "InvalidSpec")
    job = shell.server.jobs["job"]
    job["metadata"]["deletionTimestamp"] = "2026-03-01T12:00:01Z"
    shell.watch_shows(shell.server.put(shell.server.jobs, job))
    await until(lambda: shell.store.jobs == {} and shell.server.jobs == {})


async def test_a_decision_that_fails_ends_nothing(shell: Shell, decisions: Decisions) -> None:
    decisions.fail = 1
    shell.submit()
    await until(lambda: len(decisions) == 1)
    shell.reconciler.wake(JOB_UID)
    await settled(shell)


async def test_an_api_server_that_is_out_of_order_is_waited_for(shell: Shell) -> None:
    shell.server.is_broken = True
    shell.submit()
    await until(lambda: len(shell.server.calls) >= 2)
    shell.server.is_broken = False
    await settled(shell)


async def test_after_close_nothing_is_decided_any_more(shell: Shell, decisions: Decisions) -> None:
    await shell.reconciler.close()
    shell.submit()
    await asyncio.sleep(0)
    assert decisions == []


async def test_pods_are_made_from_the_templates_as_they_were_taken_up(shell: Shell, decisions: Decisions) -> None:
    shell.submit()
    await settled(shell)
    assert set(pending_edits(shell.server.jobs["job"])) == set()
    job = shell.server.jobs["job"]
    job["spec"]["replicaSpecs"][0]["template"]["spec"]["containers"][0]["image"] = "train:2"
    job["metadata"]["annotations"][ANNOTATION_STATE] = encode(Record(generation=1, members=(PodId("workers", 0, 0),)))
    shell.watch_shows(shell.server.put(shell.server.jobs, job))
    await until(lambda: shell.condition("Warning").get("reason") == "EditsPending")
    made = {pod["spec"]["containers"][0]["image"] for pod in shell.server.pods.values()}
    assert made == {"train:1"}


async def test_workers_are_told_of_as_many_as_their_pods_were_made_for(shell: Shell) -> None:
    """An edit of nprocPerNode acts at the next suspend and resume, and so do the addresses that follow from it."""
    shell.submit({"nprocPerNode": "2"})
    await settled(shell)
    job = shell.server.jobs["job"]
    job["spec"]["nprocPerNode"] = "8"
    shell.watch_shows(shell.server.put(shell.server.jobs, job))
    known = shell.store.jobs[JOB_UID]
    assert known.fact.pending_edits == ("spec.nprocPerNode",)
    orders = shell.reconciler._agents.command_builder(known, Record(generation=1, members=(PodId("workers", 0, 0),)))
    assert orders is not None
    assert orders._rank_ips is not None
    assert len(orders._rank_ips) == 2


async def test_the_record_of_a_newer_operator_is_not_overwritten(shell: Shell) -> None:
    newer = '{"v":99}'
    shell.submit(annotations={ANNOTATION_STATE: newer}, finalizers=[FINALIZER])
    shell.server.jobs["job"]["status"] = {"restartCount": 7}
    shell.watch_shows(shell.server.put(shell.server.jobs, shell.server.jobs["job"]))
    await until(lambda: shell.condition("Warning").get("reason") == "RecordOfNewerOperator")
    job = shell.server.jobs["job"]
    assert job["metadata"]["annotations"] == {ANNOTATION_STATE: newer}
    assert job["status"]["restartCount"] == 7, "the status is the one that the newer operator wrote"
    assert shell.server.pods == {}


def sample(name: str, phase: str = "", **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels | ({"phase": phase} if phase else {})) or 0.0


def spent(phase: str, depth: str = "") -> float:
    return sample("elastipod_phase_seconds_sum", phase, depth=depth)


async def test_the_metrics_tell_of_the_time_of_the_jobs(shell: Shell) -> None:
    """The time that an earlier operator booked is not counted again; what follows is, when the phase changes."""
    booked, now = spent("starting"), sample("elastipod_jobs_in_phase", "scheduling")
    trained, waited = (
        spent("training"),
        sample("elastipod_jobs_in_phase", Phase.WAITING),
    )
    began = datetime.now(UTC) - timedelta(seconds=100)
    phase_times = PhaseTimes(Phase.STARTING, began.replace(microsecond=0), (("starting", 5_000), ("training", 300_000)))
    begun = Transition(
        kind=TransitionKind.RECOVERY, cause=OpenReason("WorkerCrash"), message="", from_size=2, target_size=2,
        began_at=began, detected_at=began,
        deadline=began, is_budget_checked=True,
    )  # fmt: skip
    record = Record(generation=1, members=(PodId("workers", 0, 0),), transition=begun, phase_times=phase_times)
    shell.submit(annotations={ANNOTATION_STATE: encode(record)})
    await until(lambda: sample("elastipod_jobs_in_phase", Phase.WAITING) == waited + 1)
    assert spent("starting") - booked == pytest.approx(100, abs=30)
    assert spent("training") == trained
    await until(lambda: not math.isnan(sample("elastipod_goodput_ratio")))
    assert sample("elastipod_goodput_ratio") == pytest.approx(300 / 405, abs=0.1)
    shell.reconciler.forget(JOB_UID)
    assert sample("elastipod_jobs_in_phase", Phase.WAITING) == waited
    assert sample("elastipod_jobs_in_phase", "scheduling") == now
