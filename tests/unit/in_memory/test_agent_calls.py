"""What a rank's link says to its agent, and what it makes of the answers; the agent is played."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from elastipod.in_memory import agent_link
from elastipod.in_memory.agent_link import WATCH_S, AgentLink, Fate, WorldPlace, fate_after_stop, own_fate
from elastipod.ipc.clients import InProcessRestartSocketClient
from elastipod.ipc.connections import AnswerIsLate, HyperPodIPCException
from elastipod.ipc.protocol import SOCKET_ENV, RestartMode
from elastipod.worker_file import EventLevel

ENDS = (
    "this agent ends worker processes with their generation, so every resize and recovery restarts this script; a newer hyperpodrun, or "
    "one with --inprocess-restart, keeps them"
)


@pytest.fixture
def client() -> Any:
    played = mock.Mock()
    envs = {
        "RANK": "1",
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
        "ELASTIPOD_GENERATION": "7",
    }
    played.enter_next_run.return_value = (None, {"worker_envs": envs})
    return played


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ELASTIPOD_GENERATION", SOCKET_ENV):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(agent_link, "store_generation", lambda: 7)
    return monkeypatch


def test_there_is_a_link_only_in_a_pod_of_hyperpodrun(monkeypatch: pytest.MonkeyPatch, client: Any) -> None:
    monkeypatch.setattr(agent_link, "InProcessRestartSocketClient", lambda: client)
    assert AgentLink.connect() is None
    monkeypatch.setenv(SOCKET_ENV, "/run/agent.sock")
    link = AgentLink.connect()
    assert link is not None
    found: Any = link._client
    assert found is client
    assert (link.is_kept, link.is_over) == (False, False)
    link.close()
    assert client.mock_calls == [mock.call.close()], "nothing was watched"


@pytest.mark.parametrize(
    ("is_kept_by_agent", "rank", "is_kept"),
    [(True, "0", True), (False, "0", False), (False, "-1", True), (False, None, True), (False, "1", False)],
)
def test_a_process_stays_where_its_agent_keeps_it_or_it_began_at_the_barrier(
    environment: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, client: Any, is_kept_by_agent: bool, rank: str | None,
    is_kept: bool,
) -> None:  # fmt: skip
    environment.delenv("RANK") if rank is None else environment.setenv("RANK", rank)
    client.keep.return_value = is_kept_by_agent
    link = AgentLink(client)
    link.announce("sharded")
    assert client.mock_calls == [mock.call.keep("sharded")]
    assert link.is_kept is is_kept
    assert caplog.messages == ([] if is_kept else [ENDS])


@pytest.mark.parametrize("after_fault", [True, False])
def test_a_rank_is_released_from_the_barrier_with_its_place(
    monkeypatch: pytest.MonkeyPatch, client: Any, after_fault: bool
) -> None:
    reset = mock.Mock()
    monkeypatch.setattr(agent_link, "reset_elastic_event", reset)
    link = AgentLink(client)
    found = link.park(after_fault=True) if after_fault else link.park()
    assert found == WorldPlace(7, 1, 4, "10.0.0.1", 29500)
    assert reset.mock_calls == [mock.call(is_abandoned=after_fault)]
    assert client.mock_calls == [mock.call.enter_next_run(has_left=not after_fault)]


def test_a_release_without_a_rank_is_an_error(monkeypatch: pytest.MonkeyPatch, client: Any) -> None:
    client.enter_next_run.return_value = (None, {"worker_envs": {"RANK": "-1"}})
    monkeypatch.setattr(agent_link, "reset_elastic_event", mock.Mock())
    with pytest.raises(
        HyperPodIPCException,
        match=r"^the agent released this rank from the barrier without a rank in the new generation$",
    ):
        AgentLink(client).park()


def test_the_end_of_a_generation_is_told_once_by_a_thread_of_its_own(
    monkeypatch: pytest.MonkeyPatch, client: Any
) -> None:
    made: list[Any] = []
    monkeypatch.setattr("threading.Thread", lambda **options: made.append(mock.Mock(options=options)) or made[-1])  # type: ignore[func-returns-value]
    monkeypatch.setattr("time.sleep", slept := mock.Mock())
    link, ends = AgentLink(client), mock.Mock()
    link.watch(7, ends)
    (thread,) = made
    assert thread.mock_calls == [mock.call.start()]
    options = {**thread.options, "name": ""}
    assert options == {"target": link._watch, "args": (7, client.run, link._is_over, ends), "name": "", "daemon": True}
    client.wait_end.side_effect = [HyperPodIPCException("busy"), AnswerIsLate("late"), None]
    link.close()
    link._watch(*options["args"])
    assert (link.is_over, client.wait_end.mock_calls) == (False, []), "nobody watches this generation any more"
    link.watch(8, ends)
    link._watch(*made[1].options["args"])
    assert slept.mock_calls == [mock.call(1.0)]
    assert (link.is_over, ends.mock_calls, client.wait_end.mock_calls) == (
        True, [mock.call()], [mock.call(client.run, WATCH_S)] * 3,
    )  # fmt: skip
    assert link.wait_until_over(0.0) is True
    link.close()
    link.watch(9)
    assert link.is_over is False
    assert made[2].options["args"][3]() is None


def test_an_answer_for_a_former_generation_ends_nothing(client: Any) -> None:
    link, ends = AgentLink(client), mock.Mock()
    link._watched_generation = 7
    client.wait_end.side_effect = lambda *_: setattr(link, "_watched_generation", 8)
    over = mock.Mock(is_set=lambda: False)
    link._watch(7, 3, over, ends)
    assert (over.set.mock_calls, ends.mock_calls) == ([], [])


def test_the_watcher_of_a_former_generation_takes_no_news_from_the_next_one() -> None:
    """It may still wait when the next generation fails at once, and then hears of that first."""
    client = object.__new__(InProcessRestartSocketClient)
    connections = client._connections = mock.Mock()
    connections.call.return_value = {"run": 2, "restart_count": 1}
    client._run, client._fault = 2, 0
    for run in (1, 2):
        client.wait_end(run, 5.0)
    assert [call.kwargs["after"] for call in connections.call.mock_calls] == [0, 1]


def test_a_failed_collective_is_reported_unless_the_agent_knows(client: Any, caplog: pytest.LogCaptureFixture) -> None:
    link = AgentLink(client)
    link.report_fault(3, "Connection closed by peer", 7)
    told = mock.call.send_fault_of(
        7, 3, RestartMode.IN_PROCESS_RESTART, "CollectiveFailed", "Connection closed by peer"
    )
    assert client.mock_calls == [told]
    client.send_fault_of.side_effect = HyperPodIPCException("gone")
    link.report_fault(3, "again")
    assert caplog.messages == ["the agent was not told of a failed collective: gone"]
    link._is_over.set()
    link.report_fault(3, "and again")
    assert client.send_fault_of.call_count == 2


@pytest.mark.parametrize(
    ("leaves", "kept", "fate"),
    [
        (True, True, Fate.LEAVES), (True, None, Fate.LEAVES), (True, False, Fate.LEAVES),
        (False, True, Fate.STAYS), (False, None, Fate.STAYS), (False, False, Fate.UNKNOWN),
        (None, True, Fate.KEPT), (None, None, Fate.UNKNOWN), (None, False, Fate.UNKNOWN),
    ],
)  # fmt: skip
def test_what_becomes_of_a_rank_that_has_stopped(leaves: bool | None, kept: bool | None, fate: Fate) -> None:
    assert fate_after_stop(leaves=leaves, kept=kept) == fate


@pytest.mark.parametrize(("levels", "is_over", "slept"), [(0, False, 0), (3, False, 3), (99, True, 0), (99, False, 8)])
def test_the_stop_of_this_rank_is_waited_for_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, levels: int, is_over: bool, slept: int
) -> None:
    """levels: looks at the worker file until its stop is there."""
    now, looks = [100.0], [0]

    def sleep(seconds: float) -> None:
        assert seconds == 0.01
        now[0] += 1.0

    def event() -> Any:
        looks[0] += 1
        return mock.Mock(level=EventLevel.NONE if looks[0] <= levels else EventLevel.DRAIN)

    worker = mock.Mock()
    worker.file.event, worker.file.leaves.return_value, worker.file.kept.return_value = event, True, None
    monkeypatch.setattr(agent_link, "local_worker", lambda: worker)
    monkeypatch.setattr(agent_link, "time", mock.Mock(monotonic=lambda: now[0], sleep=sleep))
    assert own_fate(lambda: is_over) == Fate.LEAVES
    assert now[0] == 100.0 + slept
    monkeypatch.setattr(agent_link, "local_worker", lambda: None)
    assert own_fate(lambda: False) == Fate.UNKNOWN
