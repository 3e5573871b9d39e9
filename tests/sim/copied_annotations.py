"""What the operator has written to another job, and a manifest that was exported from that one brings along."""

from __future__ import annotations

import copy
from enum import Enum
from typing import Any

from tests.sim.kernel import EPOCH

from elastipod_operator.core.history import HistoryEntry, encode_history
from elastipod_operator.core.names import ANNOTATION_APPLIED, ANNOTATION_HISTORY, ANNOTATION_STATE, PodId
from elastipod_operator.core.reasons import OpenReason
from elastipod_operator.core.record import Record, TransitionKind
from elastipod_operator.core.record_codec import encode
from elastipod_operator.kube.applied import applied_annotation

OTHER_UID = "uid-of-another-job"
OTHER_IMAGE = "another-image"
GENERATION = 7


class Copied(Enum):
    """What the other job was doing."""

    TRAINING = "training"
    COMPLETED = "completed"
    FAILED = "failed"


def copied_annotations(copied: Copied, spec: dict[str, Any]) -> dict[str, str]:
    """Give the operator's annotations of a job with such a spec, but for its image."""
    other = copy.deepcopy(spec)
    for one in other["replicaSpecs"]:
        one["template"]["spec"]["containers"][0]["image"] = OTHER_IMAGE
    body = {"metadata": {"uid": OTHER_UID}, "spec": other}
    applied = applied_annotation(body, adopts_spec=True, room=1 << 18)
    assert applied is not None
    start = HistoryEntry(
        generation=GENERATION, from_size=1, to_size=2, kind=TransitionKind.RESIZE, cause=OpenReason("ReplicasReady"), at=EPOCH,
        detected_at=EPOCH, owner=OTHER_UID,
    )  # fmt: skip
    return {
        ANNOTATION_STATE: encode(_record(copied, other["replicaSpecs"][0]["name"])),
        ANNOTATION_HISTORY: encode_history((start,)),
        ANNOTATION_APPLIED: applied,
    }


def _record(copied: Copied, spec: str) -> Record:
    ended = {Copied.COMPLETED: "Completed", Copied.FAILED: "Failed"}.get(copied, "")
    return Record(
        generation=GENERATION, members=tuple(PodId(spec, ordinal, 3) for ordinal in range(2)), owner=OTHER_UID,
        accepted_at=EPOCH, started_at=EPOCH, running_since=EPOCH, outcome=ended, outcome_reason=OpenReason(ended),
        ended_at=EPOCH if ended else None,
    )  # fmt: skip
