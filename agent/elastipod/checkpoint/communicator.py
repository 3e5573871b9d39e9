"""What the ranks of a checkpoint tell and send one another, over connections of their own; no wait is without an end.

What ranks tell goes by team leaders to rank 0, which makes one value of it for all (`hierarchy.py`). Two ranks that send each other
raw bytes connect when they do so first, unless they are of one team.

A rank that is at work says so every BEAT_S. One that says nothing for SILENCE_S is given up by those who wait for it; who
gives up puts its reason into the store and closes its connections, so that the others' waits end too, within moments
and one after the other. Training goes on meanwhile, and `open` connects anew.
"""

from __future__ import annotations

import json
import logging
import random
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from elastipod.checkpoint.gloo_collectives import Broken, GlooLink, connected
from elastipod.checkpoint.hierarchy import Relay, Teams
from elastipod.errors import CheckpointError
from elastipod.rank_names import name_ranks
from elastipod.ranks import FAILED, rank_and_world, tried, value_of

log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")
Arrived = Callable[[torch.Tensor], None]
Piece = tuple[torch.Tensor, Arrived | None]
_PassOn = Callable[[Relay | None, Mapping[str, Any] | None, Teams], bytes]
_Stream = tuple[int, Iterator[Piece]]  # the other rank, and blocks to or from it

SILENCE_S = 60.0  # so long a rank waits for another one's next word, or next block
BEAT_S = 10.0  # so often a rank at work says that it is
PATIENCE_S = 7200.0  # for one rank's part of something, such as writing its file
BLOCK = 4 << 20  # bytes that travel at once; they are still in the processor's cache when they are added up
_AHEAD = 4  # blocks of each stream that are under way at once
_REASONS_S = 5.0  # for asking the store why
_LEAVING_S = 1.0  # within which the ranks that live have noticed that one has left
_QUESTIONS_PER_S = 5000  # that all ranks together may put to the store
_CHANCE = random.SystemRandom()  # not Python's own generator, whose state belongs to the training script
_NAMED = 64  # ranks; in larger worlds the silent ones are not looked for


class RanksLost(CheckpointError):
    """The ranks lost touch in the middle of a checkpoint; the text says why. What was under way is given up by all."""


