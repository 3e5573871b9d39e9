"""Clients and the agent's end of the socket, over a real one: nothing is lost, nobody is held up, all is bounded."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.patience import PATIENCE_S

from elastipod.ipc.clients import CheckpointDiscoverySocketClient, InProcessRestartSocketClient
from elastipod.ipc.connections import HyperPodIPCException
from elastipod.ipc.protocol import MAX_CALL_BYTES, PROTOCOL, SOCKET_ENV, CheckpointType, RestartMode
from elastipod_agent.core.inprocess_restart import RankPosition
from elastipod_agent.core.requests import StartRequest
from elastipod_agent.core.worker_env import Layout
from elastipod_agent.ipc.ipc_server import MAX_PER_PROCESS, IpcServer
from elastipod_agent.ipc.run_coordinator import ReportedFault, RunCoordinator

NPROC = 2


class Pod:
    """The agent's side: a coordinator behind a server, and what it was told."""

    def __init__(self, path: Path) -> None:
        self.faults: list[ReportedFault] = []
        self.num_reports = 0
        layout = Layout(nproc=NPROC, run_id="x", role="default", max_restarts=0)
        self.coordinator = RunCoordinator(layout, on_fault=self.faults.append, on_report=self._on_report)
        self.server = IpcServer(self.coordinator, path)
        self.clients: list[Any] = []

    def _on_report(self) -> None:
        self.num_reports += 1

    async def client(self, local_rank: int = 0) -> InProcessRestartSocketClient:
        os.environ["LOCAL_RANK"] = str(local_rank)
        made = await asyncio.to_thread(InProcessRestartSocketClient)
        self.clients.append(made)
        return made

    async def checkpoints(self, local_rank: int = 0) -> CheckpointDiscoverySocketClient:
        os.environ["LOCAL_RANK"] = str(local_rank)
        made = await asyncio.to_thread(CheckpointDiscoverySocketClient, "run", NPROC)
        self.clients.append(made)
        return made

    def begin(self, restarts: int = 0, **fields: Any) -> None:
        start = StartRequest(
            rank=1, nnodes=3, fault_count=restarts, master_addr="10.0.0.1", master_port=29500, **fields
        )
        self.coordinator.begin_run(start, progress=start.progress, is_fresh=False)

    async def until(self, condition: Callable[[], bool]) -> None:
        deadline = asyncio.get_running_loop().time() + PATIENCE_S
        while not condition():
            assert asyncio.get_running_loop().time() < deadline, "waited in vain"
            await asyncio.sleep(0.002)

    async def at_barrier(self, local_rank: int = 0) -> None:
        await self.until(lambda: self.coordinator.position(local_rank) is RankPosition.AT_BARRIER)


@pytest_asyncio.fixture
async def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pod]:
    path = tmp_path / "s"
    monkeypatch.setenv(SOCKET_ENV, str(path))
    for name in ("LOCAL_RANK", "ELASTIPOD_GENERATION", "ELASTIPOD_PROGRESS"):
        monkeypatch.setenv(name, "0")  # what clients change is undone with it
    monkeypatch.delenv("ELASTIPOD_LOCAL_RANK", raising=False)
    one = Pod(path)
    await one.server.listen()
    yield one
    for client in one.clients:
        client.close()
    await one.server.close()


async def ask(pod: Pod, **call: Any) -> dict[str, Any]:
    """Make one call by hand, on a connection of its own."""
    reader, writer = await asyncio.open_unix_connection(str(pod.server.path))
    try:
        writer.write(json.dumps({"v": PROTOCOL, "local_rank": 0, **call}).encode() + b"\n")
        answer = json.loads(await asyncio.wait_for(reader.readline(), PATIENCE_S))
        assert isinstance(answer, dict)
        return answer
    finally:
        writer.close()
        await writer.wait_closed()


async def test_the_socket_is_for_this_user_alone(pod: Pod) -> None:
    assert stat.S_IMODE(os.stat(pod.server.path).st_mode) == 0o600


async def test_a_start_tells_each_rank_who_it_is(pod: Pod) -> None:
    client = await pod.client(local_rank=1)
    waiting = asyncio.create_task(asyncio.to_thread(client.hyperpod_barrier))
    await pod.at_barrier(1)
    ips = ({"rank": 0, "ip": "10.0.0.1"},)
    progress = {"run": {"progressData": "/x/5", "progressCount": 5}}
    pod.begin(4, rank_ips=ips, worker_data=[{"rank": 0, "data": "d"}], progress=progress)
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


async def test_checkpoints_of_all_local_ranks_make_one(pod: Pod) -> None:
    first, second = await pod.checkpoints(0), await pod.checkpoints(1)
    for client in (first, second):
        assert await asyncio.to_thread(client.get_latest_checkpoint_path) is None
        await asyncio.to_thread(client.update, 5, "/x/5", CheckpointType.MODEL_CHECKPOINT)
    assert await asyncio.to_thread(first.get_latest_checkpoint_path) == "/x/5"
    assert pod.coordinator.checkpoints.progress() == {"run": {"progressData": "/x/5", "progressCount": 5}}


