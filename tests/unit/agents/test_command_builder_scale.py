"""Calls for many agents: what they share is worked out once and written once."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import aiohttp
from tests.unit.agents.fake_agent import FakeAgent, serving
from tests.unit.core.builders import pod, ready, trains

from elastipod_operator.agents.command_builder import CommandBuilder
from elastipod_operator.agents.commands import Command, CommandSender
from elastipod_operator.agents.polled_agent import Address
from elastipod_operator.core.actions import StartWorkers
from elastipod_operator.core.record import RestartMode
from elastipod_operator.core.snapshot import ObservedAgent

SIZE = 300


class CountingStatuses:
    """A status cache of agents with in-process restart, that counts what it is asked for all pods."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def fact(self, uid: str) -> ObservedAgent:
        return ready(restart_mode=RestartMode.IN_PROCESS)

    def progress(self, uids: Iterable[str], generation: int = 0) -> dict[str, Any]:
        self.asked.append(f"progress of {len(list(uids))}")
        return {"at": 7}

    def worker_data(self, uids: Iterable[str]) -> list[Any]:
        self.asked.append(f"data of {len(list(uids))}")
        return [{"rank": 0}]


def test_what_all_agents_are_told_is_worked_out_once() -> None:
    statuses: Any = CountingStatuses()
    pods = [pod(number) for number in range(SIZE)]
    commands = CommandBuilder(
        {"nprocPerNode": "8"}, {one.name: one for one in pods}, trains(SIZE, 3), statuses,
        lambda one: Address("job", one.ip, 8080),
    )  # fmt: skip
    calls = [commands.build(StartWorkers(one.name, rank)) for rank, one in enumerate(pods)]
    assert sorted(statuses.asked) == [f"data of {SIZE}", f"progress of {SIZE}"]
    bodies = [call.body for call in calls if call is not None and call.body is not None]
    assert [body["rank"] for body in bodies] == list(range(SIZE))
    assert len({id(body["rankIps"]) for body in bodies}) == 1
    assert len(bodies[0]["rankIps"]) == 8 * SIZE


async def test_what_commands_share_is_written_once_and_arrives_whole(monkeypatch: Any) -> None:
    written: list[Any] = []
    write = json.dumps

    def dumps(value: Any) -> str:
        written.append(value)
        return write(value)

    monkeypatch.setattr(json, "dumps", dumps)
    shared, data = [{"rank": rank, "ip": "10.0.0.1"} for rank in range(50)], {"ü": [None, True, 1.5]}
    async with serving(FakeAgent()) as agent, aiohttp.ClientSession() as session:
        bodies = [{"rank": rank, "rankIps": shared, "progress": data, "worker_data": None} for rank in range(20)]
        commands = [
            Command(f"pod-{rank}", agent.address, "/start", body, ("start", "1")) for rank, body in enumerate(bodies)
        ]
        assert await CommandSender(session).send(commands) == []
    assert sorted((body for _, body in agent.posts), key=lambda body: body["rank"]) == bodies
    assert sum(value is shared for value in written) == 1
    assert sum(value is data["ü"] for value in written) == 1


async def test_a_body_of_nothing_but_shared_parts_and_an_empty_one_arrive() -> None:
    async with serving(FakeAgent()) as agent, aiohttp.ClientSession() as session:
        for number, body in enumerate(({"a": [1], "b": {}}, {})):
            await CommandSender(session).send([Command("pod", agent.address, "/update", body, (number,))])
    assert [body for _, body in agent.posts] == [{"a": [1], "b": {}}, {}]
