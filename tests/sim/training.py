"""The model of the training itself: one run of the workers for each generation, and the storage that outlives them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from tests.sim.events import Make
from tests.sim.invariants import InvariantChecker
from tests.sim.kernel import Kernel, Script

if TYPE_CHECKING:
    from tests.sim.agent_process import AgentProcess

STEP_S = 2.0
CHECKPOINT_EVERY = 25
OWN_STOP_S = 5.0


@dataclass(frozen=True, slots=True, order=True)
class Checkpoint:
    """A complete checkpoint: the step it holds and the generation that wrote it."""

    step: int
    generation: int


@dataclass(frozen=True, slots=True)
class Image:
    """What the workers of one pod hold of a step in their memory: some of its parts, of so many."""

    state: Checkpoint
    parts: frozenset[int] = frozenset({0})
    num_parts: int = 1


class Phase(Enum):
    """Where a run of the workers is."""

    GATHERING = "gathering"
    LOADING = "loading"
    STEPPING = "stepping"
    SAVING = "saving"
    OVER = "over"


@dataclass(slots=True)
class Run:
    """One generation: who takes part and how far it came."""

    generation: int
    nnodes: int
    members: dict[int, AgentProcess] = field(default_factory=dict)
    phase: Phase = Phase.GATHERING
    resumed: Checkpoint = Checkpoint(0, 0)
    step: int = 0
    spoiled: set[str] = field(default_factory=set)
    """Faults that were inflicted on it."""
    event_pending: bool = False
    is_filled: bool = False
    """All its workers hold the state that it goes on from."""
    is_from_memory: bool = False
    """It went on from what a survivor held in memory, as there was no checkpoint as new."""
    paused_until: float = 0.0
    """Its workers make no steps until then, though nothing is wrong: they evaluate."""

    @property
    def is_saving(self) -> bool:
        """Whether all its workers are on their way to their end."""
        return self.event_pending and self.phase is Phase.SAVING

    @property
    def newest(self) -> Checkpoint | None:
        """What each of its workers holds; None before all of them were filled."""
        made = Checkpoint(self.step, self.generation) if self.steps_made else self.resumed
        return made if self.is_filled else None

    @property
    def steps_made(self) -> int:
        return self.step - self.resumed.step if self.phase is not Phase.GATHERING else 0


class Training:
    """All runs of a job, its checkpoints and claims. total: the step at which the job is done; None: not yet decided."""

    def __init__(
        self, kernel: Kernel, rng: Random, checker: InvariantChecker, *, heeds_events: bool, timeout_s: float
    ) -> None:
        self._kernel = kernel
        self._rng = rng
        self.checker = checker
        self.heeds_events = heeds_events
        self.collective_timeout_s = timeout_s
        self.runs: dict[int, Run] = {}
        self.checkpoints: set[Checkpoint] = set()
        self.newest_claim = 0
        self.total: int | None = None
        self.num_steps = 0
        """All steps that workers made, repeated ones too."""

    def join(self, agent: AgentProcess, generation: int, rank: int, nnodes: int, master: str) -> None:
        """The workers of one pod begin and look for the others."""
        run = self.runs.get(generation)
        if run is None:
            run = self.runs[generation] = Run(generation, nnodes)
        self.checker.joined(run, agent, rank, nnodes, master)
        run.members[rank] = agent
        if len(run.members) == nnodes:
            self._kernel.spawn(self._train(run))

    def raise_event(self, generation: int) -> None:
        """An agent asked its workers to reach a checkpoint; one rank is enough."""
        if self.heeds_events:
            self.runs[generation].event_pending = True

    def workers_ended(self, agent: AgentProcess, generation: int) -> None:
        """The workers of one pod are gone before the run was over: the others find their connections broken."""
        run = self.runs.get(generation)
        if run is None or run.phase is Phase.OVER:
            return
        run.phase = Phase.OVER
        for member in run.members.values():
            if member is not agent:
                self._kernel.after(self._rng.uniform(0.05, 1.0), partial(member.peer_lost, generation))

    def touched(self, agent: AgentProcess, fault: str) -> None:
        """Remember that a fault was inflicted on a run's member."""
        for run in self.runs.values():
            if agent in run.members.values() or run.phase is Phase.GATHERING:
                run.spoiled.add(fault)

    def resume_point(self) -> Checkpoint:
        """Give the checkpoint that a new generation loads."""
        return max(self.checkpoints, default=Checkpoint(0, 0))

    def _train(self, run: Run) -> Script:
        yield self._rng.uniform(0.5, 2.0)
        while not self._all_there(run):
            if run.phase is Phase.OVER or (yield from self._stalled(run)):
                return
        run.phase = Phase.LOADING
        self.newest_claim = max(self.newest_claim, run.generation)
        stored = self.resume_point()
        run.resumed = max([stored, *_whole_in_memory(m.held for m in run.members.values() if m.held is not None)])
        run.is_from_memory = run.resumed > stored
        run.step = run.resumed.step
        self.checker.resumed(run, self.runs)
        yield self._rng.uniform(0.5, 3.0)
        if run.phase is Phase.LOADING:
            run.phase, run.is_filled = Phase.STEPPING, True
        while run.phase is Phase.STEPPING:
            yield STEP_S
            if run.phase is not Phase.STEPPING:
                return
            if self._kernel.now < run.paused_until and self._all_there(run) and not run.event_pending:
                continue
            if not self._all_there(run):
                if (yield from self._stalled(run)):
                    return
                continue
            self.checker.step(run, self.runs)
            run.step += 1
            self.num_steps += 1
            if self.total is not None and run.step >= self.total:
                yield from self._save(run, drained=False)
            elif run.event_pending:
                yield from self._save(run, drained=True)
            elif run.step % CHECKPOINT_EVERY == 0:
                self._commit(run)

    def _save(self, run: Run, *, drained: bool) -> Script:
        run.phase = Phase.SAVING
        if drained and any(member.make is Make.SHARDING for member in run.members.values()):
            yield from self._await_own_stops(run)
        told = {rank: member.leaves for rank, member in run.members.items() if member.drains_in_memory}
        yield self._rng.uniform(0.2, 3.0) if self._rng.random() < 0.8 else self._rng.uniform(10.0, 30.0)
        while run.phase is Phase.SAVING and not self._all_there(run):
            if (yield from self._stalled(run)):
                return
        if run.phase is not Phase.SAVING:
            return
        is_in_memory = drained and all(member.drains_in_memory for member in run.members.values())
        if not (is_in_memory and self._hand_over(run, told)):
            self._commit(run)
        run.phase = Phase.OVER
        for member in run.members.values():
            self._kernel.after(
                self._rng.uniform(0.0, 0.5), partial(member.workers_exited, run.generation, acknowledged=drained)
            )

    def _await_own_stops(self, run: Run) -> Script:
        """The event of one pod stops all ranks; each waits a while for its own /stop, which says whether it stays."""
        waited = 0.0
        while waited < OWN_STOP_S and not all(member.drains_in_memory for member in run.members.values()):
            yield 0.5
            waited += 0.5

    def _hand_over(self, run: Run, fates: Mapping[int, bool | None]) -> bool:
        """Ranks that leave give their parts to those who stay. False if that is not known of all: then a checkpoint is needed."""
        if not any(member.make is Make.SHARDING for member in run.members.values()):
            return True
        self.checker.told_who_leaves(run, fates)
        if len(fates) < run.nnodes:
            return False
        staying = [run.members[rank] for rank, leaves in sorted(fates.items()) if leaves is False]
        for rank, leaves in fates.items():
            if leaves and staying:
                staying[rank % len(staying)].taken.add(rank)
                run.members[rank].has_given = True
        self.checker.met["in memory: shards are handed over"] += bool(staying) and any(fates.values())
        return bool(staying)

    def _stalled(self, run: Run) -> Script:
        """Some member is silent: the others wait in their collective until it is back, or time out."""
        waited = 0.0
        phase = run.phase
        while waited < self.collective_timeout_s or run.nnodes == 1:
            if _is_parted(run):  # pods that were made after the fault are hit by it too
                run.spoiled.add("its nodes cannot reach each other")
            yield 1.0
            waited += 1.0
            if run.phase is not phase:
                return run.phase is Phase.OVER
            if self._all_there(run):
                return False
        run.phase = Phase.OVER
        for member in run.members.values():
            self._kernel.after(self._rng.uniform(0.0, 1.0), partial(member.peer_lost, run.generation))
        return True

    def _all_there(self, run: Run) -> bool:
        return all(member.works(run.generation) for member in run.members.values()) and not _is_parted(run)

    def _commit(self, run: Run) -> None:
        if run.generation >= self.newest_claim:
            self.checkpoints.add(Checkpoint(run.step, run.generation))


def _whole_in_memory(held: Iterable[Image]) -> list[Checkpoint]:
    """Give the steps of which the members hold every part."""
    parts: dict[tuple[Checkpoint, int], set[int]] = {}
    for one in held:
        parts.setdefault((one.state, one.num_parts), set()).update(one.parts)
    return [state for (state, num_parts), there in parts.items() if len(there) == num_parts]


def _is_parted(run: Run) -> bool:
    """Whether two of its members cannot reach each other though both run."""
    members = run.members.values()
    return any(one.pod.is_apart_from(other.pod) for one in members for other in members)