async def test_too_much_data_is_refused_with_one_sentence(pod: Pod) -> None:
    client = await pod.client()
    sixteen = 16 * 1024 * 1024
    with pytest.raises(
        HyperPodIPCException, match=rf"the message has {sixteen + 71} bytes, .* at most {MAX_CALL_BYTES}$"
    ):
        await asyncio.to_thread(client.hyperpod_send_data, 0, "x" * sixteen)
    with pytest.raises(HyperPodIPCException, match="cannot be written as JSON"):
        await asyncio.to_thread(client.hyperpod_send_data, 0, object())  # type: ignore[arg-type]
    await asyncio.to_thread(client.hyperpod_send_data, 0, "small")
    assert pod.coordinator.worker_data()[0]["data"] == "small"


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        pytest.param(b"x" * (MAX_CALL_BYTES + 10), "no JSON", id="a line without end"),
        pytest.param(b"no json\n", "no JSON", id="no JSON"),
        pytest.param(b"[" * 100_000 + b"\n", "no JSON", id="deep"),
        pytest.param(b"[1]\n", "no JSON object", id="no object"),
        pytest.param(b'{"v":1}\n', "local_rank must be an integer", id="no rank"),
        pytest.param(b'{"v":1,"local_rank":9,"call":"hello"}\n', "outside of this pod's 0..1", id="another rank"),
        pytest.param(b'{"v":1,"local_rank":-1,"call":"hello"}\n', "outside of this pod's 0..1", id="negative rank"),
        pytest.param(b'{"v":2,"local_rank":0}\n', "protocol 2", id="another protocol"),
        pytest.param(b'{"v":1,"local_rank":0,"call":"answer"}\n', "no call 'answer'", id="unknown call"),
        pytest.param(b'{"v":1,"local_rank":0,"call":["hello"]}\n', "no call", id="a call that is a list"),
        pytest.param(b'{"v":1,"local_rank":0,"call":"barrier","after":"x"}\n', "after must be", id="wrong type"),
        pytest.param(
            b'{"v":1,"local_rank":0,"call":"barrier","after":0,"wait_s":1e99}\n', "wait_s is 1e", id="endless wait"
        ),
        pytest.param(
            b'{"v":1,"local_rank":0,"call":"checkpoint","prefix":"p","expected":{},"step":1,"type":"model_checkpoint",'
            b'"path":"' + b"x" * 5000 + b'"}\n',
            "path has 5000 characters",
            id="a path that no system takes",
        ),
        pytest.param(
            b'{"v":1,"local_rank":0,"call":"series","prefix":"p","expected":{"other":1}}\n',
            "'other'",
            id="unknown part",
        ),
        pytest.param(b'{"v":1,"local_rank":0,"call":"labels","labels":[1]}\n', "labels must be", id="labels"),
    ],
)
async def test_nonsense_is_answered_with_one_sentence(pod: Pod, sent: bytes, error: str) -> None:
    reader, writer = await asyncio.open_unix_connection(str(pod.server.path))
    writer.write(sent)
    answer = json.loads(await asyncio.wait_for(reader.readline(), PATIENCE_S))
    assert error in answer["error"]
    writer.close()
    await writer.wait_closed()
    assert await ask(pod, call="hello") == {"run": 0, "now": 0}


async def test_who_talks_while_a_call_is_pending_is_cut_off(pod: Pod) -> None:
    reader, writer = await asyncio.open_unix_connection(str(pod.server.path))
    call = json.dumps({"v": PROTOCOL, "local_rank": 0, "call": "barrier", "after": 0, "wait_s": 60}).encode() + b"\n"
    writer.write(call)
    await pod.at_barrier()
    writer.write(call)
    with suppress(ConnectionResetError):
        assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
    await pod.until(lambda: pod.coordinator.position(0) is RankPosition.STARTING)
    writer.close()


async def test_a_worker_that_hangs_up_is_no_longer_at_the_barrier(pod: Pod) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(pod.server.path))
        connection.sendall(b'{"v":1,"local_rank":1,"call":"barrier","after":0,"wait_s":60}\n')
        await pod.at_barrier(1)
    await pod.until(lambda: pod.coordinator.position(1) is RankPosition.STARTING)


async def test_slow_and_many_connections_hold_up_nobody_else(pod: Pod) -> None:
    hoarded = []
    for _ in range(MAX_PER_PROCESS + 5):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(pod.server.path))
        connection.sendall(b'{"v":1')  # and no more
        hoarded.append(connection)
    await asyncio.sleep(0)
    assert await ask(pod, call="hello") == {"error": "too many connections"}
    for connection in hoarded:
        connection.close()
    client = await pod.client()
    await asyncio.to_thread(client.hyperpod_send_data, 0, "x")
    assert pod.coordinator.worker_data()[0]["data"] == "x"


async def test_a_client_uses_no_connection_of_the_process_it_was_forked_from(pod: Pod) -> None:
    client = await pod.client()
    parents = list(client._connections._idle)
    assert len(parents) == 1
    client._connections._pid = 0  # as if this were the child
    await asyncio.to_thread(client.hyperpod_past_rcb_barrier)
    assert parents[0] not in client._connections._idle
    assert parents[0].fileno() >= 0, "it is the parent's to close"
    parents[0].close()


async def test_an_agent_that_is_gone_is_an_error_with_one_sentence(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    client = await pod.client()
    monkeypatch.setattr("elastipod.ipc.connections._CONNECT_TIMEOUT_S", 0.1)
    await pod.server.close()
    with suppress(FileNotFoundError):  # from Python 3.13 on it is gone already
        os.unlink(pod.server.path)
    with pytest.raises(HyperPodIPCException, match=r"^the agent at .* does not answer: "):
        await asyncio.to_thread(client.hyperpod_send_data, 0, "x")


async def test_what_was_sent_too_early_or_too_late_for_its_run_changes_nothing(pod: Pod) -> None:
    pod.begin()
    for run in (-1, 0, 2, 99):
        for call in ("data", "send_fault"):
            mode = RestartMode.IN_PROCESS_RESTART.value
            answer = await ask(pod, call=call, run=run, global_rank=0, data="x", restart_mode=mode)
            assert answer == {"is_stale": True}
    assert (pod.faults, pod.coordinator.worker_data()) == ([], [])
    await ask(pod, call="began", run=99)
    assert pod.coordinator.known_run(0) == 1, "nobody knows a run that has not begun"
