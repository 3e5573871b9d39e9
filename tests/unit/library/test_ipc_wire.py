"""What clients of the agent's socket say on the wire: agents of other versions read it."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from tests.nonempty import every

from elastipod import process_restarts
from elastipod.ipc.clients import (
    CheckpointDiscoverySocketClient,
    InProcessRestartSocketClient,
    TrainingManager,
)
from elastipod.ipc.connections import Connections, HyperPodIPCException
from elastipod.ipc.protocol import SOCKET_ENV, CheckpointType, RestartMode

LATE = {"is_late": True}
Client = TypeVar("Client")


class RecordingAgent:
    """An agent's end of the socket that keeps every call and answers each kind with its next answer, the last one for good."""

    def __init__(self, path: Path) -> None:
        self.calls: list[dict[str, Any]] = []
        self.lines: list[bytes] = []
        self.num_connections = 0
        self.hangs_up_after = 1 << 30  # answers on one connection
        self.answers: dict[str, list[dict[str, Any]]] = {
            "hello": [{"run": 4, "now": 6}],
            "barrier": [
                {"run": 7, "start": {"worker_envs": {"ELASTIPOD_GENERATION": "8"}, "aggregate_worker_data": {}}}
            ],
            "fault": [{"run": 7, "restart_count": 2}],
            "rank_info": [{"number": 5, "info": {"rank": 1}}],
            "latest": [{"path": "/x/7"}],
        }
        self._clients: list[Any] = []
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(path))
        self._server.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._server.accept()
            except OSError:
                return
            self.num_connections += 1
            threading.Thread(target=self._answer, args=(peer,), daemon=True).start()

    def _answer(self, peer: socket.socket) -> None:
        with peer, peer.makefile("rb") as file:
            for _ in range(self.hangs_up_after):
                if not (line := file.readline()):
                    return
                self.lines.append(line)
                self.calls.append(call := json.loads(line))
                known = self.answers.get(call["call"], [{}])
                answer = known.pop(0) if len(known) > 1 else known[0]
                peer.sendall(json.dumps(answer).encode() + b"\n")

    def said(self) -> list[tuple[str, dict[str, Any]]]:
        """Give the calls since the last question, without what all of them have."""
        calls, self.calls = self.calls, []
        assert every((call.pop("v"), call.pop("local_rank")) == (1, 3) for call in calls)
        return [(call.pop("call"), call) for call in calls]

    def closes(self, client: Client) -> Client:
        """Give a client, whose connections end with this agent."""
        self._clients.append(client)
        return client

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordingAgent]:
    agent = RecordingAgent(tmp_path / "socket")
    monkeypatch.setenv(SOCKET_ENV, str(tmp_path / "socket"))
    monkeypatch.setenv("ELASTIPOD_LOCAL_RANK", "3")
    for name in ("ELASTIPOD_GENERATION", "ELASTIPOD_PROGRESS"):
        monkeypatch.setenv(name, "old")
    yield agent
    agent.close()


def test_a_call_is_one_line_of_compact_json(agent: RecordingAgent) -> None:
    agent.closes(Connections.from_env()).call("labels", labels={"a": "ä"})
    assert agent.lines == [b'{"v":1,"call":"labels","local_rank":3,"labels":{"a":"\\u00e4"}}\n']


def test_a_rank_names_the_run_that_each_call_belongs_to(agent: RecordingAgent) -> None:
    client = agent.closes(InProcessRestartSocketClient())
    client.hyperpod_send_data(2, "d")
    assert client.hyperpod_barrier() == ("job_start", agent.answers["barrier"][0]["start"])
    client.hyperpod_past_rcb_barrier()
    client.hyperpod_send_data(2, "e")
    assert agent.said() == [
        ("hello", {}),
        ("data", {"run": 6, "global_rank": 2, "data": "d"}),
        ("barrier", {"wait_s": 60.0, "after": 4}),
        ("began", {"run": 7}),
        ("past_barrier", {"run": 7}),
        ("data", {"run": 7, "global_rank": 2, "data": "e"}),
    ]
    client.hyperpod_barrier()
    assert agent.said()[0] == ("barrier", {"wait_s": 60.0, "after": 7})
    client.connect()  # an agent that was started anew counts from the beginning; what this rank has seen stays
    client.hyperpod_past_rcb_barrier()
    assert agent.said()[-1] == ("past_barrier", {"run": 7})


