"""Which step of a reconcile pass carries out which action.

| step | code |
|---|---|
| WRITE_RECORD | `kube/changes.py`, in the patch that writes the state record |
| CALL_AGENTS | `agents/command_builder.py`, `agents/commands.py` |
| RELEASE_QUOTA | `queueing/quota_release.py` |
| LIST_PODS, DELETE_JOB | `reconcile_pass.py` |
| REQUEST_QUOTA | `queueing/priorities.py`, `queueing/workload_creation.py` |
| SUPPLY_PODS | `pod_deletion.py`, `pod_creation.py` |
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from .core.actions import (
    Action,
    AssignSpare,
    CreatePod,
    CreateWorkload,
    DeleteJob,
    DeletePod,
    DeleteWorkload,
    FinishWorkload,
    ListPods,
    Plan,
    PrepareWorkers,
    ReleaseBaseQuota,
    SetFinalizer,
    SetPodsReady,
    SetQueueLabel,
    ShutDownAgent,
    StartWorkers,
    StopWorkers,
    UpdateWorkloadPriority,
)


class Step(StrEnum):
    """A step that carries out actions, in the order of a pass. SUPPLY_PODS runs beside the steps before it."""

    WRITE_RECORD = "write the record"
    CALL_AGENTS = "call agents"
    RELEASE_QUOTA = "release quota"
    LIST_PODS = "list pods"
    DELETE_JOB = "delete the job"
    REQUEST_QUOTA = "request quota"
    SUPPLY_PODS = "supply pods"


STEP_OF: Mapping[type[Action], Step] = {
    SetFinalizer: Step.WRITE_RECORD,
    SetQueueLabel: Step.WRITE_RECORD,
    StopWorkers: Step.CALL_AGENTS,
    StartWorkers: Step.CALL_AGENTS,
    AssignSpare: Step.CALL_AGENTS,
    PrepareWorkers: Step.CALL_AGENTS,
    ShutDownAgent: Step.CALL_AGENTS,
    DeleteWorkload: Step.RELEASE_QUOTA,
    ReleaseBaseQuota: Step.RELEASE_QUOTA,
    FinishWorkload: Step.RELEASE_QUOTA,
    SetPodsReady: Step.RELEASE_QUOTA,
    ListPods: Step.LIST_PODS,
    DeleteJob: Step.DELETE_JOB,
    UpdateWorkloadPriority: Step.REQUEST_QUOTA,
    CreateWorkload: Step.REQUEST_QUOTA,
    DeletePod: Step.SUPPLY_PODS,
    CreatePod: Step.SUPPLY_PODS,
}


def has_actions(step: Step, todo: Plan) -> bool:
    """Whether a plan has actions for a step."""
    return any(STEP_OF[type(action)] is step for action in todo.actions)
