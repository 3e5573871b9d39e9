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
FINALIZER = "elastipod.io/finalizer"
FIELD_MANAGER = "elastipod-operator"

LABEL_JOB = "HPJob"
LABEL_UID = "elastipod.io/job-uid"
LABEL_SPEC = "elastipod.io/spec"
LABEL_ORDINAL = "elastipod.io/ordinal"
LABEL_INCARNATION = "elastipod.io/incarnation"
LABEL_GENERATION = "elastipod.io/generation"

ANNOTATION_STATE = "elastipod.io/state"
ANNOTATION_SIZE = "elastipod.io/size"
ANNOTATION_HISTORY = "elastipod.io/history"
ANNOTATION_DRAIN_ON_DELETE = "elastipod.io/drain-on-delete"
ANNOTATION_APPLIED = "elastipod.io/applied"
ANNOTATION_AVOIDS = "elastipod.io/avoids"

# Kueue's own (docs/design/queues.md).
LABEL_QUEUE = "kueue.x-k8s.io/queue-name"
LABEL_QUEUE_PRIORITY = "kueue.x-k8s.io/priority-class"
ANNOTATION_WORKLOAD = "kueue.x-k8s.io/workload"
LABEL_INCREMENT = "elastipod.io/share"

DEFAULT_AGENT_PORT = 8080

ENDS_IN_NUMBER = re.compile(r"(^|-)[0-9]+$")

# More often no pod is replaced in the life of a cluster.
MAX_INCARNATION = 10**9


# Tuples, for a decision about thousands of pods looks them up by the ten thousand.
class PodId(NamedTuple):
    """Which replica of a job a pod is: its spec, its ordinal there, and how often that ordinal was made anew."""

    spec: str
    ordinal: int
    incarnation: int

    @property
    def slot(self) -> Slot:
        return Slot(self.spec, self.ordinal)

    def name(self, job: str) -> str:
        """Give the pod's name; the same every time, so creating it again is harmless.

        The first pod of a place is `<job>-<spec>-<ordinal>`, its replacements bear their incarnation after that. A spec whose own
        name ends in a number always has both numbers: otherwise pod 2 of spec `a-1` could be the second replacement of pod 1 of
        spec `a`. Nothing reads names: labels tell, also of pods of earlier versions, whose first ones ended in `-0`.
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
    """Give the name of a job's Workload: number 0 is its base. At most 63 characters, and none of a former job of that name."""
    role = "base" if number == 0 else f"more-{number}"
    return f"{job[:40].rstrip('-.')}-{role}-{sha256(uid.encode()).hexdigest()[:5]}"


def master_port(generation: int) -> int:
    """Give the port on which global rank 0 of a generation opens the store.

    Neighbouring generations never share a port, so a dying store cannot be taken for the new one; ten apart leaves room
    for code that opens MASTER_PORT + 1.
    """
    return 10000 + 10 * (generation % 900)