def test_a_rank_that_waits_at_the_barrier_is_not_told_of_process_restarts(
    agent: RecordingAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_restarts, "_is_settled", False)
    agent.closes(InProcessRestartSocketClient())
    assert process_restarts._is_settled


def test_a_rank_that_enters_its_run_at_once_says_so_with_one_call(agent: RecordingAgent) -> None:
    client = agent.closes(InProcessRestartSocketClient())
    assert client.enter_next_run(has_left=True) == ("job_start", agent.answers["barrier"][0]["start"])
    assert agent.said()[-2:] == [
        ("barrier", {"wait_s": 60.0, "after": 4, "has_left": True}), ("past_barrier", {"run": 7}),
    ]  # fmt: skip


def test_a_start_sets_the_variables_of_its_run_and_removes_those_of_the_last_one(agent: RecordingAgent) -> None:
    agent.closes(InProcessRestartSocketClient()).hyperpod_barrier()
    assert os.environ["ELASTIPOD_GENERATION"] == "8"
    assert "ELASTIPOD_PROGRESS" not in os.environ


def test_what_was_returned_once_is_not_asked_for_again(agent: RecordingAgent) -> None:
    client = agent.closes(InProcessRestartSocketClient())
    client.hyperpod_barrier()
    agent.said()
    assert [client.hyperpod_wait_fault() for _ in range(2)] == [("job_fault", {"restart_count": 2})] * 2
    assert [client.hyperpod_wait_rank_info() for _ in range(2)] == [("job_rank_info", {"rank": 1})] * 2
    assert agent.said() == [
        ("fault", {"wait_s": 60.0, "after": 6}),
        ("fault", {"wait_s": 60.0, "after": 7}),
        ("rank_info", {"wait_s": 60.0, "after": 0}),
        ("rank_info", {"wait_s": 60.0, "after": 5}),
    ]


def test_a_fault_says_its_run_its_rank_and_what_would_help(agent: RecordingAgent) -> None:
    client = agent.closes(InProcessRestartSocketClient())
    agent.said()
    client.hyperpod_send_fault(5)
    client.hyperpod_send_fault(6, RestartMode.JOB_LEVEL_RESTART, "a reason", "a message")
    assert agent.said() == [
        (
            "send_fault",
            {"run": 6, "global_rank": 5, "restart_mode": "in_process_restart", "reason": None, "message": None},
        ),
        (
            "send_fault",
            {
                "run": 6, "global_rank": 6, "restart_mode": "job_level_restart", "reason": "a reason", "message": "a message",
            },
        ),
    ]  # fmt: skip


def test_labels_are_told_as_they_are(agent: RecordingAgent) -> None:
    client = agent.closes(InProcessRestartSocketClient())
    agent.said()
    client.hyperpod_notify_labels({"pipeline": "2"})
    assert agent.said() == [("labels", {"labels": {"pipeline": "2"}})]


@pytest.mark.parametrize("call", ["barrier", "fault", "rank_info"])
def test_a_late_answer_is_waited_for_again_until_the_limit(agent: RecordingAgent, call: str) -> None:
    client = agent.closes(InProcessRestartSocketClient())
    waits = {
        "barrier": client.hyperpod_barrier, "fault": client.hyperpod_wait_fault, "rank_info": client.hyperpod_wait_rank_info,
    }  # fmt: skip
    agent.answers[call] = [LATE, LATE, *agent.answers[call]]
    agent.said()
    waits[call](3600)
    asked = [fields for name, fields in agent.said() if name == call]
    assert [fields["wait_s"] for fields in asked] == [60.0] * 3
    assert len({fields["after"] for fields in asked}) == 1
    agent.answers[call] = [LATE]
    with pytest.raises(HyperPodIPCException, match=rf"^no answer from the agent within 0 seconds \({call}\)$"):
        waits[call](0)
    assert [fields["wait_s"] for _, fields in agent.said()] == [0.0]