class Exchange:
    """Connections between the ranks for one manager. Methods are collective and called by one thread at a time."""

    def __init__(self) -> None:
        """Make the groups in which the training's threads meet, and connect."""
        self._rank, self._world_size = rank_and_world()
        self._teams = Teams.of(self._world_size)
        self._meeting = _meeting_of(self._rank, self._teams) if self._world_size > 1 else None
        self._connections: _Connections | None = None  # of our own: of torch's groups none can be given up
        self._store: Any = None
        self.open()

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def is_open(self) -> bool:
        """Tell whether this rank has connections to use; a single process needs none."""
        return self._world_size == 1 or self._connections is not None

    def meet(self, produce: Callable[[], T], combine: Callable[[list[T]], R]) -> R:
        """As `agree`, but quick, and from the training's thread: ranks may come to it as late as to a step."""
        said = [_encoded(tried(produce))]
        if self._meeting is not None:
            said = self._meeting.gather(said[0])
        value: R = value_of(json.loads(_to_all(self._meeting, _combined(said, combine) if said else None, self._teams)))
        return value

    def meet_zero(self, decide: Callable[[], T]) -> T:
        """As `rank_zero`, in the way of `meet`."""
        value: T = value_of(self.meet(lambda: tried(decide) if self._rank == 0 else {}, _first))
        return value

    def open(self) -> None:
        """Connect, anew where there were connections. From the training's thread. Raises CheckpointError on all ranks."""
        self._connections = None
        if self._world_size == 1:
            return
        name = self.meet_zero(lambda: secrets.token_hex(8))
        store = dist.distributed_c10d._get_default_store()
        self._store = dist.distributed_c10d.PrefixStore(f"elastipod-checkpoints/{name}", store)

        def connect() -> None:
            try:
                self._connections = _Connections(self._store, self._rank, self._teams)
            except RuntimeError as error:
                raise CheckpointError(f"it cannot connect to the others for checkpoints: {error}") from error

        self.meet(connect, nothing)

    def close(self) -> None:
        """Let the connections go, when nothing is under way."""
        self._connections = None

    def agree(self, produce: Callable[[], T], combine: Callable[[list[T]], R]) -> R:
        """Run ``produce`` on every rank, and ``combine`` on rank 0 with all (JSON-able) values, by rank; give what it gives on every rank.

        When ``produce`` fails anywhere, its failure is raised everywhere and names the first rank that failed; so is what ``combine``
        raises, which must be quick. ``produce`` may take long: this rank says meanwhile that it is at work, from a thread. It must not
        use the exchange. Raises RanksLost, FencedError, CheckpointError.
        """
        value: R = value_of(json.loads(self._told(produce, combine, _to_all)))
        return value

    def every_rank(self, work: Callable[[], object]) -> None:
        """Run something on every rank, as `agree` does; all come back when all have done it, or all raise."""

        def done() -> None:
            work()

        self.agree(done, nothing)

    def rank_zero(self, decide: Callable[[], T]) -> T:
        """Run ``decide``, which may take long, on rank 0 and give its value on every rank; as `agree`."""
        value: T = value_of(self.agree(lambda: tried(decide) if self._rank == 0 else {}, _first))
        return value

    def deliver(self, write: Callable[[], Mapping[int, T]]) -> dict[int, T]:
        """Run ``write`` on every rank, which gives (JSON-able) letters by the rank that gets them; give those for this rank, by sender.

        They go by way of rank 0. As `agree`.
        """
        answer = value_of(json.loads(self._told(lambda: [*write().items()], _sorted_letters, _to_each)))
        return {int(sender): letter for sender, letter in answer}

    def transfer(self, out: Mapping[int, Iterable[torch.Tensor]], into: Mapping[int, Iterable[Piece]]) -> None:
        """Send and receive raw bytes, all at once, block by block.

        out: by the rank that gets them, contiguous uint8 tensors. into: by the rank that sends them, such tensors of the same
        sizes in the same order, each with what is called for each of its blocks, in order, when it is there; both are
        asked for one after the other. All ranks call this, also those with nothing to send. Raises RanksLost.
        """
        assert self.is_open or not (out or into)
        going = [(to, _blocks((each, None) for each in pieces)) for to, pieces in out.items()]
        coming = [(source, _blocks(pieces)) for source, pieces in into.items()]
        under_way: deque[list[_Block]] = deque()
        number = 0
        try:
            self._reach({*out, *into})
            while going or coming or under_way:
                while (going or coming) and len(under_way) < _AHEAD:
                    under_way.append(self._post(going, coming, number))
                    number += 1
                for block in under_way[0]:  # while the next ones travel already
                    block.wait()
                under_way.popleft()
        except Broken as error:
            for block in (each for blocks in under_way for each in blocks):
                block.work = None  # it would keep the connections open
            raise self._lost(error) from error
        except BaseException as error:
            self.leave(f"{type(error).__name__}: {error}")
            raise

    def leave(self, why: str) -> None:
        """Give the connections up for a reason of one's own; what the others wait for ends with that reason."""
        if self._connections is not None:
            self._in_time(lambda store: store.set("why", f"rank {self._rank}: {why}"))
            self._connections = None

    def _reach(self, others: Iterable[int]) -> None:
        """Connect to those that there is no connection to, in an order in which no circle of ranks waits for one another."""
        if self._connections is None:
            return
        for other in sorted(others, key=lambda other: (min(self._rank, other), max(self._rank, other))):
            with connected():
                self._connections.to(other)

    def _post(self, going: list[_Stream], coming: list[_Stream], number: int) -> list[_Block]:
        """Begin to send and receive the next block of every stream, and drop the streams that have ended."""
        assert self._connections is not None
        posted: list[_Block] = []
        for streams in (going, coming):
            for stream in list(streams):
                other, blocks = stream
                data, arrived = next(blocks, (None, None))
                if data is None:
                    streams.remove(stream)
                    continue
                group, there = self._connections.to(other)
                begin = group.send if streams is going else group.recv
                with connected():
                    posted.append(_Block(begin([data], there, number), data, arrived))
        return posted

    def _told(self, produce: Callable[[], T], combine: Callable[[list[T]], object], pass_on: _PassOn) -> bytes:
        """Carry out `agree` and `deliver`: give what rank 0 has for this rank."""
        if self._world_size == 1:
            return pass_on(None, _combined([_encoded(tried(produce))], combine), self._teams)
        talk = _Talk(lambda answer: self._round(answer, combine, pass_on))
        answer = tried(_interrupted)  # unless there is another: the others need not wait for one who was interrupted
        try:
            answer = tried(produce)
        finally:
            talk.say(answer)
            talk.join()
        if isinstance(talk.failure, Broken):
            raise self._lost(talk.failure) from talk.failure
        if talk.failure is not None:
            self.leave(str(talk.failure))
            raise RanksLost(f"rank {self._rank}: {talk.failure}") from talk.failure
        return talk.verdict

    def _round(self, answer: bytes, combine: Callable[[list[Any]], object], pass_on: _PassOn) -> bytes:
        """Tell rank 0 an answer, empty while there is none; gives its verdict, empty while not all have answered."""
        if self._connections is None:
            raise Broken("there are no connections any more")
        relay = self._connections.relay
        said = relay.gather(answer)
        is_complete = relay.broadcast(b"complete" if said and all(said) else b"")
        if not is_complete:
            return b""
        return pass_on(relay, _combined(said, combine) if said else None, self._teams)

    def _lost(self, error: Broken) -> RanksLost:
        """Close the connections, so that others notice, and find out who is missing or what it said."""
        self._connections = None
        found = self._in_time(self._ask_why)
        log.debug("a connection broke: %s", error)
        return RanksLost(found or "the connections between the ranks broke")

    def _ask_why(self, store: Any) -> str:
        store.set(f"left/{self._rank}", "")
        silent = [rank for rank in range(self._world_size) if rank != self._rank and self._world_size <= _NAMED]
        deadline = time.monotonic() + _LEAVING_S
        while True:
            if store.check(["why"]):
                return str(store.get("why"), "utf-8")
            silent = [rank for rank in silent if not store.check([f"left/{rank}"])]
            if not silent or time.monotonic() > deadline:
                break
            time.sleep(max(0.02, self._world_size / _QUESTIONS_PER_S) * _CHANCE.uniform(0.75, 1.25))
        return f"{name_ranks(silent)} ended, or said nothing for {SILENCE_S:g} s" if silent else ""

    def _in_time(self, ask: Callable[[Any], object]) -> str:
        """Use the store, which may be gone with its host, for a few seconds at most; "" when nothing comes of it."""
        said: list[object] = []

        def run() -> None:
            try:
                assert self._store is not None
                said.append(ask(self._store))
            except RuntimeError as error:
                log.debug("the store does not answer: %s", error)

        thread = threading.Thread(target=run, name="elastipod-checkpoint-why", daemon=True)
        thread.start()
        thread.join(_REASONS_S)
        return str(said[0] or "") if said else ""


