"""All that a decision about one job rests on, as raw objects and answers: rich enough for every reader to find its fields."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

from tests.unit.kube.bodies import CREATED, JOB_UID, container, job_body, node_body, pod_body
from tests.unit.kube.mutations import SURROGATE, TOO_DEEP, at, mutated, nested, places
from tests.unit.kube.queue_bodies import workload_body

from elastipod_operator.core.history import HistoryEntry, encode_history
from elastipod_operator.core.names import ANNOTATION_APPLIED, ANNOTATION_HISTORY, ANNOTATION_STATE, FINALIZER, PodId
from elastipod_operator.core.reasons import OpenReason
from elastipod_operator.core.record import (
    FaultyReplica,
    NodeFaults,
    PartialGang,
    PhaseTimes,
    Record,
    RequeueBackoff,
    ResizeStatistics,
    RestartWindow,
    Transition,
    TransitionKind,
)
from elastipod_operator.core.record_codec import encode
from elastipod_operator.kube.applied import encode_applied

Body = dict[str, Any]
NOW = datetime(2026, 3, 1, 12, 10, tzinfo=UTC)
PODS = 4


@dataclass(slots=True)
class World:
    """One job with what belongs to it. answers: of agents, by pod name."""

    job: Body
    pods: list[Body]
    nodes: list[Body]
    workloads: list[Body]
    queues: dict[str, list[Body]]
    answers: dict[str, Any] = field(default_factory=dict)


def spec() -> Body:
    """Give a spec that uses most of what there is."""
    template = {
        "metadata": {"labels": {"team": "a"}, "annotations": {"note": "b", "kueue.x-k8s.io/podset-preferred-topology": "rack"}},
        "spec": {
            "containers": [
                {
                    "name": "train", "image": "train:1", "command": ["hyperpodrun"], "args": ["--nproc-per-node=2", "train.py"],
                    "env": [{"name": "A", "value": "b"}, {"name": "NPROC_PER_NODE", "value": "2"}],
                    "ports": [{"name": "agent", "containerPort": 8080}],
                    "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"nvidia.com/gpu": 2}},
                },
                {"name": "side", "image": "side:1"},
            ],
            "initContainers": [{"name": "first", "image": "i:1", "resources": {"requests": {"cpu": 1}}}],
            "tolerations": [{"key": "maintenance", "operator": "Exists", "effect": "NoExecute"}],
            "affinity": {
                "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": []}]}}
            },
            "nodeSelector": {"pool": "a"}, "hostNetwork": True, "priorityClassName": "high", "restartPolicy": "OnFailure",
        },
    }  # fmt: skip
    return {
        "nprocPerNode": "2",
        "replicaSpecs": [
            {"name": "workers", "replicas": 2, "maxReplicas": 3, "spares": 1, "template": template},
            {"name": "more", "replicas": 0, "maxReplicas": 2, "template": copy.deepcopy(template)},
        ],
        "elasticPolicy": {
            "minReplicas": 2, "maxReplicas": 5, "replicaIncrementStep": 1, "scalingTimeoutInSeconds": 30,
            "gracefulShutdownTimeoutInSeconds": 60, "faultyScaleDownTimeoutInSeconds": 10,
        },
        "runPolicy": {
            "cleanPodPolicy": "None", "jobMaxRetryCount": 3, "activeDeadlineSeconds": 86400, "ttlSecondsAfterFinished": 60,
            "logMonitoringConfiguration": [{"name": "r", "logPattern": "loss (\\d+)", "metricThreshold": 3.5, "operator": "gt"}],
            "restartPolicy": {
                "evalPeriodSeconds": 600, "numRestartBeforeFullJobRestart": 2, "maxFullJobRestarts": 1,
                "maxNumRepeatOffendersToAvoid": 1,
            },
        },
        "elastipod": {"minStableSeconds": 5, "backoff": {"baseSeconds": 5, "maxSeconds": 60}, "agentPort": 8080, "container": "train"},
    }  # fmt: skip


def record(rng: Random) -> Record:
    """Give a record with most parts set."""
    ago = NOW - timedelta(seconds=rng.choice((5, 40, 300)))
    begun = Transition(
        kind=rng.choice(list(TransitionKind)), cause=OpenReason("WorkerCrash"), message="it crashed", from_size=3, target_size=3,
        began_at=ago,
        detected_at=ago, deadline=ago + timedelta(seconds=60), graceful=rng.random() < 0.5,
    )  # fmt: skip
    return Record(
        generation=2,
        members=tuple(PodId("workers", n, 0) for n in range(3)),
        master_addr="10.0.0.1",
        transition=begun if rng.random() < 0.5 else None,
        lost=(PodId("more", 1, 0),),
        incarnations={PodId("more", 1, 0).slot: 0},
        window_since=ago,
        generation_began_at=ago,
        running_since=ago,
        resized_at=ago,
        recovered_at=ago,
        started_at=ago,
        first_pod_at=ago,
        restarts=2,
        retries=1,
        consecutive_failures=1,
        best_step=10,
        stalled_recoveries=1,
        failures_in_place=1,
        failed_in_place=(PodId("workers", 0, 0),),
        faults_without_step=1,
        step_at_fault=9,
        window=RestartWindow(1, ago, 1, 0),
        faulty_replicas=(FaultyReplica(PodId("workers", 0, 0), 0, "node-1"),),
        node_faults=(NodeFaults("node-2", 2, ago),),
        size_before_growth=2,
        resize_failures=1,
        resize_failed_at=ago,
        gang=PartialGang(ago, 1, 1, None),
        resize_began_at=ago,
        resize_statistics=ResizeStatistics(timedelta(seconds=3), ((2, timedelta(seconds=1)),)),
        suspended_time=timedelta(seconds=9),
        phase_times=PhaseTimes("training", ago, (("training", 5000),)),
        queue=rng.choice(("", "gpus")),
        requeue_backoff=RequeueBackoff(1, ago),
        outcome=rng.choice(("", "", "", "Completed")),
    )


def job(rng: Random) -> Body:
    """Give a job that has run for a while."""
    told = record(rng)
    entry = HistoryEntry(
        generation=2, from_size=2, to_size=3, kind=TransitionKind.RESIZE, cause=OpenReason("C"), at=NOW, detected_at=NOW
    )
    annotations = {
        ANNOTATION_STATE: encode(told), ANNOTATION_HISTORY: encode_history((entry,)), ANNOTATION_APPLIED: encode_applied(spec()),
        "elastipod.io/size": "3/3/5", "elastipod.io/drain-on-delete": rng.choice(("true", "false")),
    }  # fmt: skip
    conditions = [
        {"type": "Created", "status": "True", "reason": "Accepted", "message": "m", "lastTransitionTime": CREATED},
        {"type": "Running", "status": "True", "reason": "Training", "message": "m", "lastTransitionTime": CREATED},
    ]
    going: dict[str, Any] = {"deletionTimestamp": "2026-03-01T12:09:50Z"} if rng.random() < 0.2 else {}
    body = job_body(
        spec(), annotations=annotations if rng.random() < 0.9 else {}, finalizers=[FINALIZER],
        labels={"kueue.x-k8s.io/queue-name": "gpus"} if told.queue else {}, **going,
    )  # fmt: skip
    scaling = {"targetReplicas": {"workers": 3}, "podsScaled": True, "lastUpdated": CREATED}
    return body | {"status": {"conditions": conditions, "startTime": CREATED, "elasticScalingStatus": scaling}}


def pod(ordinal: int, rng: Random) -> Body:
    """Give a pod in one of the states that pods get into."""
    ended = {"exitCode": 1, "reason": "Error", "message": "boom"}
    states: list[Body] = [
        {"phase": "Running", "containerStatuses": [container(running={"startedAt": CREATED}), container("side", running={})]},
        {"phase": "Running", "containerStatuses": [container(terminated=ended), container("side", running={})]},
        {"phase": "Failed", "containerStatuses": [container(terminated=ended)], "reason": "Evicted", "message": "disk"},
        {"phase": "Failed", "initContainerStatuses": [container("first", terminated=ended)]},
        {"phase": "Pending", "containerStatuses": [container(waiting={"reason": "ErrImagePull", "message": "no"})]},
        {"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False", "message": "no room"}]},
        {"phase": "Running", "conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "Preempted"}]},
    ]  # fmt: skip
    status = {"podIP": f"10.0.0.{ordinal + 1}", **rng.choice((*states[:1] * 4, *states))}
    going: dict[str, Any] = {"deletionTimestamp": "2026-03-01T12:09:50Z"} if rng.random() < 0.1 else {}
    body = pod_body(ordinal, node=f"node-{ordinal % 3 + 1}", status=status, **going)
    body["metadata"]["annotations"] = {"elastipod.io/avoids": "node-2", "kueue.x-k8s.io/workload": ""}
    body["spec"]["containers"] = copy.deepcopy(spec()["replicaSpecs"][0]["template"]["spec"]["containers"])
    body["spec"]["containers"][0]["env"].append(
        {"name": "ELASTIPOD_TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "token"}}}
    )
    return body


def answer(rng: Random) -> Body:
    """Give an agent's answer."""
    return {
        "protocol": 1, "version": 5, "status": rng.choice(("ready", "running", "faulted", "completed", "stopping")),
        "generation": rng.choice((0, 1, 2, 3)), "reason": "WorkerCrash", "message": "it crashed", "drained": False,
        "failure": {"global_rank": 0, "local_rank": 0, "exitcode": 1, "signal": None, "message": "boom", "time": CREATED},
        "worker": {"step": 12, "samples": 100, "loss": 0.5}, "restartMode": "in_process_restart", "saving": False,
        "progress": {"elastipod": {"progressCount": 3, "path": "/a"}}, "worker_data": [{"rank": 0, "data": "x"}],
    }  # fmt: skip


