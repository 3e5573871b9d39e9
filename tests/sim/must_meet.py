"""What the ordinary run of the simulator must have met at least once, beside every fault of the table.

A name is one of those under which a play notes what really happened (Watchman.met): an answer of the API server, an event
of a watch, a lie that was told, a condition or an Event that the job bore.
"""

from __future__ import annotations

API_SERVER = (
    "API: not there",
    "API: 409 of the record",
    "API: 409 of a pod",
    "API: 403 of a pod",
    "API: 410",
    "API: 429",
    "API: 5xx",
    "API: 5xx after the effect of a write",
    "API: answer lost of a write",
    "API: answer lost of a read",
    "watch: late",
    "watch: repeated",
    "watch: lost pod ADDED",
    "watch: lost pod MODIFIED",
    "watch: lost pod DELETED",
    "watch: lost job MODIFIED",
    "watch: lost node MODIFIED",
)
AGENTS = (
    "agent: answers late",
    "agent: lies nonsense",
    "agent: lies an older generation",
    "agent: lies a newer generation",
    "agent: lies an enormous generation",
    "agent: lies that workers failed",
    "agent: lies that its workers finished",
    "agent: lies that its workers are stopped",
    "agent: lies that its workers stand at a checkpoint",
    "call: late",
    "call: answer lost",
    "crash: WorkerCrash",
    "crash: WorkerUnhealthy",
    "crash: LogHang_loss",
    "crash: LogSlow_speed",
    "crash: LogFault_xid",
    "asks for local_process_level_restart",
    "asks for process_level_restart",
    "asks for job_level_restart",
    "in process: addresses told",
    "in process: worker data told",
    "in process: processes kept",
)
FIELDS = {
    "minReplicas, replicas": "Event: Started",
    "maxReplicas": "told: Scaling AtMaximum",
    "replicaIncrementStep": "Event: PlacesGivenBack",
    "scalingTimeoutInSeconds": "told: Scaling Growing",
    "gracefulShutdownTimeoutInSeconds": "told: Running Resizing",
    "faultyScaleDownTimeoutInSeconds": "shrinks after a fault",
    "spares": "a spare takes a place",
    "activeDeadlineSeconds": "failed: DeadlineExceeded",
    "startupDeadlineSeconds": "failed: StartupDeadlineExceeded",
    "faultDeadlineSeconds": "failed: FaultDeadlineExceeded",
    "cleanPodPolicy All": "cleanPodPolicy All",
    "cleanPodPolicy None": "cleanPodPolicy None",
    "cleanPodPolicy Running": "cleanPodPolicy Running",
    "cleanPodPolicy OnlyComplete": "cleanPodPolicy OnlyComplete",
    "jobMaxRetryCount": "failed: WorkerCrash",
    "suspend": "told: Suspended SuspendedByUser",
    "suspend, taken back": "Event: Resumed",
    "ttlSecondsAfterFinished": "ttlSecondsAfterFinished",
    "numRestartBeforeFullJobRestart": "Event: FullJobRestart",
    "maxNumRepeatOffendersToAvoid": "a pod avoids nodes",
    "payback": "told: Scaling NotWorthwhile",
    "edits that act later": "told: Warning EditsPending",
    "edits that cannot be used": "told: Warning InvalidSpec",
    "refused pods": "told: PodsReady PodsRefused",
    "what nobody may guess": "told: PodsReady OperatorCutOff",
}
"""Field of the resource -> what shows that it decided something."""

QUEUES = (
    "pod on quota",
    "evicts: increment for base",
    "evicts: increment for increment",
    "evicts: base for base",
    "quota: increment deleted after an eviction",
    "quota: base released after an eviction",
    "quota: base finished",
    "quota: the job is gone last",
    "waits while another job has the quota",
    "a gang finishes",
    "a gang gives way",
    "Event: QuotaGivenBack",
    "told: Suspended Preempted",
    "told: Suspended Queued",
    "told: Suspended KueueUnavailable",
    "told: Scaling Queued",
)
MUST_MEET = (*API_SERVER, *AGENTS, *FIELDS.values(), *QUEUES)
