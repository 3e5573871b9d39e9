"""How deep a change of the world goes: memory, process, pod, full job. Each is the fallback of the one before."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from .depth_reasons import DepthReason
from .faults import Fault
from .names import PodId
from .record import Depth, Record, RestartMode, Transition, TransitionKind
from .replica import Health, Replica, Replicas
from .snapshot import REPLICATED, AgentState, Policy

# By the number of faults in a row without a new step, as `repeated_faults` counts them.
LADDER = (Depth.MEMORY, Depth.PROCESS, Depth.POD, Depth.JOB)
# A job that reached no newer step in this many consecutive recoveries does not progress.
NO_PROGRESS_LIMIT = 3
_MODES = {
    Depth.MEMORY: RestartMode.IN_PROCESS,
    Depth.PROCESS: RestartMode.PROCESSES,
    Depth.POD: RestartMode.PROCESSES,
    Depth.JOB: RestartMode.JOB,
}
_IN_WORDS = {
    Depth.MEMORY: "in memory",
    Depth.PROCESS: "with new processes",
    Depth.POD: "with new pods for those that failed",
    Depth.JOB: "with new pods",
}


@dataclass(frozen=True, slots=True)
class DepthChoice:
    """A depth, and why it is no less deep. reason: the sentence; empty for memory, and for workers that never keep anything."""

    depth: Depth
    code: DepthReason
    reason: str = ""


IN_MEMORY = DepthChoice(Depth.MEMORY, DepthReason.WORKERS_KEPT)
_UNEXPECTED = DepthChoice(Depth.PROCESS, DepthReason.NOTHING_KEPT)


def _because(depth: Depth, code: DepthReason, **details: object) -> DepthChoice:
    return DepthChoice(depth, code, code.sentence.format(**details))


def keeps_state(replica: Replica) -> bool:
    """Whether its workers can live through a change: they announced it, or their agent was started for it."""
    return bool(replica.agent.memory_state) or replica.agent.restart_mode in (RestartMode.IN_PROCESS, RestartMode.LOCAL)


def is_starting(replica: Replica) -> bool:
    """Whether its workers are new processes that have neither announced anything nor made a step: they hold nothing to lose."""
    agent = replica.agent
    return agent.state is AgentState.RUNNING and agent.step is None and not keeps_state(replica)


def waits_for_new_processes(record: Record, replicas: Replicas) -> bool:
    """Whether workers that hold the state wait for processes that still start, so that nobody can make a step."""
    members = _members(record, replicas)
    return any(map(keeps_state, members)) and any(map(is_starting, members))


def survives_at_any_size(record: Record, replicas: Replicas, policy: Policy) -> bool:
    """Whether each worker holds the whole state in memory, so that a change of size costs those who stay next to nothing."""
    return not policy.new_processes and any(r.agent.memory_state == REPLICATED for r in _members(record, replicas))


def keeps_nothing(record: Record, replicas: Replicas) -> bool:
    """Whether no worker of the present generation can live through a change."""
    return not any(map(keeps_state, _members(record, replicas)))


def depth_of_change(
    record: Record, replicas: Replicas, policy: Policy, kind: TransitionKind, leavers: Collection[PodId] = ()
) -> DepthChoice:
    """Choose the depth of a planned change. leavers: members that do not train in the next generation; the others keep what they hold."""
    if keeps_nothing(record, replicas):
        return _UNEXPECTED
    if kind is TransitionKind.SUSPEND:
        return _because(Depth.PROCESS, DepthReason.JOB_SUSPENDED)
    leave = frozenset(leavers)
    return _obstacle([r for r in _members(record, replicas) if r.id not in leave], policy) or IN_MEMORY


def depth_of_recovery(
    record: Record, replicas: Replicas, policy: Policy, fault: Fault, asked: RestartMode
) -> DepthChoice:
    """Choose the depth of a recovery. record: with the present fault counted. asked: the most that failed workers request."""
    members = _members(record, replicas)
    if keeps_nothing(record, replicas) and not record.failures_in_place:
        return _UNEXPECTED
    if asked is RestartMode.JOB:
        return _because(Depth.JOB, DepthReason.JOB_REQUESTED)
    repeated = _after_repeated_failures(record, policy, fault)
    if repeated.depth in (Depth.POD, Depth.JOB):
        return repeated
    if asked is RestartMode.PROCESSES:
        return _because(Depth.PROCESS, DepthReason.PROCESS_REQUESTED)
    surviving = [r for r in members if (r.may_train or r.health is Health.DISRUPTED) and not _has_only_new_processes(r)]
    lost = frozenset(fault.lost)
    return _obstacle([r for r in surviving if r.id not in lost and r.runs(record.generation)], policy) or repeated


def _after_repeated_failures(record: Record, policy: Policy, fault: Fault) -> DepthChoice:
    times = repeated_faults(record, policy) if fault.uses_budget else 1
    limit = policy.max_full_restarts
    ladder = LADDER if limit is None or record.window.full_restarts < limit else LADDER[:-1]
    depth = ladder[min(times, len(ladder)) - 1]
    if depth is Depth.MEMORY:
        return IN_MEMORY
    if times == record.failures_in_place:
        return _because(depth, DepthReason.REPEATED_FAILURES, times=times)
    return DepthChoice(depth, DepthReason.REPEATED_FAILURES, f"{times} recoveries in a row reached no new step")


def repeated_faults(record: Record, policy: Policy) -> int:
    """Count the faults in a row that say that a deeper restart may help: of one replica, or of any that brought no new step.

    Where another replica has failed each time, the first two of them say no more than one does. A job that computes lost steps again
    makes steps between its faults; it goes deeper where it would end because none of them is newer than all before. 1 also for workers
    that keep no state in memory, whose restarts go no deeper by themselves.
    """
    if not record.failures_in_place:
        return 1
    would_end = policy.max_retries is None and record.best_step >= 0 and record.stalled_recoveries >= NO_PROGRESS_LIMIT
    stalled = record.stalled_recoveries if would_end else 0
    return max(record.failures_in_place, record.faults_without_step - 1, stalled)


def count_failures_in_place(record: Record, replicas: Replicas, fault: Fault, *, has_made_step: bool) -> int:
    """Count the faults in a row that the same replica has had without a new step. A lost pod or node does not count."""
    before = record.failures_in_place
    if not (before or any(r.agent.memory_state for r in _members(record, replicas))):
        return 0
    if not fault.uses_budget:
        return before
    failed = {pod.slot for pod in record.failed_in_place}
    is_repeated = not has_made_step and any(one.pod.slot in failed for one in fault.faulty_replicas)
    return before + 1 if is_repeated else 1


def failed_in_place(record: Record, fault: Fault, *, has_made_step: bool) -> tuple[PodId, ...]:
    """Give the replicas of which the next fault is a repetition if it comes without a new step."""
    if fault.uses_budget:
        return tuple(one.pod for one in fault.faulty_replicas)
    return () if has_made_step else record.failed_in_place


def mode_of(depth: Depth) -> RestartMode:
    """Give what agents are told for a depth."""
    return _MODES[depth]


def deepened(transition: Transition, reach: RestartMode) -> Transition:
    """Follow workers that failed later and ask for more."""
    if transition.depth is not Depth.MEMORY or reach in (RestartMode.IN_PROCESS, RestartMode.LOCAL):
        return replace(transition, reach=reach)
    depth = Depth.JOB if reach is RestartMode.JOB else Depth.PROCESS
    code = DepthReason.JOB_REQUESTED if depth is Depth.JOB else DepthReason.PROCESS_REQUESTED
    return replace(transition, reach=reach, depth=depth, depth_reason=code.sentence, depth_code=code)


def chosen_depth(transition: Transition) -> DepthChoice:
    """Give the depth that was chosen when a change began."""
    return DepthChoice(transition.depth, transition.depth_code, transition.depth_reason)


def settled_depth(transition: Transition, chosen: Iterable[Replica]) -> DepthChoice | None:
    """Give the depth that a change has had, when its generation begins; None for a start, which changes nothing.

    Processes that were to be kept may have ended meanwhile.
    """
    if transition.kind is TransitionKind.START:
        return None
    if transition.recreates_pods and transition.depth is not Depth.JOB:
        is_requested = transition.reach is RestartMode.JOB
        return _because(Depth.JOB, DepthReason.JOB_REQUESTED if is_requested else DepthReason.RESTART_LIMIT)
    if transition.depth is not Depth.MEMORY:
        return chosen_depth(transition)
    if any(r.agent.num_kept or (not r.agent.memory_state and keeps_state(r)) for r in chosen):
        return IN_MEMORY
    return _because(Depth.PROCESS, DepthReason.NO_PROCESS_LEFT)


def describe_depth(choice: DepthChoice | None) -> str:
    """Say how deep a change went; empty for workers of which nobody expects that they keep anything."""
    if choice is None or (choice.depth is Depth.PROCESS and not choice.reason):
        return ""
    because = f" because {choice.reason}" if choice.reason else ""
    return f", {_IN_WORDS[choice.depth]}{because}"


def _members(record: Record, replicas: Replicas) -> list[Replica]:
    return [r for member in record.members if (r := replicas.get(member)) is not None]


def _has_only_new_processes(replica: Replica) -> bool:
    """Whether all its workers have failed in a drain: the new processes that its agent has ready announce nothing yet."""
    return replica.failed_draining and not replica.agent.num_kept


def _obstacle(staying: list[Replica], policy: Policy) -> DepthChoice | None:
    """Say why workers cannot keep their processes; None when they can."""
    if policy.new_processes:
        return _because(Depth.PROCESS, DepthReason.RECOVERY_IS_PROCESS)
    if not staying:
        return _because(Depth.PROCESS, DepthReason.NO_REPLICA_STAYS)
    if not any(map(keeps_state, staying)):
        other: Replica | None = staying[0]
    else:
        other = next((r for r in staying if not (keeps_state(r) or is_starting(r))), None)
    return _because(Depth.PROCESS, DepthReason.MEMBER_KEEPS_NOTHING, pod=other.pod.name) if other is not None else None