@dataclass(slots=True)
class _Block:
    """A block under way. arrived: is told when it is there."""

    work: Any
    data: torch.Tensor
    arrived: Arrived | None

    def wait(self) -> None:
        with connected():
            self.work.wait()
        if self.arrived is not None:
            self.arrived(self.data)


def nothing(_: list[Any]) -> None:
    """Make nothing of what all ranks gave: for what need only be done everywhere, or fail everywhere."""


def first_of(texts: list[str | None]) -> str | None:
    """Give the first thing that a rank had to say, None where none had."""
    return next((each for each in texts if each is not None), None)


class _Connections:
    """One rank's connections: to its team, to the other leaders where it leads, and to others once they are needed."""

    def __init__(self, store: Any, rank: int, teams: Teams) -> None:
        """Connect. Raises RuntimeError when the others do not come."""
        self._store, self._rank, self._members = store, rank, teams.members(rank)
        leader = self._members[0]
        self._team = self._connect(f"team {leader}", self._members)
        leads = rank == leader and len(teams.leaders) > 1
        self.relay = Relay(self._team, self._connect("leaders", teams.leaders) if leads else None)
        self._pairs: dict[int, GlooLink] = {}

    def to(self, other: int) -> tuple[Any, int]:
        """Give a group with another rank in it, and that rank's number there; connects first if need be."""
        if other in self._members:
            return self._team.group, self._members.index(other)
        pair = sorted((self._rank, other))
        if other not in self._pairs:
            self._pairs[other] = self._connect(f"pair {pair}", pair)
        return self._pairs[other].group, pair.index(other)

    def _connect(self, name: str, ranks: Sequence[int]) -> GlooLink:
        store = dist.distributed_c10d.PrefixStore(name, self._store)
        return GlooLink.connect(store, ranks.index(self._rank), len(ranks), SILENCE_S)


