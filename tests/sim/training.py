"""The model of the training itself: one run of the workers for each generation, and the storage that outlives them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from tests.sim.agent_words import Crash
from tests.sim.events import Make
from tests.sim.invariants import InvariantChecker
from tests.sim.kernel import Kernel, Script
from tests.sim.storage import Storage

from elastipod.checkpoint.manifest import CheckpointId as Checkpoint
from elastipod.errors import CheckpointError, FencedError

if TYPE_CHECKING:
    from tests.sim.agent_process import AgentProcess

STEP_S = 2.0
CHECKPOINT_EVERY = 25
OWN_STOP_S = 5.0
# What a storage that is slow adds to a save or a load.
SLOW_S = (15.0, 60.0)
STORAGE_ERRORS = (OSError, CheckpointError)
NOTHING = Checkpoint(0, 0)
STORAGE_TROUBLES_OF_A_RUN = {
    FAILED_SAVE := "a save that failed",
    SLOW_SAVE := "a slow save",
    SLOW_LOAD := "a slow load",
}


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


@dataclass(frozen=True, slots=True)
class MeetingPlace:
    """Where the workers of a generation were told to meet. store_port: of the agent there, if that serves their store."""

    address: str
    port: int
    store_port: int | None


@dataclass(slots=True)
class Run:
    """One generation: who takes part and how far it came."""

    generation: int
    nnodes: int
    members: dict[int, AgentProcess] = field(default_factory=dict)
    phase: Phase = Phase.GATHERING
    resumed: Checkpoint = NOTHING
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
        self,
        kernel: Kernel,
        rng: Random,
        checker: InvariantChecker,
        storage: Storage,
        *,
        heeds_events: bool,
        timeout_s: float,
    ) -> None:
        self._kernel = kernel
        self._rng = rng
        self.checker = checker
        self.heeds_events = heeds_events
        self.collective_timeout_s = timeout_s
        self.runs: dict[int, Run] = {}
        self.storage = storage
        self.total: int | None = None
        self.is_finished = False
        """Whether the workers of a generation have made all steps, and saved the last one."""
        self.is_hindered = True
        """Whether faults keep operators from seeing or acting in time."""
        self.num_steps = 0
        """All steps that workers made, repeated ones too."""

    def join(self, agent: AgentProcess, generation: int, rank: int, nnodes: int, place: MeetingPlace) -> None:
        """The workers of one pod begin and look for the others."""
        run = self.runs.get(generation)
        if run is None:
            run = self.runs[generation] = Run(generation, nnodes)
        self.checker.joined(run, agent, rank, nnodes, place)
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

    def finish_soon(self, more_steps: int) -> bool:
        """The training is to end after so many more steps; False if that is decided already."""
        if self.total is not None:
            return False
        self.total = max((run.step for run in self.runs.values()), default=0) + more_steps
        return True

    def _train(self, run: Run) -> Script:
        yield self._rng.uniform(0.5, 2.0)
        while not self._all_there(run):
            if run.phase is Phase.OVER or (yield from self._stalled(run)):
                return
        run.phase = Phase.LOADING
        if not self._resume(run):
            return
        self.checker.resumed(run, self.runs)
        yield self._rng.uniform(0.5, 3.0)
        if self.storage.is_slow and not run.is_from_memory:
            yield self._rng.uniform(*SLOW_S)
            if run.event_pending:
                run.spoiled.add(SLOW_LOAD)  # the time of a drain that began meanwhile may be over
        if run.phase is Phase.LOADING:
            run.phase, run.is_filled = Phase.STEPPING, True
        if run.phase is Phase.STEPPING and self.total is not None and run.step >= self.total:
            yield from self._save(run, drained=False)  # the one before had saved its last step, and was stopped
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
            elif run.step % CHECKPOINT_EVERY == 0 and isinstance(self._commit(run), FencedError):
                self._fail(run, "a newer generation has taken over the storage")
                return

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
            if self.storage.is_slow:
                yield from self._save_slowly(run)
            if run.phase is not Phase.SAVING:
                return
            if (error := self._commit(run)) is not None:
                self._fail(run, str(error))
                return
        self.is_finished |= not drained
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

    def _resume(self, run: Run) -> bool:
        """Find what the generation goes on from; False if it fails for want of that."""
        in_memory = max(_whole_in_memory(m.held for m in run.members.values() if m.held is not None), default=None)
        try:
            stored = self.storage.resume(run.generation)
        except STORAGE_ERRORS as error:
            if in_memory is None:
                self._fail(run, f"the storage is not there: {error}")
                return False
            stored = NOTHING
        run.resumed = max(stored, in_memory or stored)
        run.is_from_memory = run.resumed > stored
        run.step = run.resumed.step
        return True

    def _save_slowly(self, run: Run) -> Script:
        """The time of a drain, or of a notice, may be over before."""
        run.spoiled.add(SLOW_SAVE)
        self.checker.met["storage: a slow save"] += 1
        yield self._rng.uniform(*SLOW_S)

    def _commit(self, run: Run) -> Exception | None:
        """Save a checkpoint; gives what went wrong."""
        try:
            self.storage.save(run.step, run.generation)
        except STORAGE_ERRORS as error:
            run.spoiled.add(FAILED_SAVE)
            self.checker.met["storage: a save fails"] += 1
            return error
        return None

    def _fail(self, run: Run, why: str) -> None:
        """All workers fail at what they do together: one says so first. Where nothing else happens to them, that costs a retry."""
        if not (run.spoiled - STORAGE_TROUBLES_OF_A_RUN or self.is_hindered):
            self.checker.must_count(run.generation)
            self.checker.met["storage: it costs a retry"] += 1
        run.spoiled.add(why)
        self.checker.worker_faults += len(run.members)
        self.checker.met["storage: workers fail"] += 1
        first = run.members[0]
        if first.works(run.generation):
            first.crash(Crash(1, None, f"CheckpointError: {why}"))
        else:
            self.workers_ended(first, run.generation)


def _whole_in_memory(held: Iterable[Image]) -> list[Checkpoint]:
    """Give the steps of which the members hold every part."""
    parts: dict[tuple[Checkpoint, int], set[int]] = {}
    for one in held:
        parts.setdefault((one.state, one.num_parts), set()).update(one.parts)
    return [state for (state, num_parts), there in parts.items() if len(there) == num_parts]


def _is_parted(run: Run) -> bool:
    """Whether two of its members cannot reach each other though both run."""
    members = run.members.values()
    parted = [one.pod for one in members if one.pod.node is not None and one.pod.node.apart_until]
    return any(one.is_apart_from(other.pod) for one in parted for other in members)
