"""What the answers to the shell's own writes bring: edits that no watch will tell as new, pods that went by themselves."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
from tests.unit.agents.fake_agent import until
from tests.unit.core.builders import pod
from tests.unit.kube.bodies import JOB_UID
from tests.unit.operator_shell.shells import Decisions, Shell, decide_again, settled
from tests.unit.operator_shell.test_reconciler_order import Notes, carried_out, decided

from elastipod_operator import clock, reconcile_pass
from elastipod_operator.core.actions import DeletePod, Plan, ShutDownAgent
from elastipod_operator.core.plan import plan
from elastipod_operator.core.snapshot import Snapshot
from elastipod_operator.kube.api import ApiError


async def test_an_edit_that_comes_with_the_answer_to_the_last_write_is_acted_on(
    shell: Shell, decisions: Decisions, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = clock.wait

    async def until_woken(wake: asyncio.Event, due: object) -> None:
        """A timer would have the edit found, too, only later."""
        await wait(wake, None)

    def edit(job: dict[str, Any]) -> None:
        job["spec"]["runPolicy"] = {"suspend": True}

    shell.submit()
    await settled(shell)
    await decide_again(shell, decisions)
    shell.server.before_status = edit
    monkeypatch.setattr(clock, "wait", until_woken)
    waits = shell.server.pods["job-workers-0"]
    said = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}
    waits["status"] = {"phase": "Pending", "conditions": [said]}
    shell.store.put_pod(copy.deepcopy(shell.server.put(shell.server.pods, waits)))
    shell.reconciler.wake(JOB_UID)
    await until(lambda: shell.state().get("reason") == "SuspendedByUser")


async def test_a_record_is_written_over_the_version_that_its_decision_saw_and_no_newer_one(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    def edit() -> None:
        body = shell.server.jobs["job"]
        body["spec"]["runPolicy"] = {"suspend": True}
        shell.watch_shows(shell.server.put(shell.server.jobs, body))

    def edited_right_after(observed: Snapshot) -> Plan:
        if not seen:
            asyncio.get_running_loop().call_soon(edit)
        seen.append(observed.job.policy is not None and observed.job.policy.suspend)
        return plan(observed)

    monkeypatch.setattr(reconcile_pass, "plan", edited_right_after)
    shell.submit()
    await until(lambda: shell.state().get("reason") == "SuspendedByUser")
    writes = [call for call in shell.server.calls if call[1] == "job"]
    assert writes[:3] == [("PATCH", "job"), ("GET", "job"), ("PATCH", "job")], "the first one was refused"
    assert seen[:2] == [False, True]
    assert shell.server.pods == {}


@pytest.mark.parametrize(("status", "words"), [(404, "not found"), (409, "Precondition failed: UID in precondition")])
async def test_a_pod_that_is_gone_or_another_one_by_now_keeps_nothing_from_its_way(status: int, words: str) -> None:
    class Gone(Notes):
        async def delete_pod(self, namespace: str, name: str, uid: str, **how: Any) -> dict[str, Any]:
            if name == pod(0).name:
                raise ApiError(status, f"pods {name}: {words}")
            return await super().delete_pod(namespace, name, uid, **how)

    go = [action for p in (pod(0), pod(1)) for action in (ShutDownAgent(p.name), DeletePod(p.name, p.uid, "a test"))]
    assert sorted(await carried_out(Gone(), decided(*go))) == ["/shutdown", "/shutdown", "delete"]
