"""What stands in the calls at agents: addresses and data for workers that outlive faults, and nothing that a stranger would not know."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.core.builders import agent, pod, ready, running, trains, transition

from elastipod_operator.agents.command_builder import CommandBuilder
from elastipod_operator.agents.polled_agent import Address
from elastipod_operator.core.actions import (
    Action,
    AssignSpare,
    CreatePod,
    PrepareWorkers,
    ShutDownAgent,
    StartWorkers,
    StopWorkers,
)
from elastipod_operator.core.names import PodId, master_port
from elastipod_operator.core.record import Depth, NextGeneration, RestartMode
from elastipod_operator.core.snapshot import AgentState, ObservedAgent

DATA = [{"rank": 0, "data": "a"}]


class Known:
    """A status cache that knows these facts, by the pods' UIDs."""

    def __init__(self, facts: dict[str, ObservedAgent]) -> None:
        self._facts = facts

    def fact(self, uid: str) -> ObservedAgent:
        return self._facts.get(uid, ObservedAgent())

    def progress(self, uids: Iterable[str], generation: int = 0) -> dict[str, Any]:
        return {"at": len(list(uids))}

    def worker_data(self, uids: Iterable[str]) -> list[Any]:
        return DATA


def body_of(action: Action, *facts: ObservedAgent, nproc: str = "auto", **spec: Any) -> Any:
    """Give the body of the call for a job whose pods' agents say this. spec: further fields of it."""
    call = call_of(action, *facts, nproc=nproc, **spec)
    return None if call is None else call.body


def call_of(
    action: Action, *facts: ObservedAgent, nproc: str = "auto", generation: int = 3, served: bool = False, **spec: Any
) -> Any:
    pods = [pod(number) for number in range(len(facts))]
    record = replace(trains(len(facts), generation), agents_serve_store=served)
    statuses: Any = Known({one.uid: fact for one, fact in zip(pods, facts, strict=True)})
    commands = CommandBuilder(
        {"nprocPerNode": nproc, **spec}, {one.name: one for one in pods}, record, statuses,
        lambda one: Address("job", one.ip, 8080 + one.id.ordinal),
    )  # fmt: skip
    return commands.build(action)


START, STOP = StartWorkers(pod(1).name, 1), StopWorkers(pod(1).name, 3, graceful=False, timeout_s=0)


def test_a_start() -> None:
    body = body_of(START, ready(), ready())
    assert (body["rank"], body["nnodes"], body["faultCount"], body["generation"]) == (1, 2, 2, 3)
    assert (body["master_addr"], body["progress"], body["spare"]) == ("10.0.0.0", {"at": 2}, False)
    assert (body["rankIps"], body["worker_data"]) == (None, None)


@pytest.mark.parametrize(
    ("run_policy", "rules"),
    [({"logMonitoringConfiguration": [{"name": "loss"}]}, [{"name": "loss"}]), ({}, None), (None, None)],
)
def test_a_start_carries_the_log_rules(run_policy: Any, rules: Any) -> None:
    assert body_of(START, ready(), ready(), runPolicy=run_policy)["log_monitoring_configuration"] == rules


def test_a_spare_is_told_so() -> None:
    assert body_of(AssignSpare(pod(1).name, 2), ready(), ready())["spare"] is True


@pytest.mark.parametrize(
    "action",
    [START, AssignSpare(pod(1).name, 2), PrepareWorkers(pod(1).name)],
    ids=lambda action: type(action).__name__,
)
def test_what_was_said_in_one_generation_is_said_again_in_the_next(action: Action) -> None:
    said = [call_of(action, ready(), ready(), generation=generation) for generation in (3, 3, 4)]
    assert said[0].key == said[1].key != said[2].key
    assert len({one.path for one in said}) == 1


def test_workers_are_prepared_for_the_generation_after_the_present_one() -> None:
    found = body_of(PrepareWorkers(pod(1).name), ready(), ready())
    met = {"master_addr": body_of(START, ready(), ready())["master_addr"], "master_port": master_port(3)}
    assert found == {"nnodes": 2, "generation": 3, **met}


