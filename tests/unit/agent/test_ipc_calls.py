"""Calls to the agent's socket that are too large, nonsense, early, late or broken off."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from contextlib import suppress

import pytest
from tests.patience import PATIENCE_S
from tests.unit.agent.ipc_pod import Pod, ask

from elastipod.ipc.connections import HyperPodIPCException
from elastipod.ipc.protocol import MAX_CALL_BYTES, PROTOCOL, RestartMode
from elastipod_agent.core.inprocess_restart import RankPosition
from elastipod_agent.ipc.ipc_server import MAX_PER_PROCESS


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
        pytest.param(b'{"v":1,"data":NaN}\n', "no JSON: NaN is not a JSON value", id="no number"),
        pytest.param(b'{"v":1,"data":[-Infinity]}\n', "no JSON: -Infinity is not a JSON value", id="no finite number"),
        pytest.param(b'{"v":1,"data":1e999}\n', "no JSON: 1e999 is too large for a number", id="too large a number"),
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


async def test_data_that_is_nested_too_deep_for_a_status_is_refused(pod: Pod) -> None:
    pod.begin()
    deep = json.loads("[" * 100 + "]" * 100)
    assert await ask(pod, call="data", run=1, global_rank=0, data=deep) == {}
    error = "data is nested deeper than 100 lists or objects"
    for data in ([deep], {"x": {"y": deep}}):
        assert await ask(pod, call="data", run=1, global_rank=0, data=data) == {"error": error}
    assert pod.coordinator.worker_data()[0]["data"] == deep


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
