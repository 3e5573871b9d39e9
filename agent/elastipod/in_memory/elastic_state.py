"""A training state that outlives its world: `State` resizes and recovers in memory (docs/design/in-memory.md)."""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

from torch import nn

from elastipod import chaos
from elastipod.audit.sample_log import SampleLog
from elastipod.checkpoint.rng import seed_new_rank
from elastipod.data import Batch, ElasticBatches
from elastipod.data.batch_split import as_cut
from elastipod.data.sources import as_int
from elastipod.elastic_event import elastic_event_detected
from elastipod.errors import CheckpointError, StateDiffersError
from elastipod.in_memory.agent_link import Fate, WorldPlace, own_fate
from elastipod.in_memory.apply_step import apply_gradients, unscale_gradients
from elastipod.in_memory.between_steps import BetweenSteps
from elastipod.in_memory.built_members import build_bare, check_built, warn_untrained
from elastipod.in_memory.chaos_hooks import ChaosHooks
from elastipod.in_memory.durable_tier import DurableTier
from elastipod.in_memory.elastic_step import ElasticStep
from elastipod.in_memory.exchange import all_texts
from elastipod.in_memory.members import NOT_BUILT, Members
from elastipod.in_memory.memory_state import MemoryState, WorldLost, lost_world
from elastipod.in_memory.mesh_plan import MeshPlan
from elastipod.in_memory.notary import Notary, Trained
from elastipod.in_memory.optimizer_watch import OptimizerWatch
from elastipod.in_memory.parts import UnknownSharding
from elastipod.in_memory.pass_watch import PassWatch
from elastipod.in_memory.phase_limit import PhaseLimit
from elastipod.in_memory.process_groups import ProcessGroups, WorldNotBuilt
from elastipod.in_memory.shard_copies import Copies
from elastipod.in_memory.sharded_memory import ShardedMemory
from elastipod.in_memory.state_arguments import (
    check_apply,
    check_build,
    check_copies,
    check_groups,
    check_plan,
    check_storage,
    check_wrap,
)
from elastipod.in_memory.step_buffers import StepBuffers
from elastipod.in_memory.world_life import WorldLife, Wrap
from elastipod.process_restarts import need_not_tell
from elastipod.progress import report
from elastipod.rank_in_world import RankInWorld

log = logging.getLogger(__name__)

