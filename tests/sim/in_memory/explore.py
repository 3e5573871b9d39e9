"""Explore every interleaving of the model, and require that each state can still reach the end without another fault."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from dataclasses import dataclass, replace

from tests.sim.in_memory.model import calm_move, is_calm, moves
from tests.sim.in_memory.rules import Rules
from tests.sim.in_memory.world import Move, Violation, World, first_world


@dataclass(frozen=True, slots=True)
class Explored:
    """What was seen.

    num_states: that were told apart and kept. names: how often each kind of move was taken, without numbers of ranks. finals: the states
    in which nothing more can happen, as far as they matter.
    """

    num_states: int
    num_moves: int
    num_ends: int
    num_from_storage: int
    names: Counter[str]
    finals: frozenset[tuple[object, ...]]


class Exploration:
    """The states that were visited, and how they were reached."""

    def __init__(self, rules: Rules) -> None:
        first = first_world(rules)
        self.rules = rules
        self.numbers: dict[tuple[object, ...], int] = {first.key: 0}
        self._parents = array("q", [-1])
        self._from, self._to = array("q"), array("q")  # of moves that are no faults
        self._ends = array("q")
        self._num_from_storage = 0
        self._names: Counter[str] = Counter()
        self._finals: set[tuple[object, ...]] = set()
        self._queue: deque[tuple[int, World]] = deque([(0, first)])

    def run(self, limit: int) -> Explored:
        while self._queue:
            number, world = self._queue.popleft()
            try:
                if self.rules.is_reduced and is_calm(world):
                    self._follow(number, world)
                else:
                    self._visit(number, world)
            except Violation as error:
                raise Violation(f"{error}; after: {self._way(number)}") from None
            assert len(self.numbers) <= limit, f"more than {limit} states"
        self._require_ends()
        num_moves = sum(self._names.values())
        names: Counter[str] = Counter()
        for name, times in self._names.items():
            names[_kind(name)] += times
        finals = frozenset(self._finals)
        return Explored(len(self.numbers), num_moves, len(self._ends), self._num_from_storage, names, finals)

    def _visit(self, number: int, world: World) -> None:
        """Take every move."""
        is_end = world.is_done or world.from_storage
        if is_end:
            self._end(number, world)
        can_go_on = False
        for move in moves(world):
            to = self._reach(number, move)
            if not move.is_fault:
                self._from.append(number)
                self._to.append(to)
                can_go_on = True
        if not can_go_on:
            if not is_end:
                raise Violation("nothing can happen any more")
            self._finals.add(_final(world))

    def _follow(self, number: int, world: World) -> None:
        """Take one move after the other to where something can go more than one way, or to the end."""
        while is_calm(world):
            move = calm_move(world)
            if move is None:
                if not world.is_done:
                    raise Violation("nothing can happen any more, where nobody fails")
                self._end(number, world)
                self._finals.add(_final(world))
                return
            if is_calm(move.world):
                self._names[move.name] += 1
            else:
                self._from.append(number)
                self._to.append(self._reach(number, move))
            world = move.world

    def _end(self, number: int, world: World) -> None:
        self._ends.append(number)
        self._num_from_storage += world.from_storage

    def _reach(self, number: int, move: Move) -> int:
        self._names[move.name] += 1
        to = self.numbers.get(move.world.key)
        if to is None:
            to = self.numbers[move.world.key] = len(self._parents)
            self._parents.append(number)
            self._queue.append((to, move.world))
        return to

    def _require_ends(self) -> None:
        before: dict[int, list[int]] = {}
        reached = bytearray(len(self._parents))
        for number, to in zip(self._from, self._to, strict=True):
            before.setdefault(to, []).append(number)
        pending = list(self._ends)
        for number in pending:
            reached[number] = 1
        while pending:
            for number in before.get(pending.pop(), ()):
                if not reached[number]:
                    reached[number] = 1
                    pending.append(number)
        stuck = reached.find(0)
        if stuck >= 0:
            raise Violation(f"the end cannot be reached any more; after: {self._way(stuck)}")

    def _way(self, number: int) -> str:
        """Tell how a state was reached: the worlds on the way are made once more."""
        numbers = [number]
        while self._parents[numbers[-1]] >= 0:
            numbers.append(self._parents[numbers[-1]])
        world, names = first_world(self.rules), []
        for to in reversed(numbers[:-1]):
            while True:
                found = next((move for move in moves(world) if self.numbers.get(move.world.key) == to), None)
                move = found or calm_move(world)
                assert move is not None
                names.append(move.name)
                world = move.world
                if found:
                    break
        return "; ".join(names)


def explore(rules: Rules, limit: int = 12_000_000) -> Explored:
    """Visit all states. Raises Violation, with the way that leads there, for what must not be, a dead end included."""
    return Exploration(rules).run(limit)


def _final(world: World) -> tuple[object, ...]:
    """Give what counts of a state in which nothing more can happen."""
    if world.from_storage:  # whoever sees so first ends it, wherever the others are
        return ("storage", world.generation, world.faults, world.exposed, world.resizes, world.newest)
    return replace(world, rules=replace(world.rules, is_reduced=True)).key


def _kind(name: str) -> str:
    return " ".join(word for word in name.split() if not word.strip(",").isdigit())