def queues() -> dict[str, list[Body]]:
    """Give Kueue's objects behind the job's queue."""
    resources = [{"name": "cpu", "nominalQuota": "4", "borrowingLimit": "2", "lendingLimit": 1}]
    groups = [{"coveredResources": ["cpu"], "flavors": [{"name": "gpus", "resources": resources}]}]
    active = {"conditions": [{"type": "Active", "status": "False", "reason": "R", "message": "m"}]}
    return {
        "local": [{"metadata": {"name": "gpus", "namespace": "team"}, "spec": {"clusterQueue": "team"}, "status": active}],
        "cluster": [{
            "metadata": {"name": "team"}, "status": active,
            "spec": {"resourceGroups": groups, "preemption": {"withinClusterQueue": "LowerPriority"}},
        }],
    }  # fmt: skip


def sound_world(rng: Random) -> World:
    """Give a world in which nothing is odd."""
    taints = [
        {"key": "maintenance", "value": "v", "effect": "NoExecute"},
        {"key": "karpenter.sh/disrupted", "effect": "NoSchedule"},
    ]
    nodes = [
        node_body(f"node-{n}", ready=rng.choice(("True", "True", "False")), taints=rng.choice((None, taints)), labels={"rack": "1"})
        for n in range(1, 4)
    ]  # fmt: skip
    pods = [pod(ordinal, rng) for ordinal in range(PODS)]
    answers: dict[str, Any] = {p["metadata"]["name"]: answer(rng) for p in pods if rng.random() < 0.9}
    workloads = [workload_body(0, pods=3), workload_body(1, pods=1)] if rng.random() < 0.5 else []
    return World(job(rng), pods, nodes, workloads, queues(), answers)


