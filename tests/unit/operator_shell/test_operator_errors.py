"""Mistakes of the operator itself: none ends the care for a job, and users are told of each."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client import REGISTRY
from tests.unit.agents.fake_agent import until
from tests.unit.kube.bodies import JOB_UID, job_body
from tests.unit.operator_shell.shells import Shell

from elastipod_operator import kopf_handlers, pod_creation, reconcile_pass
from elastipod_operator import reconciler as reconciler_module
from elastipod_operator.core.actions import Plan
from elastipod_operator.core.plan import plan
from elastipod_operator.core.snapshot import Snapshot
from elastipod_operator.job_agents import JobAgents
from elastipod_operator.kube import api as api_module
from elastipod_operator.watch_events import WatchEvents


class Broken:
    """Decisions that fail as long as `error` is set."""

    error: BaseException | None = None
    made = 0

    def __call__(self, seen: Snapshot) -> Plan:
        self.made += 1
        if self.error is not None:
            raise self.error
        return plan(seen)


@pytest.fixture
def decisions(monkeypatch: pytest.MonkeyPatch) -> Broken:
    """The real decisions, which can be made to fail."""
    broken = Broken()
    monkeypatch.setattr(reconcile_pass, "plan", broken)
    return broken


def failed_passes() -> float:
    return REGISTRY.get_sample_value("elastipod_operator_errors_total", {"what": "pass"}) or 0.0


async def test_a_decision_that_fails_by_our_own_mistake_is_told_until_one_works(
    shell: Shell, decisions: Broken
) -> None:
    shell.submit()
    await until(lambda: len(shell.server.pods) == 4 and bool(shell.state()))
    state, counted = shell.state(), failed_passes()
    decisions.error = KeyError("secret-value")
    shell.reconciler.wake(JOB_UID)
    await until(lambda: shell.condition("Warning").get("reason") == "OperatorError")
    message = shell.condition("Warning")["message"]
    assert "KeyError in reconcile_pass.py line " in message
    assert "secret-value" not in message, "an exception may quote what the job holds"
    assert shell.state() == state, "the state stays the last condition"
    assert failed_passes() == counted + 1
    shell.reconciler.wake(JOB_UID)
    await until(lambda: decisions.made >= 3 and failed_passes() == counted + 2)
    decisions.error = None
    shell.reconciler.wake(JOB_UID)
    await until(lambda: shell.condition("Warning") == {})
    await shell.reconciler.close()
    assert [e["reason"] for e in shell.server.events].count("OperatorError") == 1, "told once, however often it fails"


async def test_a_job_whose_first_decision_fails_says_so(shell: Shell, decisions: Broken) -> None:
    decisions.error = RuntimeError("no")
    shell.submit()
    await until(lambda: shell.condition("Warning").get("reason") == "OperatorError")
    assert shell.state()["type"] == "Created"


async def test_a_pass_that_fails_after_its_decision_is_told_too_and_its_warning_does_not_come_and_go(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_orders(*_: object) -> None:
        raise IndexError("orders")

    shell.submit()
    await until(lambda: len(shell.server.pods) == 4 and bool(shell.state()))
    with monkeypatch.context() as patch:
        patch.setattr(JobAgents, "command_builder", no_orders)
        shell.reconciler.wake(JOB_UID)
        await until(lambda: shell.condition("Warning").get("reason") == "OperatorError")
        before, counted = shell.server.calls.count(("PATCH", "status")), failed_passes()
        for more in range(1, 4):
            shell.reconciler.wake(JOB_UID)
            await until(lambda more=more: failed_passes() >= counted + more)  # type: ignore[misc]
        assert shell.server.calls.count(("PATCH", "status")) == before
    shell.reconciler.wake(JOB_UID)
    await until(lambda: shell.condition("Warning") == {})


async def test_pods_that_cannot_be_made_by_a_mistake_are_told(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_manifest(*_: object, **__: object) -> None:
        raise IndexError("template")

    with monkeypatch.context() as patch:
        patch.setattr(pod_creation, "pod_manifest", no_manifest)
        shell.submit()
        await until(lambda: shell.condition("PodsReady").get("reason") == "PodsRefused")
    assert "4 pods could not be created" in shell.condition("PodsReady")["message"]
    assert "IndexError in pod_creation.py line " in shell.condition("PodsReady")["message"]


async def test_a_failure_while_a_failure_is_handled_ends_nothing(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job was written by somebody else, and what stands there now makes the very reading of it fail."""
    old = job_body()
    shell.server.put(shell.server.jobs, job_body({"replicas": 1}))
    reads = 0

    async def garbage(*_: object) -> dict[str, Any]:
        nonlocal reads
        reads += 1
        return {}

    with monkeypatch.context() as patch:
        patch.setattr(api_module.Api, "effective_job", garbage)
        shell.watch_shows(old)
        task = shell.reconciler._job_tasks[JOB_UID].task
        await until(lambda: reads >= 2)
        assert shell.reconciler._job_tasks[JOB_UID].task is task, "it goes on, and none has to replace it"
    await until(lambda: len(shell.server.pods) == 1)


