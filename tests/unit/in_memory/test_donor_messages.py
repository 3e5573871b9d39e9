"""What a donor sends to a follower with each step, within which limits, and what it takes and gives up."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from elastipod.in_memory import donor as module
from elastipod.in_memory.donor import Donor, Session, _held, _num_bytes
from elastipod.in_memory.follow_wire import FollowingEnded
from elastipod.in_memory.members import Members


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Let no thread run by itself; give how they are made."""
    made: list[dict[str, Any]] = []

    def thread(**options: Any) -> Any:
        return SimpleNamespace(start=lambda: made.append(options))

    monkeypatch.setattr(module, "threading", SimpleNamespace(Thread=thread))
    return made


class State:
    """A state of four parameters of two bytes each."""

    parameters = (None,) * 4

    def copied(self, slot: int) -> tuple[list[Any], list[torch.Tensor]]:
        return [slot, []], [torch.full((2,), slot, dtype=torch.uint8)]


def session(peer: Any = None) -> Any:
    return Session(peer or mock.Mock(), "a key", "a layout")


def sent(of: Any) -> list[Any]:
    """Give the heads and the numbers of the tensors that wait to be sent."""
    found = []
    while not of._queue.empty():
        head, tensors = of._queue.get()
        found.append((dict(head), [each.tolist() for each in tensors]))
    return found


def gradients(*slots: int) -> dict[int, torch.Tensor]:
    return {slot: torch.full((1,), 10 + slot, dtype=torch.uint8) for slot in slots}


