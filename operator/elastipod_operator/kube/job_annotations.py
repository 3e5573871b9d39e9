"""The annotations that earlier reconcile passes wrote: the state record and the history."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from ..core.caches import limited_cache
from ..core.history import decode_history
from ..core.names import ANNOTATION_HISTORY, ANNOTATION_STATE
from ..core.record import Record
from ..core.record_codec import NewerRecordError, RecordError, decode
from .applied import any_applied_of
from .identity import is_own
from .reading import annotations_of, text

# Pods in cached records of all jobs together: about 100 bytes each.
RECORDED_PODS_KEPT = 200_000


def _pods_on_record(read: tuple[Record | None, str], text: str) -> int:
    """A short text may stand for thousands of pods."""
    record = read[0] or Record()
    return 64 + len(text) // 64 + len(record.members) + len(record.lost) + len(record.incarnations)


@limited_cache(RECORDED_PODS_KEPT, _pods_on_record)
def decode_record(written: str) -> tuple[Record | None, str, str]:
    """Read a record; gives also the reason to leave the job unmanaged, if any, and the UID of its job. No record if it is damaged."""
    try:
        record = decode(written)
    except NewerRecordError as error:
        return None, str(error), error.owner
    except RecordError:  # a user may write anything there
        return None, "", ""
    return record, "", record.owner


def record_of(body: Mapping[str, Any]) -> tuple[Record | None, str]:
    written = annotations_of(body).get(ANNOTATION_STATE)
    record, unmanaged, owner = decode_record(written) if written else (None, "", "")
    return (record, unmanaged) if is_own(owner, body) else (None, "")


def has_foreign_record(body: Mapping[str, Any]) -> bool:
    annotations = annotations_of(body)
    written, applied = annotations.get(ANNOTATION_STATE), any_applied_of(body)
    owners = [owner for _, owner in _starts(annotations.get(ANNOTATION_HISTORY, ""))]
    if written:
        record, unmanaged, owner = decode_record(written)
        owners += [owner] if record is not None or unmanaged else []
    if applied is not None:
        owners.append(text(applied.get("uid")))
    return not all(is_own(owner, body) for owner in owners)


def newest_generation(body: Mapping[str, Any]) -> int:
    starts = _starts(annotations_of(body).get(ANNOTATION_HISTORY, ""))
    return max((generation for generation, owner in starts if is_own(owner, body)), default=0)


@lru_cache(maxsize=512)
def _starts(history: str) -> tuple[tuple[int, str], ...]:
    """Give generation and owner of each start in a history."""
    return tuple((entry.generation, entry.owner) for entry in decode_history(history))
