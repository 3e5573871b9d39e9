"""What must hold of faults: each is noticed, recovered from, and counted once."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from tests.sim.invariant_state import JOB_NAME, WRITING_TIME, InvariantState, Violation, policy_in
from tests.sim.kernel import EPOCH

from elastipod_operator.core.avoided_nodes import avoided
from elastipod_operator.core.depth import NO_PROGRESS_LIMIT
from elastipod_operator.core.record import Record, TransitionKind
from elastipod_operator.core.snapshot import Policy

if TYPE_CHECKING:
    from tests.sim.training import Training


class FaultInvariants(InvariantState):
    """Sees how the record counts what was inflicted on the job."""

    def _counted(self, old: Record, new: Record, policy: Policy, now: datetime, bound: set[str]) -> None:
        """Restarts are counted once, in the window that is open, and a full one makes all pods anew."""
        window = new.window
        unasked = max(0, window.full_restarts - self.asked_for_pods)
        faults = window.restarts + (policy.restarts_before_full or 0) * unasked + window.full_restarts
        # Until all are accounted for, what turns out to be a lost node is counted too.
        is_settled = new.transition is None or new.transition.is_budget_checked or not new.transition.uses_budget
        if is_settled and faults > self.worker_faults:
            raise Violation(f"{window} for {self.worker_faults} worker faults")
        # Who cannot reach a pod that is to start may take its node for lost.
        most = self.worker_faults + self._inflicted + self._num_hidden
        if sum(offence.times for offence in new.node_faults) > most:
            raise Violation(f"{new.node_faults} for {most} faults")
        bad = avoided(new, policy, now)
        back = {one.pod for one in old.faulty_replicas if one.node in bad}.intersection(new.members)
        if back and new.generation > old.generation and old.transition is not None and old.transition.uses_budget:
            raise Violation(
                f"generation {new.generation} begins with {sorted(back)}, which failed on the avoided {bad}"
            )
        self.met["a node that was avoided in vain is used again"] += bool(avoided(old, policy, now)) and not bad
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

    def _failed(self, old: Record, new: Record, spec: Any, now: datetime) -> None:
        """A job may only fail when a budget or a time that the user set, or progress, is used up."""
        policy, faults = policy_in(spec), self.worker_faults
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

    def _goes_on_after_the_end(self, old: Record, new: Record, training: Training) -> None:
        """Nobody stops or replaces a generation of which all workers have finished: the job has completed."""
        if old.transition is not None or new.transition is None or not self.is_fenced:
            return
        run = training.runs.get(old.generation)
        if (
            run is not None
            and len(run.members) == run.nnodes
            and all(m.has_told_its_end() for m in run.members.values())
        ):
            raise Violation(f"generation {old.generation} has finished, and is stopped ({new.transition.cause})")

    def _completed(self, new: Record, training: Training) -> None:
        """A job is completed by the last of its workers, not by the first."""
        run = training.runs.get(new.generation)
        at_work = [m.pod.name for m in run.members.values() if m.works(run.generation)] if run is not None else []
        if at_work and not self.met["agent: lies that its workers finished"]:
            raise Violation(f"the job is completed while workers of {at_work} have not ended")

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
