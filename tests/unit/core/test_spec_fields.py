"""Every field of the resource decides something, and a test is named that proves what."""

from __future__ import annotations

import copy
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
from tests.fields import DOCUMENT, ROOT, SPEC, STATUS, UNWRITTEN, document, leaves, status_names
from tests.unit.core.builders import pid, pod, trains

from elastipod_operator.agents.command_builder import CommandBuilder
from elastipod_operator.agents.polled_agent import Address
from elastipod_operator.agents.status_cache import AgentStatusCache
from elastipod_operator.api import JobSpec
from elastipod_operator.api.models import CleanPodPolicy
from elastipod_operator.core.actions import StartWorkers
from elastipod_operator.core.growth_mode import GrowthMode
from elastipod_operator.core.snapshot import ObservedAgent, ObservedJob
from elastipod_operator.kube.job_keys import JobKeys
from elastipod_operator.kube.job_policy import policy_of
from elastipod_operator.kube.pods import pod_manifest

CONTAINERS = [{"name": "train", "image": "train:1"}, {"name": "other", "image": "other:1"}]
RULE = {"name": "loss", "logPattern": "loss=([0-9.]+)"}
PLAIN: dict[str, Any] = {
    "nprocPerNode": "2",
    "replicaSpecs": [
        {"name": "workers", "replicas": 2, "maxReplicas": 8, "template": {"spec": {"containers": CONTAINERS}}}
    ],
    "elasticPolicy": {"minReplicas": 2, "maxReplicas": 8},
    "runPolicy": {"logMonitoringConfiguration": [RULE], "restartPolicy": {}},
    "elastipod": {"backoff": {}},
}
# Another value than the usual one for each field.
OTHERS: dict[str, Any] = {
    "nprocPerNode": "4",
    "replicas": 4,
    "replicaSpecs[].name": "pods",
    "replicaSpecs[].replicas": 3,
    "replicaSpecs[].maxReplicas": 6,
    "replicaSpecs[].spares": 1,
    "replicaSpecs[].template": {"spec": {"containers": [{"name": "train", "image": "train:2"}]}},
    "elasticPolicy.minReplicas": 1,
    "elasticPolicy.maxReplicas": 6,
    "elasticPolicy.replicaIncrementStep": 2,
    "elasticPolicy.replicaDiscreteValues": [2, 8],
    "elasticPolicy.scalingTimeoutInSeconds": 7,
    "elasticPolicy.gracefulShutdownTimeoutInSeconds": 7,
    "elasticPolicy.faultyScaleDownTimeoutInSeconds": 7,
    "runPolicy.activeDeadlineSeconds": 7,
    "runPolicy.startupDeadlineSeconds": 7,
    "runPolicy.faultDeadlineSeconds": 7,
    "runPolicy.cleanPodPolicy": "None",
    "runPolicy.jobMaxRetryCount": 7,
    "runPolicy.suspend": True,
    "runPolicy.ttlSecondsAfterFinished": 7,
    "runPolicy.logMonitoringConfiguration[].name": "speed",
    "runPolicy.logMonitoringConfiguration[].logPattern": "speed=([0-9.]+)",
    "runPolicy.logMonitoringConfiguration[].expectedStartCutOffInSeconds": 7,
    "runPolicy.logMonitoringConfiguration[].expectedRecurringFrequencyInSeconds": 7,
    "runPolicy.logMonitoringConfiguration[].stopPattern": "done",
    "runPolicy.logMonitoringConfiguration[].metricThreshold": 7.5,
    "runPolicy.logMonitoringConfiguration[].operator": "gt",
    "runPolicy.logMonitoringConfiguration[].metricEvaluationDataPoints": 7,
    "runPolicy.logMonitoringConfiguration[].faultOnMatch": True,
    "runPolicy.restartPolicy.evalPeriodSeconds": 7,
    "runPolicy.restartPolicy.numRestartBeforeFullJobRestart": 7,
    "runPolicy.restartPolicy.maxFullJobRestarts": 7,
    "runPolicy.restartPolicy.maxNumRepeatOffendersToAvoid": 7,
    "runPolicy.restartPolicy.scaleUpSnoozeTimeInSeconds": 7,
    "elastipod.minStableSeconds": 7,
    "elastipod.backoff.baseSeconds": 7,
    "elastipod.backoff.maxSeconds": 7,
    "elastipod.payback": "Off",
    "elastipod.growth": "SpareCapacityOnly",
    "elastipod.recovery": "Process",
    "elastipod.authentication": "Off",
    "elastipod.gracefulShutdownTimeoutInSeconds": 7,
    "elastipod.agentPort": 7777,
    "elastipod.container": "other",
    "elastipod.parallelism": 4,
}
CHANGES_NOTHING = {"runPolicy.workloadMode": "Custom"}
LATER = timedelta(seconds=7)
# What these values are to the core: a time or a budget that is taken for another one is another wish.
WISHES: dict[str, tuple[str, object]] = {
    "elasticPolicy.scalingTimeoutInSeconds": ("scaling_timeout", LATER),
    "elasticPolicy.gracefulShutdownTimeoutInSeconds": ("graceful_timeout", LATER),
    "elasticPolicy.faultyScaleDownTimeoutInSeconds": ("faulty_timeout", LATER),
    "runPolicy.activeDeadlineSeconds": ("active_deadline", LATER),
    "runPolicy.startupDeadlineSeconds": ("startup_deadline", LATER),
    "runPolicy.faultDeadlineSeconds": ("fault_deadline", LATER),
    "runPolicy.cleanPodPolicy": ("clean_pods", CleanPodPolicy.NONE),
    "runPolicy.jobMaxRetryCount": ("max_retries", 7),
    "runPolicy.suspend": ("suspend", True),
    "runPolicy.ttlSecondsAfterFinished": ("ttl", LATER),
    "runPolicy.restartPolicy.evalPeriodSeconds": ("eval_period", LATER),
    "runPolicy.restartPolicy.numRestartBeforeFullJobRestart": ("restarts_before_full", 7),
    "runPolicy.restartPolicy.maxFullJobRestarts": ("max_full_restarts", 7),
    "runPolicy.restartPolicy.maxNumRepeatOffendersToAvoid": ("max_offenders", 7),
    "runPolicy.restartPolicy.scaleUpSnoozeTimeInSeconds": ("snooze", LATER),
    "elastipod.minStableSeconds": ("min_stable", LATER),
    "elastipod.backoff.baseSeconds": ("backoff_base", LATER),
    "elastipod.backoff.maxSeconds": ("backoff_max", LATER),
    "elastipod.payback": ("payback", False),
    "elastipod.growth": ("growth", GrowthMode.SPARE_CAPACITY_ONLY),
    "elastipod.recovery": ("new_processes", True),
    "elastipod.authentication": ("has_key", False),
    "elastipod.gracefulShutdownTimeoutInSeconds": ("graceful_timeout", LATER),
    "elastipod.agentPort": ("agent_port", 7777),
    "elastipod.container": ("container", "other"),
}


