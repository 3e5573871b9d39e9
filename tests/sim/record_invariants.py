"""What must hold of the state record: generations, their members, growths, the ledger; and of the pods that follow from it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from tests.sim.events import Make
from tests.sim.fault_invariants import FaultInvariants
from tests.sim.invariant_state import JOB_NAME, WRITING_TIME, Violation, policy_in, short

from elastipod_operator.core.actions import Plan
from elastipod_operator.core.depth_reasons import DepthReason
from elastipod_operator.core.faults import FIRST_ANSWER
from elastipod_operator.core.growth import CAUSE as GROWTH
from elastipod_operator.core.growth import growth_due
from elastipod_operator.core.history import HistoryEntry, decode_history
from elastipod_operator.core.leavers import MAX_RESIZES_UNDONE
from elastipod_operator.core.names import ANNOTATION_HISTORY, ANNOTATION_STATE, PodId
from elastipod_operator.core.next_generation import next_of
from elastipod_operator.core.phase_accounting import PHASES, total, total_by_depth
from elastipod_operator.core.preparation import PREPARATION_LIMIT
from elastipod_operator.core.record import RECORD_LOST, Depth, Record, TransitionKind
from elastipod_operator.core.record_codec import MAX_BYTES
from elastipod_operator.core.replica import Replicas
from elastipod_operator.core.snapshot import ObservedAgent, ObservedJob, Policy
from elastipod_operator.kube.job_annotations import decode_record

if TYPE_CHECKING:
    from tests.sim.training import Training

NO_TIME = timedelta(0)
STEPS_UNSEEN = 5  # that an operator may not have heard of yet
NOBODY = Replicas({}, {}, all_silent=False)
# Times are stored in milliseconds. With a clock that is never set the sums are this exact, whatever happens.
LEDGER_ERROR = timedelta(milliseconds=5)


class RecordInvariants(FaultInvariants):
    """Sees every write of the record and every decision."""

    def record_written(
        self,
        before: Mapping[str, str],
        after: Mapping[str, str],
        spec: Any,
        training: Training,
        now: datetime,
        bound: set[str],
        cordoned: Collection[PodId | None] = (),
    ) -> None:
        """The API server took new annotations. bound: UIDs of the pods that have a node. cordoned: pods on cordoned ones."""
        old, new = own_record(before, self.job_uid), own_record(after, self.job_uid)
        if new is None or new == old:
            return
        self.record = new
        if len(after[ANNOTATION_STATE]) > MAX_BYTES:
            raise Violation(f"the record takes {len(after[ANNOTATION_STATE])} bytes")
        self.balanced(now)
        if old is None:
            if self.are_names_known and new.generation > 1:
                raise Violation(f"the job begins with generation {new.generation}, which is another's")
            if new.outcome == "Failed":
                self._failed(Record(), new, spec, now)
            return
        self._told_early(old, new)
        if new.generation < old.generation:
            raise Violation(f"the generation went back from {old.generation} to {new.generation}")
        if new.generation > old.generation:
            self._grows_where_it_may(old, new, cordoned)
            self._allocated(old, new, spec, decode_history(after.get(ANNOTATION_HISTORY, "[]")))
            self._brings_shards_back(old, new, policy_in(spec), training)
        elif new.members and new.members != old.members:
            raise Violation(f"generation {new.generation} got other members: {old.members} -> {new.members}")
        self._goes_on_after_the_end(old, new, training)
        self._goes_deeper_where_steps_lie_between(old, new, training)
        if new.outcome == "Completed" and not old.outcome:
            self._completed(new, training)
        if new.restarts > old.restarts:
            self._restarted(old, new, training, now)
        policy = policy_in(spec)
        self._stopped_by_edit(old, new, policy)
        self._counted(old, new, policy, now, bound)
        self._grows(old, new, policy, now)
        if new.outcome == "Failed" and old.outcome != "Failed":
            self._failed(old, new, spec, now)

    def _goes_deeper_where_steps_lie_between(self, old: Record, new: Record, training: Training) -> None:
        """Faults take a recovery deeper only if no steps lie between them, those that are computed again included."""
        before, begun = old.transition, new.transition
        is_new = begun is not None and (before is None or before.began_at != begun.began_at)
        if begun is None or not is_new or begun.kind is not TransitionKind.RECOVERY:
            return
        between, self._steps_at_fault = training.num_steps - self._steps_at_fault, training.num_steps
        is_deeper = begun.depth_code == DepthReason.REPEATED_FAILURES
        self.met["faults without a step take a recovery deeper"] += is_deeper
        if is_deeper and between > STEPS_UNSEEN and not training.is_hindered:
            raise Violation(f"a recovery goes deeper ({begun.depth_reason}), {between} steps after the last fault")

    def _told_early(self, old: Record, new: Record) -> None:
        """A generation that agents were told of in a drain has its members for good, whether it is taken over or withdrawn."""
        before, after = next_of(old), next_of(new)
        if after is not None:
            known = self._members.setdefault(after.generation, after.members)
            if known != after.members or after.generation > new.newest_told:
                raise Violation(
                    f"agents are told of generation {after.generation} with {after.members}; known: {known}"
                )
        if before is not None and after != before:
            is_taken_over = (new.generation, new.members) == (before.generation, before.members)
            how = "taken over" if is_taken_over else "withdrawn"
            self.met[f"in memory: the next generation is decided in a drain, and {how}"] += 1

    def balanced(self, now: datetime) -> None:
        """The phases sum to the life of the job, however often the operator died; a clock that is set shifts both by as much."""
        times = self.record.phase_times
        if self.record == Record():
            return  # no operator has seen the job, or its record was removed just now
        assert self.record.accepted_at is not None
        spent = sum(total(times, now).values(), timedelta(0))
        alive = (self.record.ended_at or now) - self.record.accepted_at
        allowed = LEDGER_ERROR if self.has_true_time else alive / 100 + timedelta(seconds=self.clock_error_s)
        if abs(spent - alive) > allowed:
            raise Violation(f"the ledger sums to {spent} in a life of {alive}: {times}")
        if sum(total_by_depth(times, now).values(), timedelta(0)) > spent or not {*dict(times.booked)} <= PHASES:
            raise Violation(
                f"the ledger has more time in changes than in all, or names phases that do not exist: {times}"
            )

    def _allocated(self, old: Record, new: Record, spec: Any, history: tuple[HistoryEntry, ...]) -> None:
        known = self._members.get(new.generation)
        if known is not None and known != new.members:
            raise Violation(f"generation {new.generation} was used before, with other members")
        self._members[new.generation] = new.members
        if new.retries > self.worker_faults:
            raise Violation(f"{new.retries} retries are booked, but workers failed {self.worker_faults} times")
        if any(new.retries <= before for g, before in self._must_count.items() if g < new.generation):
            raise Violation(f"a fault of the workers' own cost no retry: {new.retries} are booked")
        policy = policy_in(spec)
        if known is None and new.generation < max(self._members):
            raise Violation(f"generation {new.generation} comes after generation {max(self._members)}")
        if policy.restarts_before_full is not None and new.window.restarts > policy.restarts_before_full:
            raise Violation(
                f"{new.window.restarts} process-level restarts; more than {policy.restarts_before_full} ask for a full one"
            )
        for shape in policy.specs:
            number = sum(member.spec == shape.name for member in new.members)
            before = sum(member.spec == shape.name for member in old.members) if _interrupted_size(old) else 0
            if number > max(shape.limit, before):
                raise Violation(
                    f"{number} pods of {shape.name} train; its limit is {shape.limit}, the others are spares"
                )
        base = policy.specs[0]
        of_base = sum(member.spec == base.name for member in new.members)
        if of_base < min(policy.sizes.minimum, base.limit):
            raise Violation(
                f"generation {new.generation} trains with {of_base} pods of the base spec, which holds the minimum"
            )
        self._noted(old, new)
        is_first = new.generation == 1 and old.transition is not None and old.transition.kind is TransitionKind.START
        if (
            is_first
            and old.transition is not None
            and len(new.members) > max(old.transition.target_size, policy.sizes.minimum)
        ):
            raise Violation(
                f"the job starts with {len(new.members)} replicas, though it asks for {old.transition.target_size} at first"
            )
        allowed = policy.sizes.allowed
        if len(new.members) not in (*allowed, _decided_size(old), _interrupted_size(old), _begun_size(old)):
            raise Violation(f"generation {new.generation} has {len(new.members)} members; allowed: {allowed}")
        entry = history[-1] if history else None
        if entry is None or (entry.generation, entry.to_size) != (new.generation, len(new.members)):
            raise Violation(f"generation {new.generation} is not in the history: {entry}")
        self._kinds[new.generation], self._causes[new.generation] = entry.kind, entry.cause
        self.met[f"cause: {entry.cause}"] += 1
        self.met["replicaDiscreteValues"] += bool((spec.get("elasticPolicy") or {}).get("replicaDiscreteValues"))
        gone = set(new.members) & set(old.lost)
        if gone:
            raise Violation(f"generation {new.generation} takes back lost pods: {sorted(gone)}")
        self._say(f"generation {new.generation}: {[short(m) for m in new.members]} ({entry.cause})")

    def _brings_shards_back(self, old: Record, new: Record, policy: Policy, training: Training) -> None:
        """After a fault, all who wait with shards begin the next generation, if there is a size for them."""
        run, size = training.runs.get(old.generation), _interrupted_size(old)
        lost = {member.name(JOB_NAME) for member in (*old.lost, *new.lost)}
        begin = {member.name(JOB_NAME) for member in new.members}
        if run is None or not size or old.resizes_undone >= MAX_RESIZES_UNDONE or len(policy.specs) > 1:
            return
        there = [one for one in run.members.values() if one.takes_start() and one.pod.name not in lost]
        holders = [one for one in there if one.make is Make.SHARDING and one.held is not None]
        left_out = sorted(one.pod.name for one in holders if one.pod.name not in begin)
        self.met["in memory: who was to leave is a member again after a fault"] += (
            new.resizes_undone > old.resizes_undone
        )
        if left_out and (len(holders) in policy.sizes.allowed or len(there) == size):
            raise Violation(
                f"generation {new.generation} begins after a fault without {left_out}, which wait with their shards"
            )

    def _grows_where_it_may(self, old: Record, new: Record, cordoned: Collection[PodId | None]) -> None:
        """Growth takes nobody on a node that was cordoned before."""
        if old.transition is None or old.transition.cause != GROWTH:
            return
        wrong = sorted({*new.members}.difference(old.members).intersection(cordoned))
        if wrong:
            raise Violation(f"generation {new.generation} grows by {wrong}, on cordoned nodes")

    def _stopped_by_edit(self, old: Record, new: Record, policy: Policy) -> None:
        """A lower minimum stops no job that trains in a queue.

        Where the base had no room for all spares, some of its pods become spares, and increments may stand for other pods than before.
        """
        begun = new.transition
        if new.generation > old.generation:
            self._minimum = policy.sizes.minimum
        elif policy.sizes.minimum < self._minimum and old.members and old.transition is None:
            self.met["the minimum is lowered in a queue"] += bool(old.queue)
            has_spares = any(one.spares for one in policy.specs)
            is_resize = begun is not None and begun.kind is TransitionKind.RESIZE
            if begun is not None and begun.cause == "SpecEdited" and not (is_resize and has_spares):
                raise Violation(f"the job is stopped because its minimum was lowered to {policy.sizes.minimum}")

    def _grows(self, old: Record, new: Record, policy: Policy, now: datetime) -> None:
        """A growth does not begin before all the times are over that the user set for it."""
        if old.running_since is None and new.running_since is not None:
            kind, cause = self._kinds.get(new.generation), self._causes.get(new.generation)
            if kind is not None and cause != RECORD_LOST:  # that is nobody's fault
                self._ran_at[kind] = new.running_since
        begun = new.transition
        if old.transition is not None or begun is None or begun.cause != GROWTH or not self.has_true_time:
            return
        recovered_at, opened = self._ran_at.get(TransitionKind.RECOVERY), old.window_since or now
        in_time = recovered_at is not None and opened < recovered_at + policy.faulty_timeout
        if self.is_replicated and old.shrank_after_fault and in_time:  # a recovery would have waited for these
            self.met["a replacement joins those who went on without it"] += 1
            policy = replace(policy, scaling_timeout=NO_TIME, snooze=NO_TIME, min_stable=NO_TIME)
        tries = min(max(old.resize_failures, 1), 16)
        waits: dict[str, tuple[datetime | None, timedelta]] = {
            "scalingTimeoutInSeconds": (old.window_since or now, policy.scaling_timeout),
            "scaleUpSnoozeTimeInSeconds": (self._ran_at.get(TransitionKind.RECOVERY), policy.snooze),
            "minStableSeconds": (self._ran_at.get(TransitionKind.RESIZE), policy.min_stable),
            "backoff": (old.resize_failed_at, min(policy.backoff_max, policy.backoff_base * int(2 ** (tries - 1)))),
        }
        ends = {name: since + wait for name, (since, wait) in waits.items() if since is not None and wait}
        early = [name for name, end in ends.items() if now + WRITING_TIME < end]
        if early:
            raise Violation(f"the job grows before {early} is over: {ends}")
        if ends:
            self.met[f"grows after {max(ends, key=ends.__getitem__)}"] += 1

    def decided(self, job: ObservedJob, todo: Plan, now: datetime) -> None:
        """A growth that is due does not wait for new replicas longer than it may."""
        before, after = job.record, todo.record
        if job.policy is None or before is None or before.transition is not None or job.deleting_since is not None:
            return
        if after.queue or after.transition is not None or after.outcome or after.running_since is None:
            return
        due = growth_due(after, job.policy, job.uid, NOBODY)  # replacements may be due earlier
        if due is not None and now >= due + PREPARATION_LIMIT:
            raise Violation(f"a growth that was due at {due} waits for new replicas beyond {PREPARATION_LIMIT}")
        self.met["a growth waits for workers that are prepared"] += due is not None and now >= due

    def depth_decided(self, job: ObservedJob, todo: Plan, agents: Mapping[str, ObservedAgent], now: datetime) -> None:
        """No operator says that workers keep nothing in memory before their agent has had the time to answer it."""
        before, begun = job.record, todo.record.transition
        if before is None or begun is None or begun.depth is Depth.MEMORY:
            return
        if before.transition is not None and before.transition.began_at == begun.began_at:
            return
        for member in todo.record.members:
            agent = agents.get(member.name(job.name))
            if agent is None or agent.state is not None or agent.trying_since is None:
                continue
            claim = f"the workers of pod {member.name(job.name)} keep nothing in memory"
            if begun.depth_reason == claim and now - agent.trying_since < FIRST_ANSWER:
                raise Violation(f"an operator that has not heard the agent says of a {begun.kind}: {claim}")

    def _noted(self, old: Record, new: Record) -> None:
        """Note what the new generation shows of the fields of the job."""
        before = old.transition
        if before is None or before.kind is not TransitionKind.RECOVERY:
            return
        before_it = self._members.get(old.generation, ())
        slots = {member.slot for member in before_it}
        self.met["shrinks after a fault"] += len(new.members) < len(before_it)
        self.met["a spare takes a place"] += (
            len(new.members) == len(before_it) and {m.slot for m in new.members} != slots
        )

    def pod_made(
        self,
        name: str,
        avoids: frozenset[str],
        image: str,
        images: Mapping[PodId | None, str],
        spec: Any,
        closed: Mapping[str, bool],
    ) -> None:
        """The API server took a new pod. images: of the pods that are there. closed: nodes to be left, and whether that is known."""
        if name in self._trained and self.are_names_known:
            raise Violation(
                f"the name {name} is used again: what its bearer says late may be taken for the new one's word"
            )
        if avoids:
            self.met["a pod avoids nodes"] += 1
        limit = policy_in(spec).max_offenders
        if unknown := {node for node, is_known in closed.items() if is_known} - avoids:
            raise Violation(f"pod {name} may get {sorted(unknown)}, which it would have to leave at once")
        self.met["a pod avoids a node for what it announces"] += not avoids.isdisjoint(closed)
        avoids -= closed.keys()
        if len(avoids) > limit:
            raise Violation(f"pod {name} avoids {sorted(avoids)}, but at most {limit} nodes may be avoided")
        others = {images[m] for m in self.record.members if m in images}
        if others and image not in others and self._knows_spec:
            raise Violation(f"pod {name} is made with image {image} beside members with {sorted(others)}")


def _decided_size(record: Record) -> int:
    """Give the size to which a shrink in memory goes, even if it is not allowed any more: those who stay may hold the only copy."""
    begun = record.transition
    is_in_memory = begun is not None and begun.depth is Depth.MEMORY and begun.leavers
    return begun.target_size if begun is not None and is_in_memory else 0


def _begun_size(record: Record) -> int:
    """Give the size of the generation that agents may have begun by themselves: it was allowed when they were told of it."""
    following = next_of(record)
    return len(following.members) if following is not None else 0


def _interrupted_size(record: Record) -> int:
    """Give the size of the generation that a recovery in memory goes on from: with shards, all of its members may be needed again."""
    begun = record.transition
    is_in_memory = begun is not None and begun.depth is Depth.MEMORY and begun.kind is TransitionKind.RECOVERY
    return begun.from_size if begun is not None and is_in_memory else 0


def own_record(annotations: Mapping[str, str], uid: str) -> Record | None:
    """Give the job's own record; that of another job is none."""
    record, _, owner = (
        decode_record(annotations[ANNOTATION_STATE]) if ANNOTATION_STATE in annotations else (None, "", "")
    )
    return record if owner in ("", uid) else None
