"""Every reason that the operator gives, in conditions, Events and the history: what it means, and what to do.

`make generate` writes docs/reference/reasons.md from it. Words of others pass as they are, as an `OpenReason`: Kueue's
reasons, and what an agent gives as the reason of a fault, such as `LogHang_<rule>`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NewType

OpenReason = NewType("OpenReason", str)
"""A reason from another party."""


class Severity(StrEnum):
    """How much attention a reason deserves."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class EventRule(StrEnum):
    """When the operator writes an Event with a reason."""

    NEVER = "no"
    WHEN_REPORTED = "when the condition first has it"
    WHEN_IT_HAPPENS = "yes"


INFO, WARNING, ERROR = Severity.INFO, Severity.WARNING, Severity.ERROR
NEVER, WHEN_REPORTED, HAPPENS = EventRule.NEVER, EventRule.WHEN_REPORTED, EventRule.WHEN_IT_HAPPENS
CAUSE = "Faulted, history"
PLANNED = "Running, history"


class Reason(StrEnum):
    """A reason with its documentation. where: the conditions that have it."""

    where: str
    severity: Severity
    event: EventRule
    meaning: str
    advice: str

    def __new__(
        cls, value: str, where: str, severity: Severity, event: EventRule, meaning: str, advice: str = ""
    ) -> Reason:
        member = str.__new__(cls, value)
        member._value_ = value
        member.where, member.severity, member.event = where, severity, event
        member.meaning, member.advice = meaning, advice
        return member

    # ---- the state of a job
    ACCEPTED = "Accepted", "Created", INFO, NEVER, "The operator has accepted the job."
    WAITING_FOR_PODS = (
        "WaitingForPods", "Created", INFO, NEVER, "Fewer pods run than the minimum size needs.",
        "The message quotes the scheduler: add nodes, or lower the pods' requests or `minReplicas`.",
    )  # fmt: skip
    PODS_RUNNING = "PodsRunning", "PodsRunning", INFO, NEVER, "The first pods run."
    WAITING_FOR_AGENTS = (
        "WaitingForAgents", "PodsRunning", INFO, NEVER, "The pods run; their agents are not ready yet.",
        "See condition PodsReady when this takes long.",
    )  # fmt: skip
    STARTING = "Starting", "Running", INFO, NEVER, "The workers of a generation are being started."
    TRAINING = "Training", "Running", INFO, NEVER, "All replicas of the present generation train."
    RESIZING = "Resizing", "Running", INFO, NEVER, "A planned change of size is in progress."
    RECOVERING = (
        "Recovering", "Running, Faulted", WARNING, NEVER, "The job recovers from a fault.",
        "The message names the fault.",
    )  # fmt: skip
    SUSPENDED_BY_USER = (
        "SuspendedByUser", "Suspended", INFO, NEVER, "`spec.runPolicy.suspend` is true.", "Set it to false to resume.",
    )  # fmt: skip
    RESUMING = "Resuming", "Suspended", INFO, NEVER, "The job resumes as soon as its workers have stopped."
    QUEUED = (
        "Queued", "Suspended, Scaling", INFO, NEVER,
        "The job, or an increment, waits for quota; the message quotes Kueue.",
        "Nothing, if others may use the quota; a higher priority class or more quota admits it earlier.",
    )  # fmt: skip
    DEACTIVATED = (
        "Deactivated", "Suspended", WARNING, NEVER, "Kueue or a user has deactivated the base Workload.",
        "Set `spec.active` of the Workload to true.",
    )  # fmt: skip
    QUOTA_ENDED = (
        "QuotaEnded", "Suspended", WARNING, NEVER, "Another client has marked the base Workload as finished.",
        "Delete the Workload; the operator creates it again.",
    )  # fmt: skip
    INVALID_SPEC = (
        "InvalidSpec", "Suspended, Warning", ERROR, WHEN_REPORTED,
        "The spec is invalid. A job that trains continues with the last valid spec.",
        "The message names the field and what it must be.",
    )  # fmt: skip
    FAILED = "Failed", "Failed", ERROR, HAPPENS, "The job has failed.", "The message says why."
    COMPLETED = "Completed", "Completed", INFO, HAPPENS, "All workers have ended successfully."
    DEADLINE_EXCEEDED = (
        "DeadlineExceeded", "Failed", ERROR, NEVER, "The job ran for longer than `activeDeadlineSeconds`.",
        "Raise `spec.runPolicy.activeDeadlineSeconds`.",
    )  # fmt: skip
    STARTUP_DEADLINE_EXCEEDED = (
        "StartupDeadlineExceeded", "Failed", ERROR, NEVER, "Training did not begin within `startupDeadlineSeconds`.",
        "See the pods, or raise `spec.runPolicy.startupDeadlineSeconds`.",
    )  # fmt: skip
    FAULT_DEADLINE_EXCEEDED = (
        "FaultDeadlineExceeded", "Failed", ERROR, NEVER, "Training did not resume within `faultDeadlineSeconds` after a fault.",
        "See the pods, or raise `spec.runPolicy.faultDeadlineSeconds`.",
    )  # fmt: skip
    NO_PROGRESS = (
        "NoProgress", "Failed, Warning", ERROR, WHEN_REPORTED, "Several consecutive recoveries reached no newer step.",
        "The message quotes the first failing rank; set `jobMaxRetryCount` to allow more attempts.",
    )  # fmt: skip

    # ---- PodsReady
    AGENT_NOT_ANSWERING = (
        "AgentNotAnswering", "PodsReady", WARNING, WHEN_REPORTED, "The container runs, but nothing answers on the agent port.",
        "The container must start `hyperpodrun`; if that listens on another port, set `spec.elastipod.agentPort`.",
    )  # fmt: skip
    AGENT_SILENT = (
        "AgentSilent", "PodsReady, Faulted, history", WARNING, WHEN_REPORTED,
        "An agent does not answer, and neither its node, nor its container, nor other agents explain it. The message says when "
        "the pod is replaced.",
        "Can the operator reach the agent port? `kubectl delete pod POD` replaces the pod at once.",
    )  # fmt: skip
    OPERATOR_CUT_OFF = (
        "OperatorCutOff", "PodsReady", WARNING, WHEN_REPORTED,
        "No agent of the job answers the operator, although their nodes are ready and their containers run. Training continues.",
        "Look for a NetworkPolicy between the operator and the pods.",
    )  # fmt: skip
    TOKEN_REFUSED = (
        "TokenRefused", "PodsReady", ERROR, WHEN_REPORTED, "An agent and the operator do not accept each other's credentials.",
        "The message names the Secret and what to delete.",
    )  # fmt: skip
    PODS_REFUSED = (
        "PodsRefused", "PodsReady", WARNING, WHEN_REPORTED,
        "The API server refuses pods: quota, limits, admission, or a webhook that does not answer.",
        "Raise the quota, or repair what the message quotes; the operator tries again by itself.",
    )  # fmt: skip
    IMAGE_PULL_FAILED = (
        "ImagePullFailed", "PodsReady", WARNING, WHEN_REPORTED, "An image could not be pulled for half a minute.",
        "Check its name, its tag and the pull secret.",
    )  # fmt: skip
    CONTAINER_CANNOT_START = (
        "ContainerCannotStart", "PodsReady", WARNING, WHEN_REPORTED, "The kubelet could not create a container for half a minute.",
        "The message names the missing ConfigMap, Secret or volume, or the command that does not exist.",
    )  # fmt: skip
    CONTAINER_ENDED = (
        "ContainerEnded", "PodsReady", WARNING, WHEN_REPORTED,
        "The agent's container ended by itself, an init container failed, or the node ended the pod.",
        "`kubectl logs POD`; the message has the exit code.",
    )  # fmt: skip
    NO_SCHEDULER = (
        "NoScheduler", "PodsReady", WARNING, WHEN_REPORTED, "No scheduler has processed a pod for half a minute.",
        "Start the scheduler that the template's `schedulerName` names, or change the name.",
    )  # fmt: skip
    UNSCHEDULABLE = (
        "Unschedulable", "the message of Created and Scaling", INFO, NEVER, "The scheduler finds no node for a pod.",
        "Add nodes, or lower the pods' requests.",
    )  # fmt: skip

    # ---- Scaling
    AT_MAXIMUM = "AtMaximum", "Scaling", INFO, NEVER, "As many replicas train as are allowed."
    GROWING = "Growing", "Scaling", INFO, NEVER, "More replicas are ready; the job grows at the time in the message."
    WARMING_UP = (
        "WarmingUp",
        "Scaling",
        INFO,
        NEVER,
        "New replicas import the modules that their workers need, or start their workers ahead; training continues meanwhile.",
    )
    LIMIT_REACHED = (
        "LimitReached", "Scaling", INFO, NEVER, "The API server refuses further pods; the job would grow.",
        "Raise the quota, or lower the maximum; the operator retries by itself.",
    )  # fmt: skip
    WAITING_FOR_CAPACITY = (
        "WaitingForCapacity", "Scaling", INFO, NEVER, "Pods for a larger size have no node yet; the message quotes the scheduler.",
        "Add nodes, or lower the maximum.",
    )  # fmt: skip
    NOT_WORTHWHILE = (
        "NotWorthwhile", "Scaling", INFO, NEVER, "Growing now would cost more time than it gains.",
        "`spec.elastipod.payback: Off` lets the job always grow.",
    )  # fmt: skip
    NO_SPARE_CAPACITY = (
        "NoSpareCapacity", "Scaling", INFO, NEVER,
        "The job grows on nodes that exist only (`growth: SpareCapacityOnly`), and none has room for the next size.",
        "Nothing, or `spec.elastipod.growth: NextIncrement`, which lets an autoscaler add nodes.",
    )  # fmt: skip

    # ---- Warning
    SPEC_WARNING = (
        "SpecWarning",
        "Warning",
        WARNING,
        WHEN_REPORTED,
        "A setting has no effect, or not the one it seems to have.",
        "The message names it.",
    )
    TOPOLOGY_IGNORED = (
        "TopologyIgnored", "Warning", WARNING, WHEN_REPORTED, "Kueue's topology annotation is on the job only.",
        "Move it to `spec.replicaSpecs[].template.metadata.annotations`.",
    )  # fmt: skip
    EDITS_PENDING = (
        "EditsPending",
        "Warning",
        WARNING,
        WHEN_REPORTED,
        "An edit has not taken effect yet.",
        "Suspend and resume the job.",
    )
    RECORD_IGNORED = (
        "RecordIgnored", "Warning", WARNING, WHEN_REPORTED,
        "Annotations of the operator were copied from another object or written by hand; they are ignored and replaced.",
        "Leave `elastipod.io/state`, `applied` and `history` out of exported manifests.",
    )  # fmt: skip
    RECORD_OF_NEWER_OPERATOR = (
        "RecordOfNewerOperator", "Warning", ERROR, WHEN_REPORTED,
        "A newer operator wrote the job's state record; this one leaves the job alone. Training continues.",
        "Upgrade the operator again.",
    )  # fmt: skip
    OPERATOR_ERROR = (
        "OperatorError", "Warning", ERROR, HAPPENS,
        "A bug of the operator affects this job. Workers continue training, but nothing is recovered or resized meanwhile.",
        "Report it with the operator's log; other jobs are not affected.",
    )  # fmt: skip
    PODS_NOT_DELETED = (
        "PodsNotDeleted", "Warning", ERROR, WHEN_REPORTED, "Pods that must go are still there; the message says what holds them up.",
        "Give the operator permission to delete pods, or repair the node or webhook that the message names.",
    )  # fmt: skip
    ANSWER_REFUSED = (
        "AnswerRefused", "Warning", WARNING, WHEN_REPORTED, "An agent reports more than the operator accepts.",
        "Make the workers leave less data for each other (`hyperpod_send_data`).",
    )  # fmt: skip
    EVICTION_OVERDUE = (
        "EvictionOverdue", "Warning", ERROR, WHEN_REPORTED,
        "Kueue has evicted a Workload, and pods that should have ended still use its quota.",
        "The message names pods and nodes. If a node is gone for good, delete it.",
    )  # fmt: skip
    QUOTA_NOT_RETURNED = (
        "QuotaNotReturned", "Warning", ERROR, WHEN_REPORTED, "The job's quota cannot be returned; the message quotes the API server.",
        "Restore Kueue, or the operator's permissions.",
    )  # fmt: skip
    QUEUE_MISSING = (
        "QueueMissing",
        "Warning",
        ERROR,
        WHEN_REPORTED,
        "The LocalQueue or its ClusterQueue does not exist.",
        "Create it, or name another queue.",
    )
    QUEUE_STOPPED = (
        "QueueStopped",
        "Warning",
        WARNING,
        WHEN_REPORTED,
        "The queue admits nothing: its `stopPolicy` is set.",
        "Set it to `None`.",
    )
    QUEUE_INACTIVE = (
        "QueueInactive",
        "Warning",
        WARNING,
        WHEN_REPORTED,
        "The queue admits nothing; the message quotes Kueue.",
        "Repair what Kueue names: a ResourceFlavor, an AdmissionCheck or a Topology that is missing.",
    )
    PREEMPTION_NEVER = (
        "PreemptionNever", "Warning", WARNING, WHEN_REPORTED, "The job's increments are never preempted for other jobs of its queue.",
        "Set `preemption.withinClusterQueue: LowerPriority`.",
    )  # fmt: skip
    STRICT_FIFO = (
        "StrictFIFO", "Warning", WARNING, WHEN_REPORTED, "Waiting increments block the Workloads behind them.",
        "Set `queueingStrategy: BestEffortFIFO`.",
    )  # fmt: skip
    PRIORITY_CLASS_MISSING = (
        "PriorityClassMissing",
        "Warning, Suspended",
        ERROR,
        WHEN_REPORTED,
        "The priority class does not exist.",
        "Create it.",
    )
    PRIORITY_REFUSED = (
        "PriorityRefused", "Warning", WARNING, WHEN_REPORTED,
        "The API server refuses the edited priority, or another client reverts it.",
        "Give the operator the permission, or find out who writes Workloads.",
    )  # fmt: skip
    PRIORITY_PENDING = (
        "PriorityPending", "Warning", WARNING, WHEN_REPORTED, "Kueue refuses another kind of priority class while the job has quota.",
        "Suspend and resume the job.",
    )  # fmt: skip

    # ---- problems with quota, while the job is suspended or an increment waits
    KUEUE_UNAVAILABLE = (
        "KueueUnavailable",
        "Suspended, Scaling",
        ERROR,
        NEVER,
        "Kueue, or the API server, does not answer.",
        "Restore Kueue.",
    )
    WORKLOAD_REFUSED = (
        "WorkloadRefused",
        "Suspended, Scaling",
        ERROR,
        NEVER,
        "The API server refuses a Workload.",
        "The message quotes the API server.",
    )
    POD_PLACEMENT_FAILED = (
        "PodPlacementFailed", "Suspended, Scaling", ERROR, NEVER, "Pods cannot be placed where Kueue granted quota.",
        "The message names the ResourceFlavor or label.",
    )  # fmt: skip

    # ---- causes of faults
    POD_FAILED = (
        "PodFailed", CAUSE, WARNING, HAPPENS,
        "The agent's container ended; the message has its exit code and last output. It counts as a retry.",
        "`kubectl logs POD -c CONTAINER --previous`, or your log collection.",
    )  # fmt: skip
    POD_LOST = "PodLost", CAUSE, WARNING, HAPPENS, "A pod of the job is gone.", "Find out who deletes pods."
    POD_DELETED = (
        "PodDeleted", CAUSE, WARNING, HAPPENS, "A pod is being deleted; its workers save a checkpoint first.",
        "Find out who deletes pods, if it was not you: the operator creates another.",
    )  # fmt: skip
    POD_DISRUPTED = (
        "PodDisrupted", CAUSE, WARNING, HAPPENS, "A pod is evicted or preempted; its workers save a checkpoint first.",
        "Nothing, if its node is drained on purpose or other pods may go first; otherwise see the pod's condition DisruptionTarget.",
    )  # fmt: skip
    POD_TERMINATING = (
        "PodTerminating", CAUSE, WARNING, HAPPENS, "The container of a pod was told to end (SIGTERM).",
        "See the pod's Events for who ended it.",
    )  # fmt: skip
    CONTAINER_RESTARTED = (
        "ContainerRestarted", CAUSE, WARNING, HAPPENS, "The agent's container ended and was restarted. It counts as a retry.",
        "`kubectl logs POD --previous`; the message has the exit code.",
    )  # fmt: skip
    AGENT_RESTARTED = (
        "AgentRestarted", CAUSE, WARNING, HAPPENS, "The agent in a container ended and was restarted. It counts as a retry.",
        "`kubectl logs POD`.",
    )  # fmt: skip
    AGENT_ENDED = (
        "AgentEnded", CAUSE, WARNING, HAPPENS, "The container still runs, but `hyperpodrun` in it has ended.",
        "Make the command end with the agent: `exec hyperpodrun ...` as its last line.",
    )  # fmt: skip
    GIVEN_UP = (
        "GivenUp", CAUSE, WARNING, HAPPENS, "The operator has given the pod up and replaces it.",
        "Check its node; the message says what was wrong with the pod.",
    )  # fmt: skip
    NODE_LOST = (
        "NodeLost",
        CAUSE,
        WARNING,
        HAPPENS,
        "A node does not answer. It does not count as a retry.",
        "Check the node.",
    )
    NODE_DELETED = (
        "NodeDeleted", CAUSE, WARNING, HAPPENS, "The node of a pod was deleted.",
        "Nothing, if an autoscaler or you removed it; the job continues with other nodes, or with fewer.",
    )  # fmt: skip
    NODE_OUT_OF_SERVICE = (
        "NodeOutOfService", CAUSE, WARNING, HAPPENS, "The node of a pod is tainted as out of service.",
        "Repair the node and remove the taint; the job continues without it.",
    )  # fmt: skip
    NODE_DRAINED = (
        "NodeDrained",
        CAUSE,
        INFO,
        HAPPENS,
        "A node is being drained, or its end is announced; the workers save a checkpoint first.",
    )
    NODE_CORDONED = "NodeCordoned", CAUSE, INFO, HAPPENS, "A node with a pod that does not train yet was cordoned."
    WORKER_FAULT = (
        "WorkerFault",
        CAUSE,
        WARNING,
        HAPPENS,
        "A worker failed, and its agent gives no reason that Kubernetes accepts.",
        "See the pod's log.",
    )
    MASTER_PORT_TAKEN = (
        "MasterPortTaken",
        CAUSE,
        WARNING,
        HAPPENS,
        "Another process has the port of global rank 0; the next generation uses another port.",
        "Nothing, if it happens once; otherwise find out what else listens on ports 10000 to 18990 of the nodes.",
    )
    START_NOT_TAKEN = (
        "StartNotTaken",
        CAUSE,
        WARNING,
        HAPPENS,
        "An agent does not start its workers.",
        "See the pod's log.",
    )
    WORKERS_STOPPED = (
        "WorkersStopped",
        CAUSE,
        WARNING,
        HAPPENS,
        "Another client stopped the workers of a pod.",
        "Find out who calls the agents.",
    )
    RECORD_BEHIND = (
        "RecordBehind",
        CAUSE,
        WARNING,
        HAPPENS,
        "Workers run in a newer generation than the state record knows.",
        "Find out who writes the job's annotations.",
    )
    RECORD_LOST = (
        "RecordLost",
        CAUSE,
        WARNING,
        HAPPENS,
        "The state record was lost; the job starts again from its checkpoint.",
        "Find out who writes the job's annotations.",
    )

    # ---- causes of planned changes
    JOB_CREATED = "JobCreated", "history", INFO, NEVER, "The first start of the job."
    CAPACITY_AVAILABLE = "CapacityAvailable", PLANNED, INFO, HAPPENS, "More replicas are ready: the job grows."
    SCALED_BY_USER = "ScaledByUser", PLANNED, INFO, HAPPENS, "The allowed sizes were edited: the job shrinks."
    DRAINED_FROM_OUTSIDE = "DrainedFromOutside", PLANNED, INFO, HAPPENS, "Another client drained the workers."
    SPEC_EDITED = (
        "SpecEdited",
        "Suspended, Running, history",
        INFO,
        HAPPENS,
        "Sizes or a template were edited; the quota is requested again.",
    )
    QUOTA_LOST = "QuotaLost", PLANNED, INFO, HAPPENS, "Quota on which replicas ran is gone."
    QUOTA_RETURNED = "QuotaReturned", PLANNED, INFO, HAPPENS, "Quota that no allowed size can use was returned."
    ADMITTED = "Admitted", "", INFO, HAPPENS, "Kueue granted the quota of a suspended job: it starts."
    SUSPENDED = "Suspended", "history", INFO, HAPPENS, "The user suspended the job."

    # ---- Events alone
    STARTED = "Started", "", INFO, HAPPENS, "The first generation of the workers starts."
    RESIZED = "Resized", "", INFO, HAPPENS, "A generation of another size starts."
    RECOVERED = "Recovered", "", INFO, HAPPENS, "A generation starts after a fault."
    RESUMED = "Resumed", "", INFO, HAPPENS, "A generation starts after a suspension."
    RUNNING = "Running", "", INFO, HAPPENS, "All agents of a generation report that their workers run."
    DRAINING = "Draining", "", INFO, HAPPENS, "The workers save a checkpoint and stop."
    DRAIN_SHORTENED = (
        "DrainShortened",
        "",
        WARNING,
        HAPPENS,
        "A node goes earlier than the drain may take; the workers have less time to save.",
        "Save more often, or in memory, if the checkpoint does not fit into that time.",
    )
    EVENT_UNANSWERED = (
        "EventUnanswered", "", WARNING, HAPPENS, "No worker can notice a drain, so they are stopped at once.",
        "Call `elastic_event_detected()` in the training loop, or handle SIGUSR1.",
    )  # fmt: skip
    FULL_JOB_RESTART = (
        "FullJobRestart", "", WARNING, HAPPENS, "All pods are recreated, after too many restarts or because a worker asked for it.",
        "`status.latestFaultyPodInstanceList` names pods and nodes; check those nodes.",
    )  # fmt: skip
    FAILED_PODS_RECREATED = (
        "FailedPodsRecreated", "", WARNING, HAPPENS,
        "Pods are recreated whose workers failed again and again in place, or on an avoided node.",
        "Check their logs and nodes; if the new pods fail too, all pods are recreated.",
    )  # fmt: skip
    NODE_AVOIDED = (
        "NodeAvoided", "", WARNING, HAPPENS,
        "A node caused two faults. The pod that failed there leaves it, and new pods avoid it for `evalPeriodSeconds`.",
        "Check the node; if capacity is short, lower `maxNumRepeatOffendersToAvoid`.",
    )  # fmt: skip
    NODE_USED_AGAIN = (
        "NodeUsedAgain", "", WARNING, HAPPENS, "A node with repeated faults is used again: too few others had room for the minimum size.",
        "Add nodes, or check the node that the message names.",
    )  # fmt: skip
    PLACES_GIVEN_BACK = (
        "PlacesGivenBack", "", INFO, HAPPENS, "For two minutes, too few pods had a node for the minimum size or a whole increment.",
        "Nothing, if other jobs need the nodes; otherwise add nodes, or lower `minReplicas` or the increment.",
    )  # fmt: skip
    QUOTA_GIVEN_BACK = "QuotaGivenBack", "", INFO, HAPPENS, "Quota of increments was returned to the queue."
    SCALED_TO_ZERO = (
        "ScaledToZero", "", WARNING, HAPPENS, "`spec.replicas` was set to 0, which means no ceiling: the job grows.",
        "To stop it, set `spec.runPolicy.suspend: true`; to limit it, scale to a number.",
    )  # fmt: skip
    EDITS_TAKEN = (
        "EditsTaken",
        "",
        INFO,
        HAPPENS,
        "The template was edited before the first training: pods are recreated from it.",
    )
    JOB_KEPT = (
        "JobKept", "", INFO, HAPPENS, "`ttlSecondsAfterFinished` is 0, which keeps the job, as `hyp` expects.",
        "1 or more deletes the job that many seconds after its end.",
    )  # fmt: skip
    POD_FORCE_DELETED = (
        "PodForceDeleted", "", WARNING, HAPPENS,
        "No kubelet will end the pod: its node is deleted, out of service, or NotReady for longer than the grace period.",
        "Make sure that the node is down or drained: its containers may still run without their object.",
    )  # fmt: skip
    SIDECAR_STILL_RUNS = (
        "SidecarStillRuns", "", INFO, HAPPENS, "A container still ran one minute after the end of the job; its pod was deleted.",
        "Make the sidecar end with the job, or use a native sidecar.",
    )  # fmt: skip
    RECORD_NOT_WRITTEN = (
        "RecordNotWritten", "", ERROR, HAPPENS, "The API server refuses the state record. Nothing about the job is started or changed.",
        "Fix what the message quotes.",
    )  # fmt: skip
    STATUS_NOT_WRITTEN = (
        "StatusNotWritten",
        "",
        WARNING,
        HAPPENS,
        "The API server refuses the job's status.",
        "Fix what the message quotes.",
    )
    JOB_NOT_DELETED = (
        "JobNotDeleted",
        "",
        WARNING,
        HAPPENS,
        "The API server refuses to delete the finished job.",
        "Fix what the message quotes.",
    )


AnyReason = Reason | OpenReason
NO_REASON = OpenReason("")
ReasonAndMessage = tuple[AnyReason, str]
"""A reason, and the sentence that goes with it."""

_BY_VALUE = {reason.value: reason for reason in Reason}


def as_reason(text: str) -> AnyReason:
    """Give the reason for a text that was stored or comes from another party."""
    return _BY_VALUE.get(text) or OpenReason(text)


def writes_event_when_reported(reason: AnyReason) -> bool:
    """Whether a condition that newly has the reason is also reported as an Event."""
    return isinstance(reason, Reason) and reason.event is EventRule.WHEN_REPORTED
