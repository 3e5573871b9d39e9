"""What must hold at every moment, whatever breaks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from tests.sim.events import Make
from tests.sim.kernel import EPOCH

from elastipod_agent.core.inprocess_restart import WorkerPreparation
from elastipod_operator.api import JobSpec
from elastipod_operator.core.actions import Plan
from elastipod_operator.core.escalation import NO_PROGRESS_LIMIT
from elastipod_operator.core.faults import FIRST_ANSWER
from elastipod_operator.core.growth import CAUSE as GROWTH
from elastipod_operator.core.growth import growth_due
from elastipod_operator.core.history import HistoryEntry, decode_history
from elastipod_operator.core.names import ANNOTATION_HISTORY, ANNOTATION_STATE, PodId
from elastipod_operator.core.phase_accounting import PHASES, total, total_by_depth
from elastipod_operator.core.preparation import PREPARATION_LIMIT
from elastipod_operator.core.record import RECORD_LOST, Depth, Record, TransitionKind
from elastipod_operator.core.record_codec import MAX_BYTES, RecordError, decode
from elastipod_operator.core.snapshot import ObservedAgent, ObservedJob, Policy
from elastipod_operator.kube.job_policy import policy_of

if TYPE_CHECKING:
    from tests.sim.agents import SimAgent
    from tests.sim.training import Run, Training

STATES = ("Created", "Suspended", "PodsRunning", "Running", "Faulted", "Completed", "Failed")
JOB_NAME = "train"
JOB_UID = "job-uid"
AUXILIARY = ("Scaling", "PodsReady", "Warning")
# From a decision to its write.
WRITING_TIME = timedelta(seconds=1)
# Times are stored in milliseconds. With a clock that is never set the sums are this exact, whatever happens.
LEDGER_ERROR = timedelta(milliseconds=5)


class Violation(AssertionError):
    """An invariant does not hold; the text says which and how."""


class InvariantChecker:
    """Sees every write and every call, and raises Violation at the first that must not be."""

    def __init__(self, say: Callable[[str], None], *, heeds_events: bool) -> None:
        self._say = say
        self.heeds_events = heeds_events
        self._started: dict[tuple[int, int], str] = {}
        self._masters: dict[int, tuple[str, int]] = {}
        self._members: dict[int, tuple[PodId, ...]] = {}
        self._kinds: dict[int, TransitionKind] = {}
        self._causes: dict[int, str] = {}
        self._ran_at: dict[TransitionKind, datetime] = {}
        """When a generation of each kind last ran, by the operator's clock."""
        self._stepped = 0
        self._excused = 0
        self._inflicted = 0
        self._knows_spec = True
        self._given_up: set[str] = set()
        self._touched: dict[str, float] = {}
        self._hidden: dict[str, float] = {}
        self._trained: set[str] = set()
        self._unwanted: set[str] = set()
        self._asked_for_processes: set[int] = set()
        self._stopped_at: dict[int, float] = {}
        """When the first agent heard that a generation is to stop."""
        self._must_count: dict[int, int] = {}
        """Generations that a fault of their own ended, with the retries that were booked before."""
        self._minimum = 0
        """The smallest size that was wished when the present generation was allocated."""
        self.has_true_time = True
        """Whether the operator's clock was never set."""
        self.clock_error_s = 0.0
        """By how much it was set in all."""
        self.are_names_known = True
        """Whether nobody took the record away that knows which names pods had."""
        self.is_lied_to = False
        """Whether an agent claimed a generation that is not its own: it is stopped by the name that it gives."""
        self.met: Counter[str] = Counter()
        """What really happened, and how often: of a fault that was drawn but hit nobody there is no word here."""
        self.worker_faults = 0
        self.asked_for_pods = 0
        self.record = Record()

    def touched(self, pod: str, until: float) -> None:
        """A fault is inflicted on a pod, whose consequences may be seen until then."""
        self._touched[pod] = max(until, self._touched.get(pod, 0.0))
        self._inflicted += 1

    def hidden(self, pod: str, until: float) -> None:
        """The operator cannot reach a pod's agent: that may spoil a resize, but never a generation that trains."""
        self._hidden[pod] = max(until, self._hidden.get(pod, 0.0))

    # -- the record

    def record_wiped(self, *, with_spec: bool) -> None:
        """The annotations were removed from outside: one unexplained recovery is excused.

        with_spec: also the one that tells from which spec the pods were made.
        """
        self._knows_spec &= not with_spec
        self.are_names_known = False
        self._ran_at.clear()
        self._excused += 1
        self.record = Record()

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
        old, new = _record(before), _record(after)
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
        if new.generation < old.generation:
            raise Violation(f"the generation went back from {old.generation} to {new.generation}")
        if new.generation > old.generation:
            self._grows_where_it_may(old, new, cordoned)
            self._allocated(old, new, spec, decode_history(after.get(ANNOTATION_HISTORY, "[]")))
        elif new.members and new.members != old.members:
            raise Violation(f"generation {new.generation} got other members: {old.members} -> {new.members}")
        if new.restarts > old.restarts:
            self._restarted(old, new, training, now)
        policy = policy_of(JobSpec.model_validate(spec))
        self._stopped_by_edit(old, new, policy)
        self._counted(old, new, policy, now, bound)
        self._grows(old, new, policy, now)
        if new.outcome == "Failed" and old.outcome != "Failed":
            self._failed(old, new, spec, now)

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
        policy = policy_of(JobSpec.model_validate(spec))
        if known is None and new.generation < max(self._members):
            raise Violation(f"generation {new.generation} comes after generation {max(self._members)}")
        if policy.restarts_before_full is not None and new.window.restarts > policy.restarts_before_full:
            raise Violation(
                f"{new.window.restarts} process-level restarts; more than {policy.restarts_before_full} ask for a full one"
            )
        for shape in policy.specs:
            number = sum(member.spec == shape.name for member in new.members)
            if number > shape.limit:
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
        if len(new.members) not in (*allowed, _decided_size(old)):
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
        self._say(f"generation {new.generation}: {[_short(m) for m in new.members]} ({entry.cause})")

    def _grows_where_it_may(self, old: Record, new: Record, cordoned: Collection[PodId | None]) -> None:
        """Growth takes nobody on a node that was cordoned before."""
        if old.transition is None or old.transition.cause != GROWTH:
            return
        wrong = sorted({*new.members}.difference(old.members).intersection(cordoned))
        if wrong:
            raise Violation(f"generation {new.generation} grows by {wrong}, on cordoned nodes")

    def _stopped_by_edit(self, old: Record, new: Record, policy: Policy) -> None:
        """A lower minimum stops no job that trains in a queue."""
        begun = new.transition
        if new.generation > old.generation:
            self._minimum = policy.sizes.minimum
        elif policy.sizes.minimum < self._minimum and old.members and old.transition is None:
            self.met["the minimum is lowered in a queue"] += bool(old.queue)
            if begun is not None and begun.cause == "SpecEdited":
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
        due = growth_due(after, job.policy, job.uid)
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

    def _counted(self, old: Record, new: Record, policy: Policy, now: datetime, bound: set[str]) -> None:
        """Restarts are counted once, in the window that is open, and a full one makes all pods anew."""
        window = new.window
        unasked = max(0, window.full_restarts - self.asked_for_pods)
        faults = window.restarts + (policy.restarts_before_full or 0) * unasked + window.full_restarts
        # Until all are accounted for, what turns out to be a lost node is counted too.
        is_settled = new.transition is None or new.transition.is_budget_checked or not new.transition.uses_budget
        if is_settled and faults > self.worker_faults:
            raise Violation(f"{window} for {self.worker_faults} worker faults")
        if sum(offence.times for offence in new.node_faults) > self.worker_faults + self._inflicted:
            raise Violation(f"{new.node_faults} for {self._inflicted} faults")
        is_new = self.has_true_time and window.restarts > old.window.restarts and old.transition is None
        if is_new and window.since is not None and now - window.since > policy.eval_period + WRITING_TIME:
            raise Violation(
                f"a restart is counted in a window that is over since {now - window.since - policy.eval_period}"
            )
        self.met["a window is over"] += window.number > old.window.number
        if window.full_restarts > old.window.full_restarts:
            self._say(f"full job restart {window.full_restarts} of window {window.number}")
            self.met["full job restart"] += 1
            self._given_up |= bound

    def pod_made(
        self, name: str, avoids: frozenset[str], image: str, images: Mapping[PodId | None, str], spec: Any
    ) -> None:
        """The API server took a new pod. images: of the pods that are there."""
        if name in self._trained and self.are_names_known:
            raise Violation(
                f"the name {name} is used again: what its bearer says late may be taken for the new one's word"
            )
        if avoids:
            self.met["a pod avoids nodes"] += 1
        limit = policy_of(JobSpec.model_validate(spec)).max_offenders
        if len(avoids) > limit:
            raise Violation(f"pod {name} avoids {sorted(avoids)}, but at most {limit} nodes may be avoided")
        others = {images[m] for m in self.record.members if m in images}
        if others and image not in others and self._knows_spec:
            raise Violation(f"pod {name} is made with image {image} beside members with {sorted(others)}")

    def _failed(self, old: Record, new: Record, spec: Any, now: datetime) -> None:
        """A job may only fail when a budget or a time that the user set, or progress, is used up."""
        policy, faults = policy_of(JobSpec.model_validate(spec)), self.worker_faults
        self.met[f"failed: {new.outcome_reason}"] += 1
        for budget in ("jobMaxRetryCount", "maxFullJobRestarts"):
            self.met[f"used up: {budget}"] += f"{budget} " in new.outcome_message
        begun = {
            "DeadlineExceeded": (EPOCH + old.suspended_time, policy.active_deadline),
            "StartupDeadlineExceeded": (old.first_pod_at if old.started_at is None else None, policy.startup_deadline),
            "FaultDeadlineExceeded": (old.fault_at, policy.fault_deadline),  # being suspended ends a fault
        }
        if new.outcome_reason in begun:
            since, limit = begun[new.outcome_reason]
            if since is None or limit is None or (self.has_true_time and now + WRITING_TIME < since + limit):
                raise Violation(f"the job failed before its time: {new.outcome_message}")
            return
        out_of_retries = policy.max_retries is not None and policy.max_retries < faults
        stuck = new.outcome_reason == "NoProgress" and policy.max_retries is None and faults > NO_PROGRESS_LIMIT
        full = policy.max_full_restarts
        out_of_restarts = full is not None and self._full_restarts(policy, faults) > full
        if not (out_of_retries or stuck or out_of_restarts):
            raise Violation(
                f"the job failed after {faults} worker faults, though its limits allow more: {new.outcome_message}"
            )
        self._say(f"the job failed: {new.outcome_message}")

    def _full_restarts(self, policy: Policy, faults: int) -> int:
        """How many full job restarts so many faults may have brought: workers may ask for one, too."""
        per_full = policy.restarts_before_full
        return self.asked_for_pods + (faults // (per_full + 1) if per_full is not None else 0)

    def _restarted(self, old: Record, new: Record, training: Training, now: datetime) -> None:
        if new.restarts > old.restarts + 1:
            raise Violation(f"restarts went from {old.restarts} to {new.restarts} in one write")
        cause = new.transition.cause if new.transition else new.outcome_reason or "see the next line"
        self._say(f"recovery of generation {old.generation}: {cause}")
        if old.transition is not None and old.transition.kind is TransitionKind.RECOVERY:
            raise Violation("a recovery was booked twice")
        run = training.runs.get(old.generation)
        at = (now - EPOCH).total_seconds()
        touched = any(self._touched.get(member.name(JOB_NAME), -1.0) >= at for member in old.members)
        in_transit = old.transition is not None or old.running_since is None
        hidden = any(self._hidden.get(member.name(JOB_NAME), -1.0) >= at for member in old.members)
        if not touched and not (in_transit and hidden) and not (run is not None and run.spoiled):
            if self._excused:
                self._excused -= 1
                return
            raise Violation(f"generation {old.generation} is recovered ({cause}) though no fault was inflicted on it")

    def must_notice(self, generation: int) -> None:
        """What ended a generation must be known by now."""
        record = self.record
        if record.generation == generation and record.transition is None and not record.outcome:
            raise Violation(f"generation {generation} has ended and nobody has noticed")

    def must_have_let_go(self, generation: int) -> None:
        """A node with workers of this generation is taken back: the others may not go on waiting for it."""
        transition = self.record.transition
        if (
            self.record.generation == generation
            and (transition is None or transition.graceful)
            and not self.record.outcome
        ):
            raise Violation(f"generation {generation} still trains or drains when the time of a notice is over")

    def must_have_recovered(self, generation: int) -> None:
        """Nothing else was inflicted since a fault ended a generation: a later one trains by now, or the job has ended."""
        record = self.record
        # A job that grows again by now has trained in between.
        is_broken = record.transition is not None and record.transition.kind is not TransitionKind.RESIZE
        is_at_work = record.generation > generation and not is_broken and record.running_since is not None
        if not is_at_work and not record.outcome:
            raise Violation(f"generation {generation} has ended and nobody has brought the training back")

    def must_count(self, generation: int) -> None:
        """A fault of its own, and nothing else, ends a generation: that costs a retry."""
        self._must_count[generation] = self.record.retries

    # -- calls to agents

    def asked_for_processes(self, generation: int) -> None:
        """Workers that failed by themselves, and nothing else at that time, want all to get new processes."""
        self._asked_for_processes.add(generation)

    def sent_away(self, pod: str) -> None:
        """The operator told a pod's agent to leave, or deletes the pod."""
        self._unwanted.add(pod)

    def told(self, agent: SimAgent, body: Mapping[str, Any]) -> None:
        """Agents whose workers outlive faults learn of each other with /start, the others do not (contracts, 11)."""
        ips, data = body.get("rankIps"), body.get("worker_data")
        if agent.make.keeps_state:
            return  # it depends on what the workers of the job have announced
        if agent.make is not Make.IN_PROCESS:
            if ips is not None or data is not None:
                raise Violation(f"{agent.pod.name} does not restart in process but is told of addresses")
            return
        ips = ips or []
        ranks = [entry["rank"] for entry in ips]
        if ranks != list(range(body["nnodes"])) or ips[body["rank"]]["ip"] != agent.pod.ip:
            raise Violation(
                f"{agent.pod.name} as rank {body['rank']} of {body['nnodes']} is told of the addresses {ips}"
            )
        self.met["in process: addresses told"] += 1
        self.met["in process: worker data told"] += bool(data)
        self.met["in process: processes kept"] += agent.processes_since < body["faultCount"] + 1

    def called(
        self, path: str, pod: PodId, body: Mapping[str, Any] | None, *, ending: bool, by_the_past: bool = False
    ) -> None:
        """The operator is about to call an agent; the record must already say so.

        by_the_past: this operator stood still between its record and its call, and another one may have gone on.
        """
        record, generation = self.record, (body or {}).get("generation")
        if generation is None or by_the_past or self.is_lied_to:
            return
        stranger = path == "/stop" and pod not in record.members
        if generation > record.generation and not ending and not stranger:
            raise Violation(f"{path} of generation {generation} goes out, but the record says {record.generation}")
        if path == "/stop" and generation == record.generation and pod in record.members:
            if record.transition is None and not record.outcome and not ending:
                raise Violation(f"/stop goes to member {_short(pod)} of generation {generation} without a record of it")
            if body is not None and not body.get("is_graceful") and record.transition and record.transition.graceful:
                self._say(f"hard stop in a drain: {_short(pod)}")

    def stopped(self, generation: int, now: float) -> None:
        """An agent hears a /stop of its generation."""
        self._stopped_at.setdefault(generation, now)

    def started_prepared(self, agent: SimAgent) -> None:
        """An agent takes a /start, with workers that it has prepared or without."""
        if agent.preparation is WorkerPreparation.READY:
            last_stop = self._stopped_at.get(max(self._stopped_at, default=0), math.inf)
            self.met["in memory: prepared workers start"] += 1
            self.met["in memory: workers were at the barrier before the others stopped"] += agent.ready_at < last_stop

    def joined(self, run: Run, agent: SimAgent, rank: int, nnodes: int, master: str) -> None:
        """An agent took a /start."""
        self._trained.add(agent.pod.name)
        kept = {g for g in self._asked_for_processes if 0 < agent.processes_since <= g < run.generation}
        if kept:
            raise Violation(
                f"{agent.pod.name} keeps its processes though workers of generation {kept} asked for new ones"
            )
        if agent.pod.uid in self._given_up:
            raise Violation(f"pod {agent.pod.name} trains though a full job restart came after it")
        uid = self._started.setdefault((run.generation, rank), agent.pod.uid)
        if uid != agent.pod.uid:
            raise Violation(f"two pods have group rank {rank} in generation {run.generation}")
        if self._masters.setdefault(run.generation, (master, nnodes)) != (master, nnodes):
            raise Violation(f"generation {run.generation} has two masters or sizes")
        if rank == 0 and master != agent.pod.ip:
            raise Violation(f"generation {run.generation}: group rank 0 is not at the master address")

    # -- training

    def told_who_leaves(self, run: Run, fates: Mapping[int, bool | None]) -> None:
        """The ranks of a run have stopped for a planned change in memory: by now each was told whether it stays."""
        if None in fates.values():
            raise Violation(f"generation {run.generation} has stopped, and its ranks were not told who leaves: {fates}")

    def resumed(self, run: Run, runs: Mapping[int, Run]) -> None:
        """A generation loaded its checkpoint: after a planned resize nothing may be repeated."""
        before = [r for g, r in runs.items() if g < run.generation and r.steps_made]
        last = max(before, key=lambda r: r.generation, default=None)
        repeated = last.step - run.resumed.step if last is not None else 0
        self._say(f"generation {run.generation} trains from step {run.resumed.step} ({repeated} repeated)")
        self.met["in memory: a generation goes on from it"] += run.is_from_memory
        planned = self._kinds.get(run.generation) is not TransitionKind.RECOVERY
        # With a wrong clock the time that a pod has until it is killed is misjudged.
        if last is None or last.spoiled or not self.has_true_time:
            return
        if any(agent.hangs() for agent in last.members.values()):
            return  # it could not ask its workers to save
        if planned and repeated and self.heeds_events:
            kind = self._kinds.get(run.generation)
            raise Violation(f"generation {run.generation} ({kind}) repeats {repeated} steps though nothing failed")

    def step(self, run: Run, runs: Mapping[int, Run]) -> None:
        """A generation makes a step."""
        # Members that are all out of everybody's sight cannot be kept from going on; what they save is refused.
        lost = {member.name(JOB_NAME) for member in self.record.lost}
        names = [agent.pod.name for agent in run.members.values()]
        unseen = all(name in self._touched or (name in self._hidden and name in lost) for name in names)
        if run.generation < self._stepped and unseen:
            return
        if run.generation < self._stepped:
            raise Violation(f"generation {run.generation} makes a step after generation {self._stepped} did")
        self._stepped = run.generation
        agents = {agent.pod.uid for agent in run.members.values()}
        if len(agents) != run.nnodes:
            raise Violation(f"generation {run.generation} trains with {len(agents)} pods instead of {run.nnodes}")

    # -- status

    def status_written(self, status: Mapping[str, Any]) -> None:
        """The API server took a status."""
        types = [condition["type"] for condition in status["conditions"]]
        if types[-1] not in STATES or len(set(types)) != len(types):
            raise Violation(f"conditions are not one list with the state last: {types}")
        ready = next((c for c in status["conditions"] if c["type"] == "PodsReady"), None)
        if ready is not None and ready["reason"] == "ContainerEnded":
            named = [pod for pod in self._unwanted if f"pod {pod} " in ready["message"]]
            if named:
                raise Violation(
                    f"the user is warned of the end of a pod that the operator sent away: {ready['message']}"
                )
        self.met.update(f"told: {c['type']} {c['reason']}" for c in status["conditions"])
        loud = [c["type"] for c in status["conditions"] if c["type"] in AUXILIARY and c["status"] == "True"]
        if types[-1] == "Running" and loud:
            raise Violation(f"auxiliary conditions are True while Running: {loud}")


def lineage(training: Training, total: int) -> None:
    """Every step of the final weights was made exactly once, going back over the generations (contracts, 7)."""
    run = max((r for r in training.runs.values() if r.step >= total), key=lambda r: r.generation)
    upper = total
    while upper > 0:
        if run.resumed.step >= upper:
            raise Violation(f"generation {run.generation} resumed at {run.resumed.step}, beyond step {upper}")
        upper = run.resumed.step
        if not upper:
            return
        if run.resumed.generation >= run.generation:
            raise Violation(f"generation {run.generation} resumed from generation {run.resumed.generation}")
        writer = training.runs[run.resumed.generation]
        if not writer.resumed.step < upper <= writer.step:
            raise Violation(f"generation {writer.generation} never made step {upper}")
        run = writer


def _decided_size(record: Record) -> int:
    """Give the size to which a shrink in memory goes, even if it is not allowed any more: those who stay may hold the only copy."""
    begun = record.transition
    is_in_memory = begun is not None and begun.depth is Depth.MEMORY and begun.leavers
    return begun.target_size if begun is not None and is_in_memory else 0


def _record(annotations: Mapping[str, str]) -> Record | None:
    """Give the job's own record; that of another job is none."""
    try:
        record = decode(annotations[ANNOTATION_STATE])
    except (KeyError, RecordError):
        return None
    return record if record.owner in ("", JOB_UID) else None


def _short(pod: PodId) -> str:
    return f"{pod.spec}-{pod.ordinal}-{pod.incarnation}"