# How often each part is hit: jobs are written by users, the others mostly by machines.
PARTS = ("job", "job", "job", "pods", "pods", "nodes", "workloads", "queues", "answers", "answers")


def odd_world(seed: int) -> World:
    """Give a world in which one to three parts were mutated, in one to four places each; the same for the same seed."""
    rng = Random(seed)
    world = sound_world(rng)
    for _ in range(rng.choice((1, 1, 2, 3))):
        part, changes = rng.choice(PARTS), rng.choice((1, 1, 2, 4))
        # Places deep in a spec are many: the upper ones are to have their turn, too.
        value = {part: getattr(world, part)}
        if rng.random() < 0.5:
            *path, key = rng.choice(places(value)[1:])
            at(value, tuple(path))[key] = mutated({"it": at(value, (*path, key))}, rng, changes).get("it")
        else:
            value = {part: mutated(value[part], rng, changes)}
        if type(value.get(part)) is type(getattr(world, part)):
            world = replace(world, **{part: value[part]})
        if part == "answers" and rng.random() < 0.2:
            world.answers = {
                name: {**a, "message": SURROGATE} if isinstance(a, Mapping) else a for name, a in world.answers.items()
            }
    if rng.random() < 0.03:
        whole = {part: getattr(world, part) for part in dict.fromkeys(PARTS)}
        *path, key = rng.choice([p for p in places(whole) if len(p) > 2])
        at(whole, tuple(path))[key] = nested(rng, TOO_DEEP)
    return world


__all__ = ["JOB_UID", "NOW", "World", "odd_world", "sound_world"]
