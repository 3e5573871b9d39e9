"""The HyperPodPyTorchJob resource: pydantic models, and the CRD and reference that are generated from them."""

from elastipod_operator.api.explain import explain
from elastipod_operator.api.job_status import (
    ConditionStatus,
    ElasticScalingStatus,
    FaultyPods,
    JobCondition,
    JobStatus,
    ObjectReference,
    RestartStatus,
    RestartType,
)
from elastipod_operator.api.models import (
    Backoff,
    CleanPodPolicy,
    ElasticPolicy,
    ElastipodOptions,
    HyperPodPyTorchJob,
    JobSpec,
    LogRule,
    Recovery,
    ReplicaSpec,
    RestartPolicy,
    RunPolicy,
    Switch,
    ThresholdOperator,
)
from elastipod_operator.core.names import API_VERSION, GROUP, KIND, PLURAL, VERSION

__all__ = [
    "API_VERSION",
    "GROUP",
    "KIND",
    "PLURAL",
    "VERSION",
    "Backoff",
    "CleanPodPolicy",
    "ConditionStatus",
    "ElasticPolicy",
    "ElasticScalingStatus",
    "ElastipodOptions",
    "FaultyPods",
    "HyperPodPyTorchJob",
    "JobCondition",
    "JobSpec",
    "JobStatus",
    "LogRule",
    "ObjectReference",
    "Recovery",
    "ReplicaSpec",
    "RestartPolicy",
    "RestartStatus",
    "RestartType",
    "RunPolicy",
    "Switch",
    "ThresholdOperator",
    "explain",
]
