"""Tensors on their way to a follower, whatever their memory looks like."""

from __future__ import annotations

import hashlib
import hmac
import json
import socket
import threading
from typing import Any

import pytest
import torch

from elastipod.in_memory.follow_wire import FollowingEnded, receive, receive_tensor, send, shake_hands


@pytest.mark.parametrize("shape", [(2, 3), (0, 3), ()])
def test_a_tensor_arrives_in_the_memory_that_is_meant_for_it(shape: tuple[int, ...]) -> None:
    sent = torch.randn(shape)
    one, other = socket.socketpair()
    with one, other, other.makefile("rb") as file:
        send(one, {"step": 4}, [sent])
        assert receive(file) == {"step": 4}
        into = torch.zeros(shape)
        assert receive_tensor(file, into) is into
    assert torch.equal(into, sent)


def test_memory_that_is_not_contiguous_is_filled_in_the_order_of_the_tensor() -> None:
    sent, whole = torch.arange(6.0).view(2, 3), torch.zeros(3, 4)
    into = whole.t()[:2]
    one, other = socket.socketpair()
    with one, other, other.makefile("rb") as file:
        send(one, {}, [sent])
        receive(file)
        assert receive_tensor(file, into) is into
    assert torch.equal(into, sent)
    assert torch.count_nonzero(whole[:, 2:]) == 0


def test_a_peer_that_hangs_up_inside_a_tensor_is_told() -> None:
    one, other = socket.socketpair()
    with one, other, other.makefile("rb") as file:
        one.sendall(b"123")
        one.close()
        with pytest.raises(FollowingEnded, match=r"^the peer has hung up$"):
            receive_tensor(file, torch.zeros(2))


KEY, LAYOUT = "the key of a job", "built alike"


def mac(key: str, role: str, own: str, theirs: str) -> str:
    """Give what a side proves that it holds the key with, as another version of this library computes it."""
    text = f"elastipod-follow-v1\n{role}\n{own}\n{theirs}"
    return hmac.new(key.encode(), text.encode(), hashlib.sha256).hexdigest()


def shaken(*, is_donor: bool, key: str = KEY, role: str = "", greeting: dict[str, Any] | None = None) -> list[Any]:
    """Shake hands with a peer that is played here; give what that got, and what the handshake raised."""
    own, other = ("donor", "follower") if is_donor else ("follower", "donor")
    one, peer = socket.socketpair()
    got: list[Any] = []

    def play() -> None:
        with peer, peer.makefile("rb") as file:
            send(peer, greeting or {"v": 1, "challenge": "abc", "layout": LAYOUT})
            first = receive(file)
            challenge = first["challenge"]
            got.append({**first, "challenge": len(bytes.fromhex(challenge))})
            got.append(receive(file) == {"mac": mac(KEY, own, challenge, "abc")})
            send(peer, {"mac": mac(key, role or other, "abc", challenge)})

    player = threading.Thread(target=play, daemon=True)
    player.start()
    with one, one.makefile("rb") as file:
        try:
            shake_hands(one, file, KEY, LAYOUT, is_donor=is_donor)
        except FollowingEnded as error:
            got.append(str(error))
    player.join()
    return got


GREETED = [{"v": 1, "challenge": 16, "layout": LAYOUT}, True]


@pytest.mark.parametrize("is_donor", [True, False])
def test_both_sides_prove_in_their_own_role_that_they_hold_the_key(is_donor: bool) -> None:
    other = "follower" if is_donor else "donor"
    assert shaken(is_donor=is_donor) == GREETED
    no_key = f"the {other} does not hold the key of this job"
    assert shaken(is_donor=is_donor, key="another") == [*GREETED, no_key]
    mirrored = "donor" if is_donor else "follower"
    assert shaken(is_donor=is_donor, role=mirrored) == [*GREETED, no_key], "who sends back what it got"


@pytest.mark.parametrize("greeting", [{"v": 2, "layout": LAYOUT}, {"v": 1, "layout": "other"}, {"v": 1}])
def test_who_has_built_something_else_or_has_another_version_is_told_apart_from_a_stranger(
    greeting: dict[str, Any],
) -> None:
    said = "the follower has built another model or other optimizers, or has another elastipod"
    assert shaken(is_donor=True, greeting={**greeting, "challenge": "abc"}) == [*GREETED, said]


@pytest.mark.parametrize(("line", "said"), [
    (b"", "the peer has hung up, or sends more than is taken"),
    (b"{}", "the peer has hung up, or sends more than is taken"),
    (b'{"a":12}\n', ""),
    (b'{"a":123}\n', "the peer has hung up, or sends more than is taken"),
    (b"nothing\n", "the peer sends something that is no JSON object"),
    (b"[1]\n", "the peer sends something that is no JSON object"),
])  # fmt: skip
def test_a_head_is_a_json_object_on_a_line_of_a_bounded_length(line: bytes, said: str) -> None:
    one, other = socket.socketpair()
    with other, other.makefile("rb") as file:
        with one:
            one.sendall(line)
        if said:
            with pytest.raises(FollowingEnded) as caught:
                receive(file, limit=9)
            assert str(caught.value) == said
        else:
            assert receive(file, limit=9) == {"a": 12}


def test_a_greeting_may_have_512_bytes() -> None:
    empty = len(json.dumps({"v": 1, "challenge": "abc", "layout": LAYOUT, "more": ""}, separators=(",", ":"))) + 1
    for filled, is_taken in ((512 - empty, True), (513 - empty, False)):
        greeting = {"v": 1, "challenge": "abc", "layout": LAYOUT, "more": "x" * filled}
        one, peer = socket.socketpair()
        with one, peer, one.makefile("rb") as file:
            send(peer, greeting)
            send(peer, {"mac": "none"})
            with pytest.raises(
                FollowingEnded, match="does not hold the key" if is_taken else "sends more than is taken"
            ):
                shake_hands(one, file, KEY, LAYOUT, is_donor=True)


def test_what_is_sent_is_a_line_without_blanks_and_the_bytes_of_the_tensors() -> None:
    one, other = socket.socketpair()
    with other:
        with one:
            send(
                one,
                {"step": 4, "of": [1, 2]},
                [torch.tensor([1, 2], dtype=torch.int16), torch.tensor(3, dtype=torch.uint8)],
            )
        assert other.recv(100) == b'{"step":4,"of":[1,2]}\n' + bytes([1, 0, 2, 0, 3])