def test_a_step_is_the_gradients_of_what_the_follower_has_and_copies_of_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options are sent where they have changed, and what memory the donor has when the follower has all of the state."""
    monkeypatch.setattr(module, "COPIED_BYTES", 3)
    monkeypatch.setattr(module, "private_bytes", lambda: 77)
    state, follower = State(), session()
    follower.add_step(state, 5, "rate 1", gradients(0, 1, 2, 3))
    assert sent(follower) == [
        ({"step": 5, "of": [], "slots": [[0, []], [1, []]], "is_whole": False, "options": "rate 1"}, [[0, 0], [1, 1]])
    ]
    follower._sent_bytes = 4  # they have left
    follower.add_step(state, 6, "rate 1", gradients(0, 1, 2, 3))
    assert sent(follower) == [
        (
            {
                "step": 6,
                "of": [0, 1],
                "slots": [[2, []], [3, []]],
                "is_whole": True,
                "private_bytes": 77,
                "options": None,
            },
            [[10], [11], [2, 2], [3, 3]],
        )
    ]
    assert follower._waiting_bytes == 6
    follower.add_step(state, 7, "rate 2", gradients(1, 3))
    assert sent(follower) == [
        ({"step": 7, "of": [1, 3], "slots": [], "is_whole": True, "options": "rate 2"}, [[11], [13]])
    ]
    assert follower._added_bytes == 12


@pytest.mark.parametrize(("waiting", "slots"), [(0, [0, 1]), (2, [0]), (3, [0]), (4, []), (9, [])])
def test_no_more_is_copied_than_there_is_room_for_with_what_waits(
    monkeypatch: pytest.MonkeyPatch, waiting: int, slots: list[int]
) -> None:
    monkeypatch.setattr(module, "COPIED_BYTES", 4)
    follower = session()
    follower._added_bytes = waiting
    follower.add_step(State(), 5, "", {})
    ((head, tensors),) = sent(follower)
    assert [slot for slot, _ in head["slots"]] == slots
    assert len(tensors) == len(slots)


def test_a_follower_that_is_too_far_behind_is_told_how_far(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "COPIED_BYTES", 0)
    monkeypatch.setattr(module, "MAX_WAITING_BYTES", 5 << 20)
    follower = session()
    follower._next_slot = 4
    follower._added_bytes = (5 << 20) - 1
    follower.add_step(State(), 5, "", gradients(0))
    assert follower.is_over is False, "so much may wait"
    follower.add_step(State(), 6, "", {0: torch.zeros(2 << 20, dtype=torch.uint8)})
    assert follower.is_over is True
    assert [record.getMessage() for record in caplog.records] == [
        "a newcomer follows this rank no longer and will be filled when it joins: it is 7 MiB behind; 5 are kept for it"
    ]
    follower.end("again")
    assert len(caplog.records) == 1
    assert follower._peer.mock_calls == [mock.call.shutdown(socket.SHUT_RDWR)] * 2


def test_a_thread_for_each_follower_sends_what_waits_until_the_end(
    monkeypatch: pytest.MonkeyPatch, threads: list[dict[str, Any]]
) -> None:
    monkeypatch.setattr(module, "shake_hands", hands := mock.Mock())
    monkeypatch.setattr(module, "send", sends := mock.Mock())
    peer = mock.MagicMock()
    follower = session(peer)
    assert [(each["target"], each["daemon"]) for each in threads] == [(follower._send_all, True)]
    assert (follower.is_ready, follower.is_over, follower._next_slot, follower._waiting_bytes) == (False, False, 0, 0)
    tensors = [torch.zeros(3)]
    follower._queue.put(({"step": 1}, tensors))
    follower.finish()
    follower._send_all()
    file = peer.makefile.return_value.__enter__.return_value
    assert hands.mock_calls == [mock.call(peer, file, "a key", "a layout", is_donor=True)]
    assert peer.makefile.mock_calls[0] == mock.call("rb")
    assert peer.settimeout.mock_calls == [mock.call(5.0), mock.call(60.0)]
    assert sends.mock_calls == [mock.call(peer, {"step": 1}, tensors), mock.call(peer, {"end": True}, [])]
    assert (follower.is_ready, follower.is_over, follower._sent_bytes) == (True, True, 12)
    assert peer.__exit__.call_count == 1


@pytest.mark.parametrize("error", [FollowingEnded("no key"), OSError("no key")])
def test_a_follower_that_cannot_be_sent_to_is_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    monkeypatch.setattr(module, "shake_hands", mock.Mock(side_effect=error))
    follower = session(mock.MagicMock())
    follower._send_all()
    assert (follower.is_ready, follower.is_over) == (False, True)
    assert caplog.messages == ["a newcomer follows this rank no longer and will be filled when it joins: no key"]


def donor(host: str = "127.0.0.1") -> Any:
    model = nn.Linear(2, 1)
    return Donor(Members((model, torch.optim.SGD(model.parameters(), lr=0.5))), "a key", host)


def test_a_donor_listens_on_a_port_of_its_own(threads: list[dict[str, Any]]) -> None:
    found = donor()
    assert found._listener.family == socket.AF_INET
    assert found._listener.getsockname() == ("127.0.0.1", found.port)
    assert [(each["target"], each["daemon"]) for each in threads] == [(found._take_calls, True)]
    assert (found.followers, found._is_closed, found._options, found._gradients) == ([], False, "", {})
    found.close()
    assert found._is_closed is True
    assert found._listener.fileno() == -1


@pytest.mark.parametrize(("host", "family"), [("fd00::1", socket.AF_INET6), ("10.0.0.1", socket.AF_INET)])
def test_a_donor_listens_at_the_address_of_its_host(monkeypatch: pytest.MonkeyPatch, host: str, family: int) -> None:
    create = mock.Mock()
    create.return_value.getsockname.return_value = (host, 4001, 0, 0)
    monkeypatch.setattr("socket.create_server", create)
    assert donor(host).port == 4001
    assert create.mock_calls[0] == mock.call((host, 0), family=family)


def test_followers_that_are_ready_get_each_step_and_those_that_are_over_are_dropped() -> None:
    found = donor()
    over, early, ready = (
        mock.Mock(is_over=is_over, is_ready=is_ready)
        for is_over, is_ready in ((True, True), (False, False), (False, True))
    )
    found.followers.extend([over, early, ready])
    weight, bias = found._state.parameters
    weight.grad, bias.grad = torch.ones(1, 2), None
    found.before_step()
    assert found.followers == [early, ready]
    options = found._state.options()
    found.after_step(7)
    ((state, step, told, held),) = (call.args for call in ready.add_step.mock_calls)
    assert (state, step, told, list(held)) == (found._state, 7, options, [0])
    assert held[0] is not None
    assert torch.equal(held[0], weight.grad)
    assert early.add_step.mock_calls == over.add_step.mock_calls == []
    assert found._gradients == {}, "they are held no longer than needed"
    found.close()
    assert [each.finish.call_count for each in (over, early, ready)] == [0, 1, 1]


def test_without_followers_nothing_is_held() -> None:
    found = donor()
    found._state.parameters[0].grad = torch.ones(1, 2)
    found.before_step()
    assert (found._gradients, found._options) == ({}, "")
    found.followers.append(late := mock.Mock(is_over=False, is_ready=True))
    found.after_step(1)
    assert late.add_step.mock_calls == [], "who came in between begins with the next step"
    found.close()


class Calls:
    """A listener that some call, until it is closed."""

    def __init__(self, *peers: Any) -> None:
        self._peers = list(peers)

    def accept(self) -> tuple[Any, Any]:
        if not self._peers:
            raise OSError("closed")
        return self._peers.pop(0), ("10.0.0.1", 5)


def test_as_many_are_taken_as_a_donor_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    made = mock.Mock()
    monkeypatch.setattr(module, "Session", made)
    found = donor()
    listener, peers = found._listener, [mock.Mock() for _ in range(5)]
    found._listener = Calls(*peers)
    found._take_calls()
    assert made.mock_calls == [mock.call(peer, "a key", found._state.layout) for peer in peers[:4]]
    assert found.followers == [made.return_value] * 4
    assert [peer.close.call_count for peer in peers] == [0, 0, 0, 0, 1]
    listener.close()


def test_who_comes_while_a_donor_closes_is_told_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    made = mock.Mock()
    monkeypatch.setattr(module, "Session", made)
    found = donor()
    found.close()
    found._listener = mock.Mock(accept=Calls(mock.Mock()).accept)
    found._take_calls()
    assert made.return_value.mock_calls == [mock.call.finish()]


def test_gradients_are_held_as_they_are_on_the_host() -> None:
    own, bucket = torch.zeros(2), torch.arange(4.0)
    parameters: Any = [SimpleNamespace(grad=own), SimpleNamespace(grad=None), SimpleNamespace(grad=bucket[1:3])]
    held = _held(parameters)
    assert {slot: each.tolist() for slot, each in held.items()} == {0: [0.0, 0.0], 2: [1.0, 2.0]}
    assert held[0].data_ptr() == own.data_ptr()
    bucket.zero_()
    assert held[2].tolist() == [1.0, 2.0], "the next step overwrites the bucket"
    turned = _held([SimpleNamespace(grad=torch.arange(6.0).view(2, 3).t())])[0]  # type: ignore[list-item]
    assert turned.is_contiguous()
    assert turned.tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    with pytest.raises(FollowingEnded, match=r"^gradients are sparse$"):
        _held([SimpleNamespace(grad=torch.zeros(2).to_sparse())])  # type: ignore[list-item]


def test_bytes_are_counted_over_all_tensors() -> None:
    assert _num_bytes([]) == 0
    assert _num_bytes([torch.zeros(3, dtype=torch.int16), torch.zeros(2, 2)]) == 22
