"""Names, labels, annotations and ports: the deterministic identities that make every write repeatable."""

from __future__ import annotations

import re
from hashlib import sha256
from typing import NamedTuple

from .sizes import MAX_REPLICAS

GROUP = "sagemaker.amazonaws.com"
VERSION = "v1"
PLURAL = "hyperpodpytorchjobs"
KIND = "HyperPodPyTorchJob"
API_VERSION = f"{GROUP}/{VERSION}"
CRD_NAME = f"{PLURAL}.{GROUP}"
FINALIZER = "elastipod.io/finalizer"
FIELD_MANAGER = "elastipod-operator"

LABEL_JOB = "HPJob"
LABEL_UID = "elastipod.io/job-uid"
LABEL_SPEC = "elastipod.io/spec"
LABEL_ORDINAL = "elastipod.io/ordinal"
LABEL_INCARNATION = "elastipod.io/incarnation"
LABEL_GENERATION = "elastipod.io/generation"

# On a job: the name of the controller that runs it. On a leader lease: which jobs the release runs.
ANNOTATION_CONTROLLER = "elastipod.io/controller"
ANNOTATION_SCOPE = "elastipod.io/scope"
ANNOTATION_STATE = "elastipod.io/state"
ANNOTATION_SIZE = "elastipod.io/size"
ANNOTATION_HISTORY = "elastipod.io/history"
ANNOTATION_STEP = "elastipod.io/step"
ANNOTATION_STEP_AT = "elastipod.io/step-at"
ANNOTATION_ETA = "elastipod.io/eta"
ANNOTATION_CHECKPOINT = "elastipod.io/checkpoint"
ANNOTATION_DRAIN_ON_DELETE = "elastipod.io/drain-on-delete"
ANNOTATION_APPLIED = "elastipod.io/applied"
# On a job: what the operator's nodeSignals say, for those who explain the job.
ANNOTATION_NODE_SIGNALS = "elastipod.io/node-signals"
ANNOTATION_AVOIDS = "elastipod.io/avoids"
ANNOTATION_ONLY_ON = "elastipod.io/only-on"
# On a pod: how many pods of its slot in a row have failed before it without training; absent: as many as its incarnation.
ANNOTATION_FAILURES_BEFORE = "elastipod.io/failures-before"

# Kueue's own (docs/design/queues.md).
LABEL_QUEUE = "kueue.x-k8s.io/queue-name"
LABEL_QUEUE_PRIORITY = "kueue.x-k8s.io/priority-class"
ANNOTATION_WORKLOAD = "kueue.x-k8s.io/workload"
LABEL_INCREMENT = "elastipod.io/share"

DEFAULT_AGENT_PORT = 8080
# Variables that the agent's container of every pod has: the user's where the template has them, else the operator's.
JOB_ENV, RUN_ID_ENV, POD_ENV = "ELASTIPOD_JOB", "ELASTIPOD_RUN_ID", "ELASTIPOD_POD"
AGENT_PORT_ENV = "ELASTIPOD_AGENT_PORT"

ENDS_IN_NUMBER = re.compile(r"(^|-)[0-9]+$")

# More replacements of one pod than this do not occur.
MAX_INCARNATION = 10**9


# Named tuples, because a decision about thousands of pods looks up tens of thousands of them.
class PodId(NamedTuple):
    """The identity of a pod in its job: its spec, its ordinal there, and how often that ordinal was recreated."""

    spec: str
    ordinal: int
    incarnation: int

    @property
    def slot(self) -> Slot:
        return Slot(self.spec, self.ordinal)

    def name(self, job: str) -> str:
        """Give the pod's name. It is always the same, so a repeated creation does no harm.

        The first pod of a slot is `<job>-<spec>-<ordinal>`; its replacements append their incarnation. If the name of the spec ends
        in a number, the incarnation is always present: otherwise pod 2 of spec `a-1` could be the second replacement of pod 1 of
        spec `a`. Names are never parsed: labels identify pods, also those of earlier versions, whose first ones end in `-0`.
        """
        first = f"{job}-{self.spec}-{self.ordinal}"
        return f"{first}-{self.incarnation}" if self.incarnation or ENDS_IN_NUMBER.search(self.spec) else first


class Slot(NamedTuple):
    """A place for one replica: a spec and an ordinal, whatever pod fills it."""

    spec: str
    ordinal: int


def pod_id_of(labels: dict[str, str]) -> PodId | None:
    """Read a pod's identity from its labels; None when they are not ours or were edited into nonsense."""
    try:
        ordinal, incarnation = int(labels[LABEL_ORDINAL]), int(labels[LABEL_INCARNATION])
        spec = labels[LABEL_SPEC]
    except (KeyError, ValueError):
        return None
    if not spec or not 0 <= ordinal < MAX_REPLICAS or not 0 <= incarnation <= MAX_INCARNATION:
        return None
    return PodId(spec, ordinal, incarnation)


def workload_name(job: str, uid: str, number: int) -> str:
    """Give the name of a job's Workload; number 0 is its base. It has at most 63 characters and is unique
    even among jobs that had the same name."""
    role = "base" if number == 0 else f"more-{number}"
    return f"{job[:40].rstrip('-.')}-{role}-{sha256(uid.encode()).hexdigest()[:5]}"


def master_port(generation: int) -> int:
    """Give the port on which global rank 0 of a generation opens the store.

    Consecutive generations use different ports, so a dying store cannot be mistaken for the new one. The distance of ten
    leaves room for code that opens MASTER_PORT + 1.
    """
    return 10000 + 10 * (generation % 900)
