"""The donor's side of following: newcomers get the state between steps, piece by piece, and the gradients of each step after it."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import torch

from elastipod.chaos import Moment, reached
from elastipod.in_memory.follow_wire import HANDSHAKE_S, FollowingEnded, send, shake_hands, shut_down
from elastipod.in_memory.followed_state import FollowedState
from elastipod.in_memory.host_memory import private_bytes
from elastipod.in_memory.members import Members

log = logging.getLogger(__name__)

MAX_FOLLOWERS = 4  # of one donor
COPIED_BYTES = 16 << 20  # of the state in one step, rounded up to whole parameters
MAX_WAITING_BYTES = 1 << 30  # of each follower: copies and gradients that the network has not taken yet
TAKES_S = 60.0  # a follower that takes nothing for so long is given up


class Donor:
    """One rank of a generation, for those who follow it. A thread takes their calls, and one for each of them sends."""

    def __init__(self, members: Members, key: str, host: str, rank: int = 0) -> None:
        """Begin to listen. Raises FollowingEnded where the members cannot be followed, OSError."""
        self.followers: list[Session] = []  # threads only append
        self._rank = rank
        self._state = FollowedState(members)
        self._key = key
        self._is_closed = False
        self._copies_gradients = (
            False  # because an optimizer changes them in place, as SGD(nesterov=True, foreach=True) does
        )
        self._gradients: dict[int, torch.Tensor] = {}
        self._versions: dict[int, int] = {}
        self._options = ""
        self._listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._take_calls, name="elastipod-donor", daemon=True).start()

    def before_step(self) -> None:
        """The gradients are there, and the optimizers are about to run. Raises FollowingEnded, ValueError."""
        for each in [each for each in self.followers if each.is_over]:
            self.followers.remove(each)
        if self.followers:
            gradients = _held(self._state.parameters, copies=self._copies_gradients)
            self._options, self._gradients = self._state.options(), gradients
            self._versions = {slot: each._version for slot, each in gradients.items()}

    def after_step(self, step: int) -> None:
        """The optimizers have run. Raises FollowingEnded."""
        gradients, self._gradients = self._gradients, {}
        if any(each._version != self._versions[slot] for slot, each in gradients.items()):
            self._copies_gradients = True
            gradients = {}  # those who hold parameters already cannot repeat this step
            for follower in list(self.followers):
                follower.end_begun(
                    "an optimizer changes gradients in place; from the next step on they are copied before"
                )
        for follower in list(self.followers):
            if follower.is_ready and not follower.is_over and self._options:
                reached(Moment.FOLLOWING, rank=self._rank, step=step)
                follower.add_step(self._state, step, self._options, gradients)

    def close(self) -> None:
        """Take no more steps. What is under way is still sent, by threads that nobody waits for."""
        self._is_closed = True
        shut_down(self._listener)
        self._listener.close()
        for follower in list(self.followers):
            follower.finish()

    def _take_calls(self) -> None:
        with suppress(OSError):  # closed
            while True:
                peer, _ = self._listener.accept()
                if len(self.followers) < MAX_FOLLOWERS:
                    self.followers.append(Session(peer, self._key, self._state.layout))
                else:
                    peer.close()
                if self._is_closed:  # too late for those who came to be told so
                    self.close()


class Session:
    """One follower. The thread that trains adds steps; another one sends them. is_ready: it has proven who it is."""

    def __init__(self, peer: socket.socket, key: str, layout: str) -> None:
        self.is_ready = self.is_over = False
        self._peer, self._key, self._layout = peer, key, layout
        self._next_slot = 0
        self._options = ""
        self._queue: SimpleQueue[tuple[Mapping[str, Any], Sequence[torch.Tensor]]] = SimpleQueue()
        self._added_bytes = self._sent_bytes = 0  # each is written by one thread only
        threading.Thread(target=self._send_all, name="elastipod-donor-sends", daemon=True).start()

    def add_step(self, state: FollowedState, step: int, options: str, gradients: Mapping[int, torch.Tensor]) -> None:
        """Have a step sent: the gradients of what the follower has, and copies of more of the state. Raises FollowingEnded."""
        known = [slot for slot in gradients if slot < self._next_slot]
        tensors = [gradients[slot] for slot in known]
        slots: list[Any] = []
        room = COPIED_BYTES - self._waiting_bytes
        while room > 0 and self._next_slot < len(state.parameters):
            told, copies = state.copied(self._next_slot)
            slots.append(told)
            tensors += copies
            room -= _num_bytes(copies)
            self._next_slot += 1
        is_whole = self._next_slot == len(state.parameters)
        head: dict[str, Any] = {"step": step, "of": known, "slots": slots, "is_whole": is_whole}
        if is_whole and slots:
            head["private_bytes"] = private_bytes()
        head["options"], self._options = options if options != self._options else None, options
        self._added_bytes += _num_bytes(tensors)
        if self._waiting_bytes > MAX_WAITING_BYTES:
            self.end(f"it is {self._waiting_bytes >> 20} MiB behind; {MAX_WAITING_BYTES >> 20} are kept for it")
        self._queue.put((head, tensors))

    def end_begun(self, why: str) -> None:
        """Send nothing any more to a follower that has parts of the state already."""
        if self._next_slot:
            self.end(why)

    def finish(self) -> None:
        """Send what is waiting, and that nothing follows."""
        self._queue.put(({"end": True}, []))

    def end(self, why: str) -> None:
        """Send nothing any more."""
        if not self.is_over:
            log.warning("a newcomer follows this rank no longer and will be filled when it joins: %s", why)
        self.is_over = True
        self.finish()
        shut_down(self._peer)

    @property
    def _waiting_bytes(self) -> int:
        return self._added_bytes - self._sent_bytes

    def _send_all(self) -> None:
        try:
            with self._peer, self._peer.makefile("rb") as file:
                self._peer.settimeout(HANDSHAKE_S)
                shake_hands(self._peer, file, self._key, self._layout, is_donor=True)
                self._peer.settimeout(TAKES_S)
                self.is_ready = True
                while not self.is_over:
                    head, tensors = self._queue.get()
                    send(self._peer, head, tensors)
                    self._sent_bytes += _num_bytes(tensors)
                    self.is_over = "end" in head
                    del tensors
        except (FollowingEnded, OSError) as error:
            self.end(str(error))


def _held(parameters: Sequence[torch.nn.Parameter], *, copies: bool = False) -> dict[int, torch.Tensor]:
    """Give the gradients as they are now, by slot. Each step makes new ones, so a reference holds them, unless they are views.

    copies: hold copies of all. Raises FollowingEnded for sparse gradients.
    """
    held: dict[int, torch.Tensor] = {}
    for slot, gradient in enumerate(each.grad for each in parameters):
        if gradient is not None and gradient.is_sparse:
            raise FollowingEnded("gradients are sparse")
        if gradient is not None:
            is_bucket = gradient._is_view()  # of DDP's, which the next step overwrites
            held[slot] = (gradient.clone() if is_bucket or copies else gradient).detach().cpu().contiguous()
    return held


def _num_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)