def test_an_agent_that_keeps_processes_says_with_which_variables(
    agent: RecordingAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_VARIABLE", "before")
    client = agent.closes(InProcessRestartSocketClient())
    agent.said()
    agent.answers["keep"] = [{"env": {"A_VARIABLE": 1}}, {}, {"error": "there is no call 'keep'"}, {"error": "no room"}]
    assert client.keep("sharded")
    assert os.environ["A_VARIABLE"] == "1"
    assert client.keep("replicated")
    assert not client.keep("replicated")
    with pytest.raises(HyperPodIPCException, match=r"^keep: no room$"):
        client.keep("replicated")
    assert [fields["kind"] for _, fields in agent.said()] == ["sharded"] + ["replicated"] * 3


def test_a_series_of_checkpoints_says_how_many_ranks_write_each_part(agent: RecordingAgent) -> None:
    client = agent.closes(CheckpointDiscoverySocketClient("run", 2, 1))
    client.update(5, "/x/5", CheckpointType.DATA_CHECKPOINT)
    client.update(6, None, CheckpointType.MODEL_CHECKPOINT)
    expected = {"model_checkpoint": 2, "data_checkpoint": 1}
    assert agent.said() == [
        ("series", {"prefix": "run", "expected": expected}),
        ("checkpoint", {"prefix": "run", "expected": expected, "step": 5, "path": "/x/5", "type": "data_checkpoint"}),
        ("checkpoint", {"prefix": "run", "expected": expected, "step": 6, "path": None, "type": "model_checkpoint"}),
    ]
    agent.answers["latest"] = [{"path": "/x/7"}, {"path": None}]
    assert [client.get_latest_checkpoint_path() for _ in range(2)] == ["/x/7", None]
    assert agent.said() == [("latest", {"prefix": "run"})] * 2


def test_the_manager_gives_both_clients(agent: RecordingAgent) -> None:
    manager = TrainingManager()
    assert isinstance(agent.closes(manager.InProcessRestart), InProcessRestartSocketClient)
    agent.closes(manager.get_checkpoint_discovery_client("run"))
    agent.closes(manager.get_checkpoint_discovery_client("run", 4, 3))
    assert [fields.get("expected") for _, fields in agent.said()] == [
        None,
        {"model_checkpoint": 0, "data_checkpoint": 0},
        {"model_checkpoint": 4, "data_checkpoint": 3},
    ]


def test_calls_share_a_connection_and_a_lost_one_is_made_again(agent: RecordingAgent) -> None:
    connections = agent.closes(Connections.from_env())
    for _ in range(3):
        connections.call("labels")
    assert agent.num_connections == 1
    connections.close()
    agent.hangs_up_after = 1
    for _ in range(3):
        connections.call("labels")
    assert len(agent.calls) == 6
    assert agent.num_connections == 4


@pytest.mark.parametrize(
    ("variables", "rank"),
    [
        ({"ELASTIPOD_LOCAL_RANK": "2", "LOCAL_RANK": "0"}, 2),
        ({"ELASTIPOD_LOCAL_RANK": "", "LOCAL_RANK": "5"}, 5),
        ({"ELASTIPOD_LOCAL_RANK": "", "LOCAL_RANK": ""}, 0),
    ],
)
def test_a_call_names_the_workers_slot_in_its_pod(
    agent: RecordingAgent, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], rank: int
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    agent.closes(Connections.from_env()).call("labels")
    assert agent.calls[0]["local_rank"] == rank


def test_outside_a_pod_the_variable_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SOCKET_ENV, raising=False)
    with pytest.raises(ValueError, match=f"^{SOCKET_ENV} is not set: start the script with hyperpodrun in a pod$"):
        Connections.from_env()