async def test_a_task_that_ended_all_the_same_is_replaced(shell: Shell, decisions: Broken) -> None:
    """Whatever ended it: a cancellation that came out of a call is no Exception."""
    shell.submit()
    await until(lambda: len(shell.server.pods) == 4 and bool(shell.state()))
    job_task = shell.reconciler._job_tasks[JOB_UID]
    task = job_task.task
    assert task is not None
    task.cancel()
    await asyncio.wait([task])
    made = decisions.made
    shell.reconciler.wake(JOB_UID)
    await until(lambda: decisions.made > made)


async def test_a_task_that_ended_is_replaced_though_nothing_else_happens(
    shell: Shell, decisions: Broken, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconciler_module, "LAST_RETRY_S", 0.05)
    decisions.error = asyncio.CancelledError()
    shell.submit()
    await until(lambda: decisions.made == 1)
    decisions.error = None
    await until(lambda: len(shell.server.pods) == 4)


async def test_a_pattern_that_no_regular_expression_library_takes_is_refused_and_its_job_can_be_deleted(
    shell: Shell,
) -> None:
    rule = {"name": "r", "logPattern": "a{99999999999}"}
    shell.submit({"runPolicy": {"logMonitoringConfiguration": [rule]}})
    await until(lambda: shell.state().get("reason") == "InvalidSpec")
    assert "spec.runPolicy.logMonitoringConfiguration[0].logPattern" in shell.state()["message"]
    job = shell.server.jobs["job"]
    job["metadata"]["deletionTimestamp"] = "2026-03-01T12:00:01Z"
    shell.watch_shows(shell.server.put(shell.server.jobs, job))
    await until(lambda: shell.store.jobs == {} and shell.server.jobs == {})


async def test_a_watch_outlives_whatever_it_shows(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects that are none are left out; where taking one in fails all the same, that is counted and the next one comes."""
    handlers: list[Any] = [
        handler.fn
        for handler in kopf_handlers.handlers(WatchEvents(shell.store, shell.reconciler))._watching.get_all_handlers()
    ]
    assert len(handlers) == 3
    for body in ({}, {"metadata": None}, {"metadata": {"uid": 7, "labels": 1}}, {"metadata": {"uid": "a", "name": []}}):
        for handler in handlers:
            for kind in (None, "ADDED", "DELETED"):
                await handler(type=kind, body=body)

    def failing(*_: object) -> None:
        raise ZeroDivisionError

    name, labels = "elastipod_operator_errors_total", {"what": "object"}
    before = REGISTRY.get_sample_value(name, labels) or 0.0
    for method in ("put_job", "put_pod", "put_node"):
        monkeypatch.setattr(shell.store, method, failing)
    for handler in handlers:
        await handler(type="ADDED", body=job_body())
    assert (REGISTRY.get_sample_value(name, labels) or 0.0) == before + 3
