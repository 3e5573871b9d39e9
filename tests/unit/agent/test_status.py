"""The status store: its version, its waiters, and the shape of /status."""

from __future__ import annotations

import asyncio

from tests.patience import PATIENCE_S

from elastipod.worker_file import Progress
from elastipod_agent.core.states import AgentState as S
from elastipod_agent.status import StatusStore


def status_store() -> StatusStore:
    return StatusStore(lambda: "now")


async def test_the_version_grows_with_changes_only() -> None:
    one = status_store()
    one.set(drained=True)
    one.set(drained=True)
    assert one.current.version == 2
    one.enter(S.READY)
    assert (one.current.version, one.current.state) == (3, S.READY)


async def test_several_moves_are_one_change() -> None:
    one = status_store()
    one.enter(S.READY)
    one.enter(S.RUNNING)
    before = one.current.version
    one.enter(S.STOPPING, S.READY, drained=True)
    assert one.current.version == before + 1
    assert list(one.current.transitions) == ["INIT", "READY", "RUNNING", "STOPPING"]


async def test_waiting_ends_with_the_next_change_or_at_once_when_it_was_missed() -> None:
    one = status_store()
    waiting = asyncio.ensure_future(one.wait_beyond(1, 30))
    await asyncio.sleep(0)
    one.set(terminating=True)
    await asyncio.wait_for(waiting, PATIENCE_S)
    await asyncio.wait_for(one.wait_beyond(1, 30), PATIENCE_S)
    await asyncio.wait_for(one.wait_beyond(99, 30), PATIENCE_S)
    await asyncio.wait_for(one.wait_beyond(2, 0.01), PATIENCE_S)


async def test_optional_fields_appear_with_their_values() -> None:
    one = status_store()
    fields = set(one.as_json(None))
    assert {"status", "transitions", "agent_version", "protocol", "version", "generation", "failure"} <= fields
    assert {"drained", "terminating", "boot_id", "worker"} <= fields
    assert not {"reason", "message", "assigned_rank", "spare", "progress", "worker_data"} & fields
    one.set(assigned_rank=2, is_spare=False, reason="Drained", worker_data=[1])
    seen = one.as_json(Progress(3, 96, float("inf"), None, 4, 9.0, 500))
    assert (seen["assigned_rank"], seen["spare"], seen["reason"], seen["worker_data"]) == ("2", "False", "Drained", [1])
    assert seen["worker"] == {
        "step": 3,
        "samples": 96,
        "loss": None,
        "samples_per_s": None,
        "world_size": 4,
        "total_steps": 500,
        "time": 9.0,
    }
