"""Clients and the agent's end of the socket, over a real one: nothing is lost, nobody is held up, all is bounded."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import threading
from contextlib import suppress
from typing import Any
from unittest import mock

import pytest
from tests.patience import PATIENCE_S
from tests.unit.agent.ipc_pod import Pod, ask

from elastipod.in_memory import agent_link
from elastipod.in_memory.agent_link import AgentLink
from elastipod.ipc.connections import HyperPodIPCException
from elastipod.ipc.protocol import CheckpointType, RestartMode
from elastipod_agent.core.inprocess_restart import RankPosition
from elastipod_agent.core.requests import StartRequest
from elastipod_agent.ipc.ipc_server import MAX_PER_PROCESS
from elastipod_agent.ipc.run_coordinator import ReportedFault


async def test_the_socket_is_for_this_user_alone(pod: Pod) -> None:
    assert stat.S_IMODE(os.stat(pod.server.path).st_mode) == 0o600


async def test_a_start_tells_each_rank_who_it_is(pod: Pod) -> None:
    client = await pod.client(local_rank=1)
    waiting = asyncio.create_task(asyncio.to_thread(client.hyperpod_barrier))
    await pod.at_barrier(1)
    ips = ({"rank": 0, "ip": "10.0.0.1"},)
    progress = {"run": {"progressData": "/x/5", "progressCount": 5}}
    pod.begin(4, rank_ips=ips, worker_data=[{"rank": 0, "data": "d"}], progress=progress, store_port=8080)
    kind, start = await asyncio.wait_for(waiting, PATIENCE_S)
    assert kind == "job_start"
    assert start == {
        "worker_envs": {
            "RANK": "3",
            "GROUP_RANK": "1",
            "ROLE_RANK": "3",
            "WORLD_SIZE": "6",
            "GROUP_WORLD_SIZE": "3",
            "ROLE_WORLD_SIZE": "6",
            "MASTER_ADDR": "10.0.0.1",
            "MASTER_PORT": "29500",
            "JOB_RESTART_COUNT": "4",
            "TORCHELASTIC_RESTART_COUNT": "4",
            "SPARE": "False",
            "NNODES": "3",
            "ELASTIPOD_GENERATION": "5",
            "ELASTIPOD_STORE": "10.0.0.1:8080",
            "ELASTIPOD_PROGRESS": json.dumps(progress, separators=(",", ":")),
        },
        "aggregate_worker_data": {"rank_ips": list(ips), "aggregate_worker_data": [{"rank": 0, "data": "d"}]},
    }
    assert os.environ["ELASTIPOD_GENERATION"] == "5"
    assert pod.coordinator.position(1) is RankPosition.RELEASED
    await asyncio.to_thread(client.hyperpod_past_rcb_barrier)
    assert pod.coordinator.position(1) is RankPosition.PAST_BARRIER


async def test_a_start_whose_answer_was_lost_comes_again(pod: Pod) -> None:
    pod.begin()
    assert (await ask(pod, call="barrier", after=0, wait_s=5))["run"] == 1, "and this worker never reads it"
    client = await pod.client()
    kind, _ = await asyncio.to_thread(client.hyperpod_barrier, PATIENCE_S)
    assert kind == "job_start"


async def test_a_connection_that_breaks_at_the_barrier_is_mended(pod: Pod) -> None:
    client = await pod.client()
    waiting = asyncio.create_task(asyncio.to_thread(client.hyperpod_barrier, 10))
    await pod.at_barrier()
    await pod.server.close()
    with suppress(FileNotFoundError):  # from Python 3.13 on it is gone already
        os.unlink(pod.server.path)
    pod.begin()
    await pod.server.listen()
    assert (await asyncio.wait_for(waiting, PATIENCE_S))[0] == "job_start"


async def test_a_rank_is_released_into_each_run_once(pod: Pod) -> None:
    client = await pod.client()
    pod.begin()
    await asyncio.to_thread(client.hyperpod_barrier, PATIENCE_S)
    with pytest.raises(HyperPodIPCException, match=r"within 0\.05 seconds"):
        await asyncio.to_thread(client.hyperpod_barrier, 0.05)
    another = await pod.client()
    with pytest.raises(HyperPodIPCException, match="within"):
        await asyncio.to_thread(another.hyperpod_barrier, 0.05)
    pod.coordinator.end_run(is_faulty=False)
    pod.begin(1)
    _, start = await asyncio.to_thread(another.hyperpod_barrier, PATIENCE_S)
    assert start["worker_envs"]["JOB_RESTART_COUNT"] == "1"


async def test_a_closed_barrier_lets_nobody_into_the_run_that_is_over(pod: Pod) -> None:
    pod.begin()
    pod.coordinator.end_run(is_faulty=True)
    client = await pod.client()
    with pytest.raises(HyperPodIPCException, match="within"):
        await asyncio.to_thread(client.hyperpod_barrier, 0.05)


async def test_a_fault_is_told_once_and_only_to_its_run(pod: Pod) -> None:
    client = await pod.client()
    pod.begin(7)
    await asyncio.to_thread(client.hyperpod_barrier, PATIENCE_S)
    with pytest.raises(HyperPodIPCException, match=r"no answer from the agent within 0\.05 seconds"):
        await asyncio.to_thread(client.hyperpod_wait_fault, 0.05)
    waiting = asyncio.create_task(asyncio.to_thread(client.hyperpod_wait_fault, PATIENCE_S))
    pod.coordinator.end_run(is_faulty=True)
    assert await waiting == ("job_fault", {"restart_count": 7})
    with pytest.raises(HyperPodIPCException):
        await asyncio.to_thread(client.hyperpod_wait_fault, 0.05)
    late = await pod.client()
    assert (await asyncio.to_thread(late.hyperpod_wait_fault, PATIENCE_S))[0] == "job_fault", "a level, not an edge"
    pod.begin(8)
    await asyncio.to_thread(late.hyperpod_barrier, PATIENCE_S)
    with pytest.raises(HyperPodIPCException):
        await asyncio.to_thread(late.hyperpod_wait_fault, 0.05)


@pytest.mark.parametrize("is_fresh", [True, False], ids=["started for the next run", "before it"])
async def test_a_new_process_is_not_told_of_the_fault_that_it_was_started_after(pod: Pod, is_fresh: bool) -> None:
    old = await pod.client()
    pod.begin()
    await asyncio.to_thread(old.hyperpod_barrier, PATIENCE_S)
    pod.coordinator.end_run(is_faulty=True)
    if is_fresh:
        pod.begin(1, is_fresh=True)
    else:
        pod.coordinator.reset_rank(0, keeps_data=True)
    new = await pod.client()
    with pytest.raises(HyperPodIPCException, match="within"):
        await asyncio.to_thread(new.hyperpod_wait_fault, 0.05)
    if not is_fresh:
        pod.begin(1)
    pod.coordinator.end_run(is_faulty=True)
    assert await asyncio.to_thread(new.hyperpod_wait_fault, PATIENCE_S) == ("job_fault", {"restart_count": 1})


async def test_a_fault_is_taken_from_the_present_run_only(pod: Pod) -> None:
    late, present = await pod.client(), await pod.client(1)
    pod.begin()
    for client in (late, present):
        await asyncio.to_thread(client.hyperpod_barrier, PATIENCE_S)
    pod.coordinator.end_run(is_faulty=True)
    await asyncio.to_thread(late.hyperpod_send_fault, 2)
    pod.begin(1)
    await asyncio.to_thread(present.hyperpod_barrier, PATIENCE_S)
    await asyncio.to_thread(late.hyperpod_send_fault, 2)
    assert pod.faults == [], "it came from the run before"
    await asyncio.to_thread(present.hyperpod_send_fault, 3, RestartMode.PROCESS_LEVEL_RESTART, "Why", "a message")
    assert pod.faults == [
        ReportedFault(
            local_rank=1,
            global_rank=3,
            restart_mode=RestartMode.PROCESS_LEVEL_RESTART,
            reason="Why",
            message="a message",
        )
    ]
    await asyncio.to_thread(present.hyperpod_send_fault, 3)
    assert (pod.faults[1].reason, pod.faults[1].message) == ("WorkerFault", "rank 3 reported a fault")
    assert pod.faults[1].restart_mode is RestartMode.IN_PROCESS_RESTART


async def test_a_script_without_a_barrier_belongs_to_the_run_it_was_started_for(pod: Pod) -> None:
    start = StartRequest(rank=0, nnodes=1, fault_count=0, master_addr="a", master_port=1)
    pod.coordinator.begin_run(start, progress={}, is_fresh=True)
    client = await pod.client()
    await asyncio.to_thread(client.hyperpod_send_fault, 0)
    assert len(pod.faults) == 1
    assert (await asyncio.to_thread(client.hyperpod_barrier, PATIENCE_S))[0] == "job_start", "a barrier that is open"


async def test_the_latest_news_about_a_rank_come_at_once_and_older_ones_never(pod: Pod) -> None:
    client = await pod.client()
    with pytest.raises(HyperPodIPCException, match="rank_info"):
        await asyncio.to_thread(client.hyperpod_wait_rank_info, 0.05)
    for rank in (0, 2):
        pod.coordinator.publish_rank_info(
            StartRequest(rank=rank, nnodes=3, fault_count=0, master_addr="a", master_port=1, is_spare=True)
        )
    kind, info = await asyncio.to_thread(client.hyperpod_wait_rank_info, PATIENCE_S)
    assert (kind, info["worker_envs"]["RANK"], info["worker_envs"]["SPARE"]) == ("job_rank_info", "4", "True")
    with pytest.raises(HyperPodIPCException):
        await asyncio.to_thread(client.hyperpod_wait_rank_info, 0.05)
    pod.begin()
    _, info = await asyncio.to_thread(client.hyperpod_wait_rank_info, PATIENCE_S)
    assert (info["worker_envs"]["RANK"], info["worker_envs"]["SPARE"]) == ("2", "False")


async def test_a_process_that_is_started_for_the_next_run_learns_nothing_of_the_open_one(pod: Pod) -> None:
    pod.begin()
    pod.coordinator.reset_rank(0, keeps_data=True)
    client = await pod.client()
    for wait in (client.hyperpod_wait_rank_info, client.hyperpod_barrier):
        with pytest.raises(HyperPodIPCException):
            await asyncio.to_thread(wait, 0.05)
    pod.coordinator.end_run(is_faulty=True)
    with pytest.raises(HyperPodIPCException):
        await asyncio.to_thread(client.hyperpod_wait_fault, 0.05)
    pod.begin(1)
    _, info = await asyncio.to_thread(client.hyperpod_wait_rank_info, PATIENCE_S)
    _, start = await asyncio.to_thread(client.hyperpod_barrier, PATIENCE_S)
    assert info["worker_envs"] == start["worker_envs"]


async def test_data_and_labels_reach_the_status_and_go_with_the_next_run(pod: Pod) -> None:
    clients = [await pod.client(0), await pod.client(1)]
    pod.begin()
    for rank, client in enumerate(clients):
        await asyncio.to_thread(client.hyperpod_barrier, PATIENCE_S)
        await asyncio.to_thread(client.hyperpod_send_data, 2 + rank, f"of {rank}")
        await asyncio.to_thread(client.hyperpod_notify_labels, {"PP": str(rank), f"only{rank}": "x"})
    pod.coordinator.mark_failed(1)
    entries = [{"rank": 2 + i, "group_rank": 1, "local_rank": i, "failed": i == 1, "data": f"of {i}"} for i in (0, 1)]
    assert pod.coordinator.worker_data() == entries
    assert pod.coordinator.labels() == {"PP": "0", "only0": "x", "only1": "x"}
    pod.coordinator.reset_rank(1, keeps_data=True)
    assert pod.coordinator.worker_data() == entries, "the next start tells everybody who failed"
    pod.coordinator.reset_rank(1, keeps_data=False)
    assert pod.coordinator.worker_data() == entries[:1]
    pod.coordinator.end_run(is_faulty=True)
    pod.begin(1)
    assert pod.coordinator.worker_data() == []


@pytest.mark.parametrize(
    ("addresses", "ranks"),
    [
        pytest.param(
            [(0, "a"), (1, "b"), (2, "c")], [(0, "a"), (1, "a"), (2, "b"), (3, "b"), (4, "c"), (5, "c")], id="pods"
        ),
        pytest.param([(rank, "abc"[rank // 2]) for rank in range(6)], None, id="ranks"),
        pytest.param([(0, "a"), (1, "b")], None, id="something else"),
        pytest.param([("0", "a"), (1, "b"), (2, "c")], None, id="no numbers"),
    ],
)
async def test_addresses_of_pods_become_those_of_their_ranks(
    pod: Pod, addresses: list[tuple[Any, str]], ranks: list[tuple[Any, str]] | None
) -> None:
    """An operator that does not know the number of workers in a pod (`auto`) names one address for each of the three pods."""
    client = await pod.client()
    pod.begin(0, rank_ips=tuple({"rank": rank, "ip": ip} for rank, ip in addresses))
    _, start = await asyncio.to_thread(client.hyperpod_barrier)
    told = [(each["rank"], each["ip"]) for each in start["aggregate_worker_data"]["rank_ips"]]
    assert told == (ranks or addresses)


async def test_checkpoints_of_all_local_ranks_make_one(pod: Pod) -> None:
    first, second = await pod.checkpoints(0), await pod.checkpoints(1)
    for client in (first, second):
        assert await asyncio.to_thread(client.get_latest_checkpoint_path) is None
        await asyncio.to_thread(client.update, 5, "/x/5", CheckpointType.MODEL_CHECKPOINT)
    assert await asyncio.to_thread(first.get_latest_checkpoint_path) == "/x/5"
    told = {"progressData": "/x/5", "progressCount": 5, "progressReported": True}
    assert pod.coordinator.checkpoints.progress() == {"run": told}


async def test_planned_ends_leave_neither_threads_nor_connections_behind(
    pod: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent says nothing to who watches a generation that ends as planned, and a worker has few connections."""
    monkeypatch.setattr(agent_link, "WATCH_S", 0.02)

    def num_watchers() -> int:
        return sum(thread.name == "elastipod-generation-watcher" for thread in threading.enumerate())

    with mock.patch.dict(os.environ):
        link = AgentLink(await pod.client())
        for generation in range(1, MAX_PER_PROCESS + 3):
            pod.begin(generation)
            await asyncio.to_thread(link.park)
            link.watch(generation)
            await pod.until(lambda: num_watchers() <= 1)
            pod.coordinator.end_run(is_faulty=False)
        pod.begin(generation + 1)
        await asyncio.to_thread(link.park)
        link.watch(generation + 1)
        pod.coordinator.end_run(is_faulty=True)
        assert await asyncio.to_thread(link.wait_until_over, PATIENCE_S)
        await pod.until(lambda: num_watchers() == 0)
