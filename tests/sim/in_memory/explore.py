"""Explore every interleaving of the model, and require that each state can still reach the end without another fault."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from tests.sim.in_memory.model import moves
from tests.sim.in_memory.world import Rules, Violation, World, first_world


@dataclass(frozen=True, slots=True)
class Explored:
    """What was seen. names: how often each kind of move was taken, without the numbers of ranks."""

    num_states: int
    num_moves: int
    num_ends: int
    num_from_storage: int
    names: dict[str, int]


def explore(rules: Rules, limit: int = 5_000_000) -> Explored:
    """Visit all states. Raises Violation, with the way that leads there, for what must not be, a dead end included."""
    first = first_world(rules)
    numbers: dict[tuple[object, ...], int] = {first.key: 0}
    parents: list[tuple[int, str]] = [(-1, "the beginning")]
    healing: list[list[int]] = [[]]  # by state: the states from which it is reached without a fault
    ends: list[int] = []
    moves_made: dict[str, int] = {}
    num_moves = num_from_storage = 0
    queue: deque[tuple[int, World]] = deque([(0, first)])
    while queue:
        number, world = queue.popleft()
        if world.is_done or world.from_storage:
            ends.append(number)
            num_from_storage += world.from_storage
        can_go_on = False
        try:
            following = list(moves(world))
        except Violation as error:
            raise Violation(f"{error}; {_way(parents, number)}") from None
        for move in following:
            num_moves += 1
            moves_made[move.name] = moves_made.get(move.name, 0) + 1
            to = numbers.get(move.world.key)
            if to is None:
                to = numbers[move.world.key] = len(parents)
                parents.append((number, move.name))
                healing.append([])
                queue.append((to, move.world))
            if not move.is_fault:
                healing[to].append(number)
                can_go_on = True
        if not can_go_on and not (world.is_done or world.from_storage):
            raise Violation(f"nothing can happen any more; {_way(parents, number)}")
        assert len(parents) <= limit, f"more than {limit} states"
    _require_ends(ends, healing, parents)
    names: dict[str, int] = {}
    for name, times in moves_made.items():
        kind = " ".join(word for word in name.split() if not word.strip(",").isdigit())
        names[kind] = names.get(kind, 0) + times
    return Explored(len(parents), num_moves, len(ends), num_from_storage, names)


def _require_ends(ends: list[int], healing: list[list[int]], parents: list[tuple[int, str]]) -> None:
    reached = bytearray(len(parents))
    pending = list(ends)
    for number in ends:
        reached[number] = 1
    while pending:
        for before in healing[pending.pop()]:
            if not reached[before]:
                reached[before] = 1
                pending.append(before)
    stuck = reached.find(0)
    if stuck >= 0:
        raise Violation(f"the end cannot be reached any more; {_way(parents, stuck)}")


def _way(parents: list[tuple[int, str]], number: int) -> str:
    names: list[str] = []
    while number > 0:
        number, name = parents[number]
        names.append(name)
    return "after: " + "; ".join(reversed(names))
