"""Tensors on their way to a follower, whatever their memory looks like."""

from __future__ import annotations

import socket

import pytest
import torch

from elastipod.in_memory.follow_wire import FollowingEnded, receive, receive_tensor, send


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
