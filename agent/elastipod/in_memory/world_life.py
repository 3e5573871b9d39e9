"""The worlds of one rank, one after the other: how it joins a generation, and how it leaves one."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from elastipod import chaos
from elastipod.data import ElasticBatches
from elastipod.elastic_event import abandon_elastic_event
from elastipod.errors import CheckpointError, ElasticAgreementError
from elastipod.fsdp1 import refuse_fsdp1
from elastipod.in_memory.agent_link import AgentLink, WorldPlace
from elastipod.in_memory.collective_failure import ASK_AGENT_S, forget_frames, is_collective_failure
from elastipod.in_memory.durable_tier import DurableTier
from elastipod.in_memory.exchange import text_of
from elastipod.in_memory.memory_state import MemoryState, WorldLost, lost_world
from elastipod.in_memory.offer_wire import RankOffer
from elastipod.in_memory.offered_data import offered_data, position_text
from elastipod.in_memory.phase_limit import PhaseLimit
from elastipod.in_memory.process_groups import ProcessGroups, is_group_of_state
from elastipod.torch_compat import accelerators_of, await_devices, detach_reducer, wrapped_as_it_is

log = logging.getLogger(__name__)

SINGLE = WorldPlace(1, 0, 1, "", 0)  # without a launcher
TELL_AFTER_S = (
    10.0  # at the barrier after a failed collective: when nobody has called this rank back, it tells its agent
)
Wrap = Callable[[nn.Module], nn.Module]


class WorldLife:
    """This rank's place in the world. plan: as the job's position has it."""

    def __init__(
        self,
        memory: MemoryState,
        limit: PhaseLimit,
        groups: ProcessGroups,
        wrap: Wrap | None,
        durable: DurableTier | None,
    ) -> None:
        self.memory = memory
        self.link = AgentLink.connect()
        self.place = SINGLE
        self._wrapped: nn.Module | None = None
        self.plan: ElasticBatches | None = None
        self._known: ElasticBatches | None = None  # the position after all steps that this rank may give to others
        self.donor = 0  # the rank whose state the others are compared with
        self.is_loaded = False  # whether the present generation began from a checkpoint
        self.has_same_plans = False  # whether all ranks of the present generation said that they have the same plan
        self.durable = durable
        self._limit = limit
        self._groups = groups
        self._wrap = wrap
        self._lost_to: BaseException | None = None
        self._aborted = threading.Event()  # of the present generation; the watcher of a former one has another
        self._has_groups = False
        self._accelerators: set[torch.device] = set()

    @property
    def model(self) -> nn.Module:
        """The model as it is wrapped for the present generation; the bare one where nothing wraps it."""
        # A wrapper may have a length, which a compiled module refuses to give.
        return self.memory.members.model if self._wrapped is None else self._wrapped

    @property
    def has_wrap(self) -> bool:
        """Whether the script wraps the model in each generation."""
        return self._wrap is not None

    @property
    def is_launched(self) -> bool:
        """Whether a launcher says this process's place, which may differ from one generation to the next."""
        return self.link is not None or WorldPlace.from_env() is not None

    @property
    def outlives_generation(self) -> bool:
        """Whether this process may wait for another generation when this one ends."""
        return self.link is not None and self.link.is_kept

    @property
    def is_aborted(self) -> bool:
        """Whether the agent has ended the present generation, and what this rank computes with its peers has been aborted."""
        return self._aborted.is_set()

    @property
    def reason_to_end(self) -> str:
        """As `ProcessGroups.reason_to_end`."""
        return self._groups.reason_to_end

    def join(self, plan: ElasticBatches, before_verifying: Callable[[], None], cut: Sequence[object] = ()) -> None:
        """Be in a world that is ready to train: this rank holds the agreed step, as all others do.

        before_verifying: is called when the step is known; when any rank has verified, it has returned on all. cut: how the script
        divides the batches of its plan, as JSON values. Raises WorldLost or WorldNotBuilt when a peer is lost meanwhile, and
        StateDiffersError on a rank whose state is not that of the others.
        """
        memory = self.memory
        self.place = place = self._next_place()
        memory.move(memory.rank.assigned(place.generation))
        self._aborted = aborted = threading.Event()
        if self.link is not None:
            self.link.watch(place.generation, partial(self._free, aborted))
        self._pass(chaos.Moment.CONNECTING)
        self._connect()
        memory.move(memory.rank.connected())
        self._pass(chaos.Moment.AGREEING)
        offers = memory.exchange_offers(offered_data(plan, cut, self._known or self.plan, memory.rank))
        self.has_same_plans = len({each.data.plan for each in offers}) == 1
        resume = memory.begin_filling(offers, place.rank)
        self.is_loaded = False
        if resume is None:
            offers = self._start_anew(offers, plan)
            resume = memory.begin_filling(offers, place.rank)
        assert resume is not None, "a new start has a donor"
        self._build(len(offers))
        self._pass(chaos.Moment.FILLING)
        memory.fill(resume, offers, self._limit.progress)
        self.donor = donor = memory.donor_of(resume)
        if not self.is_loaded:  # a checkpoint has the position, and all ranks have it from there
            self._agree_on_position(plan, resume.step, donor, offers)
        self._wrap_model()
        self._accelerators = accelerators_of(memory.members.model) if self._has_groups else set()
        memory.finish_filling()
        self._pass(chaos.Moment.VERIFYING)
        before_verifying()
        if self._has_groups:
            # What a former collective of the script may still write is there before the replicas are compared.
            self._groups.await_former()  # within the limit of this phase
        memory.verify(donor)
        memory.move(memory.rank.verified())
        if self._has_groups:
            self._groups.begin_training()
            if self.outlives_generation:
                memory.following.listen(self.place, self._groups.publish)

    def await_gradients(self) -> None:
        """Return once the gradients of a step are there and good. Raises WorldLost when the generation ended before.

        On an accelerator a collective returns before it has run, and one that is aborted leaves anything in its gradients. An abort
        comes after the agent's word, so nothing was aborted without it.
        """
        if not self._accelerators:
            return
        await_devices(self._accelerators)
        if self.link is not None and self.link.is_over:
            raise WorldLost("the agent has ended the generation while gradients were reduced")

    def _free(self, aborted: threading.Event) -> None:
        """Free the training thread, which may wait for a peer that is gone: in a collective, or for the stop step of a resize."""
        self._groups.abort()
        abandon_elastic_event()
        aborted.set()

    def end_collectives(self) -> None:
        """A peer is lost: let nothing on an accelerator wait for it any more, since a look at a tensor would wait as well."""
        if self._has_groups:
            self._groups.abort_queued()

    def leave(self, error: BaseException | None, *, is_torn: bool = False) -> None:
        """Take all groups down. error: what ended the world, None for a planned end. is_torn: the optimizer has run half-way."""
        memory = self.memory
        if error is not None:
            said = (str(error).splitlines() or [type(error).__name__])[0]
            log.warning("rank %d leaves generation %d: %s", self.place.rank, self.place.generation, said)
        # Before the phase of which the limit begins here: that is for groups, not for storage.
        reason = self.durable.overdue() if self.durable is not None and error is None else error
        memory.move(memory.rank.failed_inside_optimizer() if is_torn else memory.rank.stopped())
        if self.durable is not None:
            self.durable.close(reason)
        self._unwrap()
        forget_frames(error)
        memory.release()
        memory.members.zero_grad(walks_modules=False)
        if self._has_groups:
            self._groups.leave()
        memory.move(memory.rank.detached())
        self._lost_to = error

    def close(self, has_finished: bool) -> None:
        """End for good. Unless the training has finished, nothing is waited for: the agent must learn of the end at once."""
        if self.durable is not None:
            self.durable.close(None if has_finished else WorldLost("the process ends"))
        self._unwrap()
        if self._has_groups:
            self._groups.close(has_finished=has_finished)
        if self.link is not None:
            self.link.close()

    def is_lost_to(self, error: BaseException) -> bool:
        """Whether an exception means that a peer is gone, and this process can wait for another generation."""
        if self.link is None or not self.link.is_kept:
            return False
        return isinstance(error, WorldLost) or is_collective_failure(error, self.link.wait_until_over)

    @contextmanager
    def collective_of_library(self) -> Iterator[None]:
        """Raise WorldLost in place of a failure of checkpoints or of the agreement, where a lost peer is the reason for it."""
        try:
            yield
        except (CheckpointError, ElasticAgreementError, RuntimeError) as error:
            if self.outlives_generation and self.link is not None and self.link.wait_until_over(ASK_AGENT_S):
                raise WorldLost(str(error)) from error
            raise

    def _next_place(self) -> WorldPlace:
        if self.link is None:
            return WorldPlace.from_env() or SINGLE
        error, self._lost_to = self._lost_to, None
        self.memory.rest()
        if error is None:
            self.memory.following.begin()
            try:
                return self.link.park()
            finally:
                self.memory.finish_following()
        tell = threading.Timer(TELL_AFTER_S, self.link.report_fault, (self.place.rank, str(error), self.link.run))
        tell.daemon = True
        tell.start()
        try:
            return self.link.park(after_fault=True)
        finally:
            tell.cancel()

    def _connect(self) -> None:
        if self.place is SINGLE and self.memory.kind == "replicated":
            return
        if dist.is_initialized():
            raise TypeError(
                "another State of this process is in its loop; use one State at a time"
                if is_group_of_state()
                else "a process group exists already: elastipod.State builds one for every generation; leave init_process_group out"
            )
        self._has_groups = True
        if self.place is SINGLE:
            self._groups.connect_alone()
            return
        link = self.link
        self._groups.connect(self.place, lambda: link is not None and link.is_over, arriving=self._limit.paused())

    def _start_anew(self, former: Sequence[RankOffer], plan: ElasticBatches) -> list[RankOffer]:
        """Load the newest checkpoint, or take the state that rank 0 has built; give the offers that this makes."""
        world_size = len(former)
        self._build(world_size)
        resume = None
        if self.durable is not None:
            # Storage may take longer than a regroup may, and a large state in memory longer than the script lets a collective take.
            if self._has_groups:
                self._groups.allow_for_load(self.memory.members.num_bytes)
            with self.collective_of_library(), self._limit.paused():
                resume = self.durable.load(fills_others=self.memory.kind == "replicated")
        self.is_loaded = resume is not None
        step = plan.first_step if resume is None else resume.step
        origin = 0 if resume is None else resume.generation
        self.plan = plan if resume is None else plan.resumed(resume.extra["data"])
        self._known = None if resume is None else self.plan
        holders = None if resume is None else resume.holders or range(world_size)
        offers = self.memory.begin_anew(
            step,
            self.place.rank,
            world_size,
            loaded_by=holders,
            has_changed=resume is None or resume.has_changed,
        )
        self._limit.progress()
        return [RankOffer(offer, origin, each.followed) for offer, each in zip(offers, former, strict=True)]

    def _build(self, world_size: int) -> None:
        """Have the members for this world. What the script's own code and a large state take is not the regroup's. Raises WorldLost."""
        memory, is_sharded = self.memory, self.memory.kind == "sharded"
        if self._has_groups and is_sharded:
            self._groups.begin_training()
            # While a further group connects, nothing frees a rank that waits for one that has died since the world was built.
            self._await_all("the ranks could not wait for each other before they build the mesh")
        elif self._has_groups:
            self._groups.allow_for(memory.members.num_bytes)
        memory.build_mesh(world_size)
        with self._may_lose_peers("the members could not be built"):
            memory.build()
        if self._has_groups and is_sharded:
            # From here on all ranks do the same at the same time, so one that hangs can be given up before this phase ends the others.
            self._await_all("the ranks could not wait for each other's members")
            self._groups.allow_for(memory.members.num_bytes)

    def _await_all(self, what: str) -> None:
        """Return once all ranks are here, whatever time the script's own code takes them. Collective. Raises WorldLost."""
        with lost_world(what), self._limit.paused():
            self._groups.await_all()

    def _agree_on_position(self, plan: ElasticBatches, step: int, donor: int, offers: Sequence[RankOffer]) -> None:
        """Take over the position in the data from a rank that has trained up to it."""
        samples = offers[donor].data.samples.get(step) if self.has_same_plans else None
        text = self._position_of(donor, step) if samples is None else position_text(plan, step, samples)
        self.plan = plan.resumed(json.loads(text))
        if self._known is None or not _tells(self._known, step, text):
            self._known = self.plan

    def _position_of(self, donor: int, step: int) -> str:
        """Have the position from the donor, where its offer does not say it for this plan. Collective."""
        own = None
        if self.place.rank == donor:
            known = self._known or self.plan
            assert known is not None, "a donor has a position"
            own = json.dumps(known.state_dict(step))
        with lost_world("the position in the data could not be exchanged"):
            return text_of(donor, own)

    def _unwrap(self) -> None:
        if self._wrapped is not None:
            detach_reducer(self._wrapped)
            self._wrapped = None

    def _wrap_model(self) -> None:
        members = self.memory.members
        if self._wrap is None or not self._has_groups:
            return
        with self._may_lose_peers("the model could not be wrapped"):
            self._wrapped = wrapped_as_it_is(self._wrap, members.model)
        refuse_fsdp1(self.model)

    @contextmanager
    def _may_lose_peers(self, what: str) -> Iterator[None]:
        """Raise WorldLost in place of a failure of the script's own code, where a lost peer is the reason for it."""
        try:
            yield
        except RuntimeError as error:
            if not self.is_lost_to(error):
                raise
            raise WorldLost(f"{what}: {error}") from error

    def _pass(self, moment: chaos.Moment) -> None:
        chaos.reached(moment, rank=self.place.rank, step=1 + (self.memory.rank.completed or 0))


def _tells(plan: ElasticBatches, step: int, position: str) -> bool:
    """Whether a plan gives this position: its world resumed at this step or before, in the same history."""
    try:
        return json.dumps(plan.state_dict(step)) == position
    except ValueError:
        return False