@pytest.mark.parametrize(
    "action",
    [START, AssignSpare(pod(1).name, 2), PrepareWorkers(pod(1).name)],
    ids=lambda action: type(action).__name__,
)
def test_where_the_workers_of_a_generation_meet_is_what_the_record_says(action: Action) -> None:
    """And nothing that agents say now: each call of a generation must say the same."""
    able = replace(ready(), can_serve_store=True)
    served, hosted = call_of(action, able, agent(generation=None), served=True), call_of(action, able, able)
    assert served.body["store_port"] == 8080, "the port of the agent with group rank 0"
    assert served.body["master_addr"] == "10.0.0.0"
    assert "store_port" not in hosted.body


@pytest.mark.parametrize(
    ("nproc", "addresses"),
    [
        pytest.param("auto", ["10.0.0.0", "10.0.0.1"], id="group ranks, where nobody knows how many workers a pod has"),
        pytest.param("2", ["10.0.0.0", "10.0.0.0", "10.0.0.1", "10.0.0.1"], id="global ranks"),
    ],
)
def test_workers_that_outlive_faults_learn_of_each_other(nproc: str, addresses: list[str]) -> None:
    kept = ready(restart_mode=RestartMode.IN_PROCESS)
    body = body_of(START, kept, kept, nproc=nproc)
    assert body["rankIps"] == [{"rank": rank, "ip": ip} for rank, ip in enumerate(addresses)]
    assert body["worker_data"] == DATA


@pytest.mark.parametrize(("pods", "is_told"), [(512, True), (513, False)])
def test_the_addresses_of_many_are_not_sent(pods: int, is_told: bool) -> None:
    body = body_of(START, *[ready(restart_mode=RestartMode.IN_PROCESS)] * pods)
    assert (body["rankIps"] is not None) is is_told


def test_an_agent_of_another_make_gets_no_generation() -> None:
    assert "generation" not in body_of(START, ready(), agent(generation=None))
    assert body_of(STOP, ready(), agent(generation=None)) == {"is_graceful": False}


def test_a_graceful_stop_names_its_time() -> None:
    stop = StopWorkers(pod(0).name, 3, graceful=True, timeout_s=60)
    assert body_of(stop, running(3)) == {"is_graceful": True, "timeout": 60, "generation": 3}


def test_a_drain_says_whether_the_pod_goes_where_that_is_known_to_agents_that_know_the_field() -> None:
    stop = StopWorkers(pod(0).name, 3, graceful=True, timeout_s=60, leaves=False)
    assert body_of(stop, running(3)) == {"is_graceful": True, "timeout": 60, "generation": 3, "leaves": False}
    assert body_of(stop, agent(generation=None)) == {"is_graceful": True, "timeout": 60}


@pytest.mark.parametrize("reach", RestartMode)
def test_a_hard_stop_says_how_far_the_restart_reaches_unless_processes_are_kept(reach: RestartMode) -> None:
    expected: dict[str, Any] = {"is_graceful": False, "generation": 3}
    if reach is not RestartMode.IN_PROCESS:
        expected["restart_mode"] = reach.value
    assert body_of(StopWorkers(pod(0).name, 3, graceful=False, timeout_s=0, reach=reach), running(3)) == expected


KEEPER: dict[str, Any] = {"memory_state": "sharded"}


@pytest.mark.parametrize(
    ("keeps", "mode"),
    [
        pytest.param(True, "in_process_restart", id="they come back to the barrier"),
        pytest.param(False, "process_level_restart", id="they save a checkpoint and end"),
    ],
)
def test_a_drain_says_what_becomes_of_workers_that_can_be_kept(keeps: bool, mode: str) -> None:
    stop = StopWorkers(pod(0).name, 3, graceful=True, timeout_s=60, keeps=keeps)
    assert body_of(stop, running(3, **KEEPER))["restart_mode"] == mode
    assert "restart_mode" not in body_of(stop, running(3)), "agents whose workers keep nothing are told as ever"


