"""The store that this agent serves while it has group rank 0: keys, waits and limits, and which generation may use them. No I/O.

A call is answered at once or waits for keys. What a call answers is given with the tickets of all calls that it ends, the shell sends it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from elastipod.store_wire import MAX_KEY_BYTES, MAX_VALUE_BYTES, MAX_WAIT_S, AnswerKind, number

KEYS_PER_RANK = 256
BYTES_PER_RANK = 1024 * 1024
NEWCOMERS = 64  # connections beside one for each rank
MAX_WAITING = 16  # calls of one connection that wait at the same time

Ticket = tuple[int, bytes]
"""A connection, and the number of its call."""
Answers = list[tuple[Ticket, list[bytes]]]
Arguments = Sequence[bytes]


class CallRefused(Exception):
    """A call cannot be carried out; the text is the sentence for its caller."""


class StoreAdmission(Enum):
    """What becomes of a caller of a generation."""

    SERVE = "serve"
    WAIT = "wait"  # its /start has not come yet
    OVER = "over"


class StoreFence:
    """Which generation is served. serves: the one whose keys are here, None for none. num_ranks: of the newest that was started."""

    def __init__(self) -> None:
        self.serves: int | None = None
        self.num_ranks = 0
        self._newest = 0

    def begin(self, generation: int, num_ranks: int, *, is_server: bool) -> None:
        """A /start: what was served is over."""
        self._newest, self.num_ranks = max(self._newest, generation), num_ranks
        self.serves = generation if is_server else None

    def end(self) -> None:
        """Nothing is served any more."""
        self.serves = None

    def admits(self, generation: int) -> StoreAdmission:
        """Decide about a caller."""
        if generation == self.serves:
            return StoreAdmission.SERVE
        return StoreAdmission.WAIT if generation > self._newest else StoreAdmission.OVER

    def refusal(self, generation: int) -> str:
        """Say why a caller cannot be served."""
        if generation < self._newest:
            return f"generation {generation} is over; this agent knows generation {self._newest}"
        return f"the store of generation {generation} is not served here, or has ended"

    @property
    def max_connections(self) -> int:
        return self.num_ranks + NEWCOMERS


@dataclass(slots=True)
class _Wait:
    keys: Sequence[bytes]
    missing: set[bytes]
    is_get: bool


class StoreKeys:
    """The keys of one generation."""

    def __init__(self, num_ranks: int) -> None:
        """num_ranks: workers of the generation, which share the limits."""
        self._max_keys = KEYS_PER_RANK * num_ranks
        self._max_bytes = BYTES_PER_RANK * num_ranks
        self._num_bytes = 0
        self._values: dict[bytes, bytes] = {}
        self._created: list[bytes] = []  # by the present call
        self._waits: dict[Ticket, _Wait] = {}
        self._awaited: dict[bytes, dict[Ticket, None]] = {}
        self._num_waiting: dict[int, int] = {}

    def call(self, ticket: Ticket, name: bytes, arguments: Arguments) -> tuple[Answers, float]:
        """Carry out a call; give the answers that follow from it, and for how long the call waits, 0 if it does not.

        Raises CallRefused; then nothing has changed.
        """
        if name in (b"get", b"wait"):
            return self._wait(ticket, name == b"get", arguments)
        change = _CHANGES.get(name)
        if change is None:
            raise CallRefused(f"the store has no call {name.decode(errors='replace')!r}")
        answer = [AnswerKind.OK, *change(self, arguments)]
        created, self._created = self._created, []
        return [(ticket, answer), *self._end_waits(created)], 0.0

    def give_up(self, ticket: Ticket) -> Answers:
        """Answer a call whose time is over, if it still waits."""
        return [(ticket, [AnswerKind.LATE])] if self._take(ticket) is not None else []

    def forget(self, connection: int) -> None:
        """Drop what a connection waits for: it is gone."""
        for ticket in [ticket for ticket in self._waits if ticket[0] == connection]:
            self._take(ticket)

    # -- waits -----------------------------------------------------------------------------------------------------

    def _wait(self, ticket: Ticket, is_get: bool, arguments: Arguments) -> tuple[Answers, float]:
        if len(arguments) < 2:
            raise CallRefused("a wait has a time and keys")
        wait_s, keys = _seconds(arguments[0]), arguments[1:]
        missing = {key for key in keys if key not in self._values}
        pending = _Wait(keys, missing, is_get)
        if not missing:
            return [(ticket, self._ended(pending))], 0.0
        if not wait_s:
            return [(ticket, [AnswerKind.LATE])], 0.0
        if ticket in self._waits:
            raise CallRefused("a call that waits has this number already")
        if self._num_waiting.get(ticket[0], 0) >= MAX_WAITING:
            raise CallRefused(f"a rank waits for keys with {MAX_WAITING} calls at once at most")
        self._waits[ticket] = pending
        self._num_waiting[ticket[0]] = 1 + self._num_waiting.get(ticket[0], 0)
        for key in missing:
            self._awaited.setdefault(key, {})[ticket] = None
        return [], wait_s

    def _end_waits(self, created: Sequence[bytes]) -> Answers:
        """Give the answers of the calls that wait for none but these keys."""
        answers: Answers = []
        for key in created:
            for ticket in self._awaited.pop(key, {}):
                pending = self._waits[ticket]
                pending.missing.discard(key)
                if not pending.missing:
                    self._take(ticket)
                    answers.append((ticket, self._ended(pending)))
        return answers

    def _ended(self, pending: _Wait) -> list[bytes]:
        return [AnswerKind.OK, *([self._values[key] for key in pending.keys] if pending.is_get else ())]

    def _take(self, ticket: Ticket) -> _Wait | None:
        pending = self._waits.pop(ticket, None)
        if pending is None:
            return None
        left = self._num_waiting.pop(ticket[0]) - 1
        if left:
            self._num_waiting[ticket[0]] = left
        for key in pending.missing:
            waiting = self._awaited.get(key, {})
            waiting.pop(ticket, None)
            if not waiting:
                self._awaited.pop(key, None)
        return pending

    # -- changes and looks, each with its arguments, and with what it answers ---------------------------------------

    def _set(self, arguments: Arguments) -> Arguments:
        if not arguments or len(arguments) % 2:
            raise CallRefused("a value needs a key")
        self._put(dict(zip(arguments[::2], arguments[1::2], strict=True)))
        return ()

    def _add(self, arguments: Arguments) -> Arguments:
        key, amount = _exactly(2, arguments)
        total = number(_integer(self._values.get(key, b"0")) + _integer(amount))
        self._put({key: total})
        return (total,)

    def _append(self, arguments: Arguments) -> Arguments:
        key, value = _exactly(2, arguments)
        self._put({key: self._values.get(key, b"") + value})
        return ()

    def _compare_set(self, arguments: Arguments) -> Arguments:
        """As torch's stores: a key that is missing is set if nothing is expected; else the caller gets what it expected."""
        key, expected, desired = _exactly(3, arguments)
        if self._values.get(key, b"") == expected:
            self._put({key: desired})
        return (self._values.get(key, expected),)

    def _check(self, arguments: Arguments) -> Arguments:
        return (number(int(all(key in self._values for key in arguments))),)

    def _delete(self, arguments: Arguments) -> Arguments:
        (key,) = _exactly(1, arguments)
        value = self._values.pop(key, None)
        if value is None:
            return (number(0),)
        self._num_bytes -= len(key) + len(value)
        return (number(1),)

    def _count(self, arguments: Arguments) -> Arguments:
        return (number(len(self._values)),)

    def _put(self, values: Mapping[bytes, bytes]) -> None:
        growth = 0
        for key, value in values.items():
            if len(key) > MAX_KEY_BYTES or len(value) > MAX_VALUE_BYTES:
                raise CallRefused(
                    f"a key may have {MAX_KEY_BYTES} bytes and a value {MAX_VALUE_BYTES}; {key[:80].decode(errors='replace')!r} "
                    f"has {len(key)} and {len(value)}"
                )
            old = self._values.get(key)
            growth += len(value) - len(old) if old is not None else len(key) + len(value)
        created = [key for key in values if key not in self._values]
        if len(self._values) + len(created) > self._max_keys or self._num_bytes + growth > self._max_bytes:
            raise CallRefused(
                f"the store of this generation is full: it takes {self._max_keys} keys and {self._max_bytes} bytes, "
                f"{KEYS_PER_RANK} and {BYTES_PER_RANK} for each rank"
            )
        self._num_bytes += growth
        self._values.update(values)
        self._created += created


_CHANGES: dict[bytes, Callable[[StoreKeys, Arguments], Arguments]] = {
    b"set": StoreKeys._set,
    b"add": StoreKeys._add,
    b"append": StoreKeys._append,
    b"compare_set": StoreKeys._compare_set,
    b"check": StoreKeys._check,
    b"delete": StoreKeys._delete,
    b"count": StoreKeys._count,
}


def _exactly(count: int, arguments: Arguments) -> Arguments:
    if len(arguments) != count:
        raise CallRefused(f"this call has {count} arguments, not {len(arguments)}")
    return arguments


def _integer(text: bytes) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 1 << 63
    if abs(value) >= 1 << 63:
        raise CallRefused("a counter must be a whole number of 64 bits")
    return value


def _seconds(text: bytes) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= MAX_WAIT_S:
        raise CallRefused(f"a call waits from 0 to {MAX_WAIT_S:g} s")
    return seconds