NOT_WRAPPED = "State has no wrap=, so nothing may have reduced the gradients; pass wrap=DistributedDataParallel"


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where a generation resumed, for its sample log."""

    step: int
    generation: int


class State:
    """Model, optimizers and whatever else a training consists of, kept in memory over resizes and recoveries.

    ``for step in state.steps(plan): with step as batch: ...`` trains. The block computes gradients; leaving it applies them. When
    the world changes, this process stays, rebuilds its process groups, gets what it lacks from its peers, and goes on at the
    newest step that all of the state is there for: the same one after a planned change, at most one step back after a crash.

    Members are attributes: ``state.optimizer``; ``state.model`` is the model as wrapped for the present generation, so do not
    keep it in a variable outside of the loop.
    """

    def __init__(
        self,
        build: Callable[..., object],
        *,
        wrap: Wrap | None = None,
        mesh: Mapping[str, int] | None = None,
        copies: Copies | None = None,
        apply: Callable[[State], object] | None = None,
        checkpoints: str | os.PathLike[str] | None = None,
        checkpoint_every: int = 0,
        keep: int = 2,
        sample_log: str | os.PathLike[str] | None = None,
        seed: int = 0,
        checks_changes: bool = True,
        backend: str | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        """Build the members, unless they are sharded; nothing is sent or read yet.

        build: gives (model, optimizer), (model, optimizer, scheduler), or a dictionary of everything that has state_dict and
        load_state_dict, the model under "model". Called once in each process; no process group exists then. wrap: for example
        DistributedDataParallel; called in every generation, with the bare model. mesh: for a sharded state, as {"shard": -1} or
        {"replicate": -1, "shard": 4}; ``build`` then takes the DeviceMesh of the generation, is called in each one, and gives
        members that fully_shard has divided over it. copies: of shards in another failure domain (`elastipod.Copies`). apply:
        changes the members once gradients are there; by default optimizers, schedules and averaged models, with the GradScaler if
        there is one. checkpoints: folder or address for `CheckpointManager`, for a new start and when memory holds no whole state;
        saved every ``checkpoint_every`` steps and at the end, ``keep`` are kept. sample_log: folder for `SampleLog`. seed: of the
        random numbers, which follow from it, the step and the rank alone. checks_changes: compare gradients, data and replicas in
        the first step of each generation (`elastipod.in_memory.notary`). backend, timeout: as for init_process_group; gloo is added to a
        backend that carries an accelerator's tensors alone.
        Raises TypeError when ``build`` gives something else, and TypeError or ValueError that names an argument which cannot be used.
        """
        need_not_tell()
        has_mesh = mesh is not None
        check_build(build, takes_mesh=has_mesh)
        check_wrap(wrap, has_mesh=has_mesh)
        shards = None if mesh is None else MeshPlan.of(mesh)
        check_copies(copies, has_mesh=has_mesh)
        check_apply(apply)
        check_storage(checkpoints, checkpoint_every, keep, sample_log)
        check_groups(backend, timeout)
        seed = as_int("seed", seed)
        chaos.planned_faults()  # a mistake in them is told now
        self._members = Members() if has_mesh else Members(build_bare(build))
        self._apply = apply
        often = checkpoint_every > 0
        durable = DurableTier(checkpoints, self._members, keep, saves_often=often) if checkpoints is not None else None
        self._limit = PhaseLimit()
        self._memory = (
            MemoryState(self._members, self._limit, can_be_followed=apply is None)
            if shards is None
            else ShardedMemory(self._members, self._limit, build, shards, copies)
        )
        groups = ProcessGroups(backend, timeout)
        self._world = WorldLife(self._memory, self._limit, groups, wrap, durable)
        self._durable, self._checkpoint_every = durable, checkpoint_every
        self._sample_log, self._log_of_generation, self._log_before = sample_log, None, None
        self._seed = seed
        self._checks_changes, self._notary = checks_changes, None
        self._is_first_step = self._is_second_step = False  # of this world
        self._optimizers = OptimizerWatch(self._members, self._is_in_block, steps_schedules=apply is None)
        self._buffers = StepBuffers(self._members)
        self._chaos = ChaosHooks(self._members)
        self._passes = PassWatch(self._members, self._cannot_count)
        self._trained = Trained(0)
        self._started = 0.0
        self._step = None
        self._has_finished = self._is_closed = False
        self._pid = 0  # of the process whose loop has begun
        self._members.when_built(partial(self._check_built, has_mesh=has_mesh))

    _log_of_generation: SampleLog | None
    _log_before: SampleLog | None  # of the generation before, whose lines the next save makes durable
    _notary: Notary | None
    _step: ElasticStep | None  # that the loop is at

    # -- what a script uses --------------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        """The model as it is wrapped for the present generation."""
        return self._world.model

    @property
    def rank(self) -> int:
        """This process's rank in the present generation. Raises RuntimeError before the loop, under a launcher."""
        return self._place("rank", "RANK").rank

    @property
    def world_size(self) -> int:
        """The number of ranks of the present generation. Raises as `rank`."""
        return self._place("world_size", "WORLD_SIZE").world_size

    @property
    def generation(self) -> int:
        """The number of the present generation. Raises as `rank`."""
        return self._place("generation", "ELASTIPOD_GENERATION").generation

    @property
    def completed(self) -> int:
        """The steps that the state has completed."""
        return self._memory.rank.completed or 0

    def __getattr__(self, name: str) -> Any:
        members = self.__dict__.get("_members")
        if members is not None and name in members:
            return members[name]
        if members is not None and not members:
            raise AttributeError(NOT_BUILT)
        raise AttributeError(f"the state has no member {name!r}; build() gave none of that name")

    def __setattr__(self, name: str, value: object) -> None:
        if not name.startswith("_") and name in self._members:
            raise AttributeError(f"state.{name} cannot be set: build() returns the entries")
        super().__setattr__(name, value)

    def steps(self, plan: ElasticBatches, *, grain: int = 1, local_sizes: Sequence[int] = ()) -> Iterator[ElasticStep]:
        """Give the steps of a plan from where the job stands, through every change of the world, until its end.

        Ends early, after a checkpoint, when the job must stop and this process cannot be kept. grain, local_sizes: as for
        `ElasticBatches.iterate`. Raises StateDiffersError when this rank's state differs from its replicas', and TypeError when
        this State has given steps already, or for an argument of another type.
        """
        world, is_new = self._world, True
        check_plan(plan)
        grain, sizes = as_cut(grain, local_sizes)
        if self._pid:
            raise TypeError("steps() is called a second time. Call steps() once; set epochs= in ElasticBatches")
        self._pid = os.getpid()
        # A loop that an exception has ended may be held by its traceback until the interpreter is gone, and with it all threads.
        atexit.register(self._close)
        # Before the first world is joined: that may fail too, and what this rank was filled with may be the last copy then.
        self._announce()
        try:
            while True:
                try:
                    world.join(plan, self._open_log, [grain, sizes])
                    self._buffers.positions.enter(self._world.place.rank, self._world.place.world_size)
                    self._is_first_step, self._is_second_step = True, False
                    if is_new and self._world.place.rank == 0:
                        self._warn()
                    is_new = False
                    assert world.plan is not None
                    place = RankInWorld(self._world.place.rank, self._world.place.world_size, sizes)
                    self._has_finished = yield from self._train(world.plan, place, grain)
                    if self._has_finished:
                        return
                except (WorldLost, WorldNotBuilt) as error:
                    self._leave(error)
                    if not world.outlives_generation:
                        raise
        except GeneratorExit:  # the script has left the loop before its end
            if self._durable is not None:
                self._durable.overdue()
            raise
        finally:
            self._close()

    def between_steps(self) -> BetweenSteps:
        """Give a block for collectives of the script between two steps, such as a validation: ``with state.between_steps() as block:``.

        It stands in the loop's body, before or after the step's block, on all ranks alike. When a peer is lost in it, it ends without an
        error, ``block.is_done`` is False, the completed step counts all the same, and the loop goes on with the next world. Raises
        TypeError elsewhere.
        """
        if self._step is None or self._step.is_open:
            raise TypeError(
                "between_steps() belongs in the body of the loop over steps(), before or after the step's block"
            )
        return BetweenSteps(self._step, self._world, self._buffers)

    # -- one step, for ElasticStep -------------------------------------------------------------------------------

    def begin_step(self, batch: Batch) -> None:
        """Begin a step: no gradients are left of another one, and its random numbers follow from its number."""
        self._started = time.monotonic()
        self._members.zero_grad(walks_modules=self._is_first_step)
        self._buffers.begin()
        seed_new_rank(self._random_step(batch), self._world.place.rank)
        if self._is_first_step and self._checks_changes:
            self._notary = Notary(self._members.model, self.model, seed=batch.step)
        # Each pass over sharded weights has collectives, which end it.
        if self._is_first_step and self._memory.kind == "replicated" and self._world.outlives_generation:
            self._passes.begin()
        # Logged before any gradient is given away: a step that counts has the samples of all ranks, even if a rank dies in it. The audit
        # leaves out what a generation has logged beyond the step that the next one resumed at.
        if self._log_of_generation is not None:
            self._log_of_generation.step(batch)
        self._optimizers.begin(self._world.place.rank, batch.step)
        self._chaos.begin(self._world.place.rank, batch.step)

    def commit_step(self, step: ElasticStep) -> None:
        """The gradients of a step are there and good: apply them."""
        batch = step.batch
        self._chaos.end()
        self._optimizers.note_left_out()
        self._world.await_gradients()
        chaos.reached(chaos.Moment.BEFORE_APPLY, rank=self._world.place.rank, step=batch.step)
        self._check_gradients(batch)
        by_script = self._optimizers.has_run
        if self._apply is None and not by_script:
            self._optimizers.check_schedules()
            if unscale_gradients(self._members) and self._memory.kind == "sharded":
                self._world.await_gradients()  # an accelerator has only queued the collective of that
        self._memory.prepare(self._run_apply)
        if not by_script:
            self._run_apply()
        try:
            self._memory.commit()
        except UnknownSharding:
            self._save_last()
            raise
        step.is_done = True
        self._trained = Trained(batch.step, batch.samples_seen)
        self._buffers.committed()
        self._optimizers.committed(by_script=by_script, is_kept=self._world.outlives_generation)
        self._memory.copy()
        if self._is_first_step:
            if self._checks_changes:
                self._compare_replicas(batch)
            self._is_first_step, self._is_second_step = False, True
        elif self._is_second_step:
            self._is_second_step = False
            if self._checks_changes:  # not in the first step, whose end is awaited as the end of the change
                self._buffers.positions.compare_others(self._world.place.rank)
        if self._log_of_generation is not None:
            self._log_of_generation.done(batch.step, step.loss)
        samples_per_s = batch.global_size / max(1e-9, time.monotonic() - self._started)
        assert self._world.plan is not None
        report(batch.step, batch.samples_seen, step.loss, samples_per_s, self._world.plan.total_steps)

    def _run_apply(self) -> None:
        self._buffers.redo()  # where the world has ended, but the step is completed
        with self._optimizers.applying():
            (self._apply or _apply_to_members)(self)

    def is_world_lost(self, error: BaseException) -> bool:
        """Whether an exception is that of a collective whose peer is gone, from which this process can recover."""
        return self._world.is_lost_to(error)

    def _cannot_count(self) -> bool:
        """Whether the step whose block is being run cannot count any more: its gradients will never be reduced."""
        # After the script's own run of the optimizer the state before the step is gone: the block's end may still save the one after it.
        return self._is_in_block() and self._world.is_aborted and not self._optimizers.has_run

    def _is_in_block(self) -> bool:
        return self._step is not None and self._step.is_open

    def _check_gradients(self, batch: Batch) -> None:
        """In the first step of a world, raise StateDiffersError on every rank when something is wrong. Nothing is applied then."""
        notary, self._notary = self._notary, None
        if notary is None:
            return
        notary.close()
        assert self._world.plan is not None
        trained = self._trained if self._trained.step == self.completed else Trained(self.completed)
        problems = notary.problems(batch, self._world.plan, self._random_step(batch), trained)
        if not problems:
            return
        if not self._optimizers.has_run:
            self._buffers.restore()
            # Of the last complete step, which new processes resume from: after the samples that were trained, whatever the plan says.
            self._save(self.completed, waits=True, samples=notary.samples)
        raise StateDiffersError(
            f"step {batch.step}, the first of generation {self._world.place.generation}, does not count: {'; '.join(problems)}"
        )

    def _compare_replicas(self, batch: Batch) -> None:
        try:
            self._memory.compare(self._world.donor, f"after step {batch.step}, the first of this world,")
        except StateDiffersError as error:
            if self._world.has_wrap or self._memory.kind == "sharded":
                raise
            raise StateDiffersError(f"{error}; {NOT_WRAPPED}") from None

    def _random_step(self, batch: Batch) -> int:
        return batch.step + (self._seed << 40)

    # -- generations ---------------------------------------------------------------------------------------------

    def _train(self, plan: ElasticBatches, place: RankInWorld, grain: int) -> Generator[ElasticStep, None, bool]:
        """Train in one world; give True when the loop is to end. Raises WorldLost."""
        with lost_world("the plans could not be compared"):
            batches = plan.iterate_at(place, grain=grain, is_compared=self._world.has_same_plans)
        for batch in batches:
            self._step = step = ElasticStep(self, batch)
            yield step
            if step.lost_to is not None:
                raise WorldLost(str(step.lost_to)) from step.lost_to
            if not step.is_done:
                raise TypeError("the loop's body must be one block: `with step as batch:`")
            if self._world.link is not None and self._world.link.is_over:
                raise WorldLost("the agent has ended the generation")
            if self._must_stop():
                return self._stop_as_planned(batch.step)
            if self._checkpoint_every and batch.step % self._checkpoint_every == 0:
                self._save(batch.step, waits=False)
        with lost_world("the ranks could not finish together"):
            all_texts("finished")
        self._save(self.completed, waits=True)
        self._end_log("completed")
        return True

    def _warn(self) -> None:
        """Say once, on rank 0, what may be a mistake."""
        warn_untrained(self._members)
        if faults := chaos.planned_faults():
            log.warning("faults are planned: %s", "; ".join(map(str, faults)))

    def _check_built(self, *, has_mesh: bool) -> None:
        check_built(self._members, has_mesh=has_mesh, applies=self._apply is not None, taken={*dir(State), *vars(self)})

    def _place(self, name: str, variable: str) -> WorldPlace:
        """Give the place in the world, for one of the attributes; variable: that says it before the loop, to those who must know."""
        if not self._pid and self._world.is_launched:
            raise RuntimeError(
                f"state.{name} is known inside the loop over state.steps(); before it use the variable {variable}"
            )
        return self._world.place

    def _must_stop(self) -> bool:
        with self._world.collective_of_library():
            return elastic_event_detected()

    def _stop_as_planned(self, step: int) -> bool:
        """All ranks have stopped after the same step. Give True when this process has to end."""
        link = self._world.link
        is_kept = self._world.outlives_generation and link is not None
        fate = own_fate(lambda: link is None or link.is_over) if is_kept else Fate.UNKNOWN
        with lost_world("the ranks could not stop together"):
            fates = [Fate(text) for text in all_texts(fate)]
        if not self._memory.hand_over(fates):  # nobody is known to keep the state in memory
            self._save(step, waits=True)
        if not self._world.outlives_generation:
            self._end_log("drained")
            return True
        self._leave(None)
        return False

    def _announce(self) -> None:
        link, reason = self._world.link, self._world.reason_to_end
        if link is None or link.is_kept:
            return
        if reason:
            log.warning(
                "every resize and recovery restarts this script: %s; with gloo alone, processes are kept", reason
            )
        else:
            link.announce(self._memory.kind)

    def _leave(self, error: BaseException | None) -> None:
        self._chaos.end()
        if self._notary is not None:
            self._notary.close()
            self._notary = None
        self._passes.close()
        if error is not None:
            self._world.end_collectives()
        self._buffers.restore()
        self._world.leave(error, is_torn=self._optimizers.is_torn)
        self._buffers.forget()
        if self._log_of_generation is not None:  # a save that the world waited for has just written its last line
            self._log_of_generation.close()
            self._log_before, self._log_of_generation = self._log_of_generation, None
        self._optimizers.left()

    def _open_log(self) -> None:
        if self._sample_log is None:
            return
        assert self._world.plan is not None
        generation = self._world.place.generation
        if self._world.link is None and self._durable is not None:
            # Without an agent every run has the same one; those of the checkpoints tell the runs apart.
            generation = self._durable.generation()
        self._log_of_generation = SampleLog(
            self._sample_log,
            self._world.plan,
            generation=generation,
            rank=self._world.place.rank,
            world_size=self._world.place.world_size,
            resume=_Origin(self.completed, self._memory.origin),
            after=self._log_before,
        )
        self._memory.origin = generation
        if self._world.is_loaded and self._durable is not None:
            self._log_of_generation.loaded(self.completed, self._durable.optimizer_norm())

    def _end_log(self, why: Any) -> None:
        if self._log_of_generation is not None:
            self._log_of_generation.end(self.completed, why)

    def _save(self, step: int, *, waits: bool, samples: int | None = None) -> None:
        if self._durable is None:
            return
        assert self._world.plan is not None
        data = self._world.plan.state_dict(step)
        extra = {"data": data if samples is None else {**data, "samples": samples}}
        with self._world.collective_of_library():
            self._durable.save(step, extra, self._log_of_generation, waits=waits)

    def _save_last(self) -> None:
        """Save before an error that new processes meet, too: a corrected script goes on from there."""
        try:
            self._save(self.completed, waits=True)
        except CheckpointError as error:
            log.error("step %d could not be saved: %s", self.completed, error)

    def _close(self) -> None:
        """End without waiting for anybody. Does nothing a second time, and in processes that a script has forked."""
        if self._is_closed or self._pid != os.getpid():
            return
        self._is_closed = True
        atexit.unregister(self._close)
        self._step = None
        self._chaos.end()
        self._passes.close()
        self._optimizers.close()
        if self._log_of_generation is not None:
            self._log_of_generation.close()
            self._log_of_generation = None
        self._world.close(self._has_finished)
        self._limit.close()


def _apply_to_members(state: State) -> None:
    apply_gradients(state._members)


def steps(state: State, plan: ElasticBatches, **options: Any) -> Iterator[ElasticStep]:
    """Give the steps of a plan, as `State.steps`."""
    return state.steps(plan, **options)