@pytest.mark.parametrize(
    ("reach", "keeps", "said"),
    [
        pytest.param(RestartMode.IN_PROCESS, True, "in_process_restart", id="kept"),
        pytest.param(RestartMode.LOCAL, True, "local_process_level_restart", id="but one"),
        pytest.param(RestartMode.IN_PROCESS, False, None, id="not kept, although nobody asked for more"),
        pytest.param(RestartMode.PROCESSES, False, "process_level_restart", id="new processes"),
    ],
)
def test_a_hard_stop_names_the_mode_to_workers_that_can_be_kept(
    reach: RestartMode, keeps: bool, said: str | None
) -> None:
    stop = StopWorkers(pod(0).name, 3, graceful=False, timeout_s=0, reach=reach, keeps=keeps)
    assert body_of(stop, running(3, **KEEPER)).get("restart_mode") == said
    for silent in (running(3), agent(AgentState.STOPPING, generation=3)):
        assert body_of(stop, silent).get("restart_mode") == said, "also while new ones have not announced it yet"


def test_a_newcomer_to_workers_that_are_kept_learns_of_them() -> None:
    body = body_of(START, ready(), ready(1, **KEEPER))
    assert body["worker_data"] == DATA
    assert len(body["rankIps"]) == 2
    assert body_of(START, ready(), ready())["worker_data"] is None


def test_shutdown_has_no_body_and_other_actions_no_call() -> None:
    assert body_of(ShutDownAgent(pod(0).name), ready()) is None
    assert body_of(CreatePod(PodId("workers", 5, 0), 2), ready()) is None


def drain_with_next(*facts: ObservedAgent) -> CommandBuilder:
    """Build the calls of a drain of two that a third joins; agents were told so."""
    pods = [pod(number) for number in range(len(facts))]
    following = NextGeneration(
        generation=4, members=tuple(one.id for one in pods), master_addr=pods[0].ip, agents_serve_store=True
    )
    record = replace(trains(2, 3), transition=transition(depth=Depth.MEMORY, leavers=(), next_generation=following))
    statuses: Any = Known({one.uid: fact for one, fact in zip(pods, facts, strict=True)})
    return CommandBuilder(
        {}, {one.name: one for one in pods}, record, statuses, lambda one: Address("job", one.ip, 8080 + one.id.ordinal)
    )


def test_a_drain_says_what_follows_and_newcomers_are_started_early() -> None:
    keeps = running(3, memory_state="replicated", can_begin_next=True)
    commands = drain_with_next(keeps, keeps, ready())
    stop = commands.build(
        StopWorkers(pod(1).name, 3, graceful=True, timeout_s=60, leaves=False, keeps=True, next_rank=1)
    )
    assert stop is not None
    assert stop.body is not None
    told = stop.body["next"]
    assert (stop.body["generation"], told["generation"], told["faultCount"]) == (3, 4, 3)
    assert (told["rank"], told["nnodes"], told["master_port"], told["store_port"]) == (1, 3, master_port(4), 8080)
    assert [one["ip"] for one in told["rankIps"]] == ["10.0.0.0", "10.0.0.1", "10.0.0.2"]
    assert told["worker_data"] is None, "nobody knows it before the workers stop"
    start = commands.build(StartWorkers(pod(2).name, 2, is_early=True))
    assert start is not None
    assert start.body is not None
    assert (start.body["rank"], start.body["generation"], start.body["early"]) == (2, 4, True)
    assert start.key == ("start", "4")
    withdrawn = commands.build(StopWorkers(pod(1).name, 3, graceful=True, timeout_s=60, leaves=False, keeps=True))
    assert withdrawn is not None
    assert withdrawn.body is not None
    assert "next" not in withdrawn.body
    assert withdrawn.key != stop.key