class _Talk(threading.Thread):
    """Tells rank 0 that this rank is at work, until there is an answer and all have one."""

    def __init__(self, tell: Callable[[bytes], bytes]) -> None:
        super().__init__(name="elastipod-checkpoint-talk", daemon=True)
        self._tell = tell
        self._answer = b""
        self._is_said = threading.Event()
        self.verdict = b""
        self.failure: Exception | None = None
        self.start()

    def say(self, answer: Mapping[str, Any]) -> None:
        self._answer = _encoded(answer)
        self._is_said.set()

    def run(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        try:
            while not self.verdict:
                if not self._is_said.wait(BEAT_S) and time.monotonic() > deadline:
                    raise TimeoutError(f"its part was not done within {PATIENCE_S:g} s")
                self.verdict = self._tell(self._answer if self._is_said.is_set() else b"")
        except Exception as error:  # kept for the caller, which is another thread
            self.failure = error


def _meeting_of(rank: int, teams: Teams) -> Relay:
    """Make torch's own groups for the training's threads, which end with the job's other groups.

    Every rank makes every group, also those that it is not in: torch names groups by counting them.
    """
    members = {leader: teams.members(leader) for leader in teams.leaders}
    links: dict[Sequence[int], GlooLink] = {}
    for ranks in dict.fromkeys([*members.values(), teams.leaders]):
        group = dist.new_group(list(ranks), backend="gloo") if len(ranks) > 1 else None
        if rank in ranks:
            links[ranks] = GlooLink(group, ranks.index(rank), len(ranks))
    leads = rank in teams.leaders and len(teams.leaders) > 1
    return Relay(links[teams.members(rank)], links[teams.leaders] if leads else None)


def _combined(said: Sequence[bytes], combine: Callable[[list[Any]], object]) -> dict[str, Any]:
    """Make rank 0's verdict of what all ranks said: the first failure, else what ``combine`` makes of their values."""
    answers = [json.loads(each) for each in said]
    failed = next(((rank, each) for rank, each in enumerate(answers) if "value" not in each), None)
    if failed is None:
        return tried(lambda: combine([each["value"] for each in answers]))
    rank, answer = failed
    return {kind: f"rank {rank}: {text}" if kind == FAILED else text for kind, text in answer.items()}


def _to_all(relay: Relay | None, verdict: Mapping[str, Any] | None, _: Teams) -> bytes:
    data = _encoded(verdict) if verdict is not None else b""
    return relay.broadcast(data) if relay is not None else data


def _to_each(relay: Relay | None, verdict: Mapping[str, Any] | None, teams: Teams) -> bytes:
    """Pass letters on to those whom they are for; a failure to all."""
    parts: list[bytes] = []
    if verdict is not None:
        letters = verdict.get("value", {})
        parts = [
            _encoded({"value": letters.get(rank, [])} if "value" in verdict else verdict)
            for rank in range(teams.world_size)
        ]
    return relay.scatter(parts, teams) if relay is not None else parts[0]


def _sorted_letters(written: list[list[Any]]) -> dict[int, list[Any]]:
    """Give the letters for each rank, as (sender, letter)."""
    letters: dict[int, list[Any]] = {}
    for sender, own in enumerate(written):
        for to, letter in own:
            letters.setdefault(to, []).append((sender, letter))
    return letters


def _encoded(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _first(values: list[T]) -> T:
    return values[0]


def _interrupted() -> None:
    raise CheckpointError("it was interrupted")


def _blocks(pieces: Iterable[Piece]) -> Iterator[Piece]:
    for data, arrived in pieces:
        for start in range(0, data.numel(), BLOCK):
            yield data[start : start + BLOCK], arrived
