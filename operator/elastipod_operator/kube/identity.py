"""Whether a job's annotations are its own: an exported manifest that is applied under another name contains those of another job. Pure.

The operator's annotations contain the job's UID, which is unknown before the job exists. Those of an earlier version contain
none: they count if the job has a status, because a manifest cannot set the status.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .reading import mapping, uid_of

Body = Mapping[str, Any]


def was_reconciled(body: Body) -> bool:
    """Whether an operator has reconciled this object before."""
    return bool(mapping(body.get("status")))


def is_own(owner: str, body: Body) -> bool:
    """Whether an annotation with this owner (a UID, or empty if it names none) belongs to this object."""
    return owner == uid_of(body) or (not owner and was_reconciled(body))