class NoStatuses:
    """Agents that were never heard."""

    def fact(self, pod_uid: str) -> ObservedAgent:
        return ObservedAgent()

    def progress(self, pod_uids: object, generation: int = 0) -> dict[str, Any]:
        return {}

    def worker_data(self, pod_uids: object) -> list[Any]:
        return []


def outcome(spec: dict[str, Any]) -> tuple[object, ...]:
    """Give all that follows from a spec: what the core decides by, the pods, what agents are told, and the token."""
    policy = policy_of(JobSpec.model_validate(spec))
    fact = ObservedJob(
        namespace="team",
        name="job",
        uid="uid",
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
        policy=policy,
        has_finalizer=True,
    )
    first = pid(0, spec=spec["replicaSpecs"][0]["name"])
    manifest = pod_manifest(fact, spec, policy, first, 2)
    one = pod(first)
    commands = CommandBuilder(
        spec,
        {one.name: one},
        trains(members=(first,)),
        cast(AgentStatusCache, NoStatuses()),
        lambda p: Address("uid", p.ip, policy.agent_port),
    )
    order = commands.build(StartWorkers(one.name, 0))
    assert order is not None
    return policy, manifest, order.body, order.address, JobKeys((b"0123456789abcdef",)).of(fact)


def changed(path: str, value: object) -> dict[str, Any]:
    spec = copy.deepcopy(PLAIN)
    place: Any = spec
    *way, last = path.split(".")
    for name in way:
        place = place[name[:-2]][0] if name.endswith("[]") else place[name]
    place[last] = value
    return spec


@pytest.mark.parametrize("path", OTHERS)
def test_every_field_changes_what_is_decided_or_done(path: str) -> None:
    assert outcome(changed(path, OTHERS[path])) != outcome(PLAIN)


@pytest.mark.parametrize("path", WISHES)
def test_each_wish_is_taken_for_what_it_is_and_for_nothing_else(path: str) -> None:
    plain, other = (policy_of(JobSpec.model_validate(spec)) for spec in (PLAIN, changed(path, OTHERS[path])))
    differs = {
        f.name: getattr(other, f.name) for f in fields(other) if getattr(other, f.name) != getattr(plain, f.name)
    }
    assert differs == dict([WISHES[path]])


@pytest.mark.parametrize("path", CHANGES_NOTHING)
def test_what_is_accepted_and_changes_nothing(path: str) -> None:
    assert outcome(changed(path, CHANGES_NOTHING[path])) == outcome(PLAIN)
    assert "Accepted for compatibility" in (ROOT / "docs/api-reference.md").read_text(encoding="utf-8")


def test_what_does_not_do_what_it_seems_to_is_said() -> None:
    policy = policy_of(JobSpec.model_validate(changed("elastipod.recovery", "InMemory")))
    assert (policy.expects_memory, policy.new_processes) == (True, False)
    assert not policy_of(JobSpec.model_validate(PLAIN)).warnings


def test_no_field_is_left_out() -> None:
    fields = set(leaves(JobSpec))
    assert fields == SPEC.keys() == OTHERS.keys() | CHANGES_NOTHING.keys()
    assert set(status_names()) == {*STATUS, *UNWRITTEN}


@pytest.mark.parametrize("test", sorted({test for tests in (*SPEC.values(), *STATUS.values()) for test in tests}))
def test_the_proofs_exist(test: str) -> None:
    path, _, function = test.partition("::")
    assert f"def {function}(" in (ROOT / path).read_text(encoding="utf-8")


def test_the_document_is_current() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == document(), "run python -m tests.fields"
