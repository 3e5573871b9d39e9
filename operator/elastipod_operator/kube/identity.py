"""Whose annotations a job bears: a manifest that was exported with them and applied under another name brings another's. Pure.

Ours carry the job's UID, which nobody can know before the job is made. What an earlier operator wrote has none: it counts
where the status tells of an operator that looked at this very object, for a manifest brings no status along.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .reading import mapping, uid_of

Body = Mapping[str, Any]


def was_reconciled(body: Body) -> bool:
    """Whether an operator has looked at this object before."""
    return bool(mapping(body.get("status")))


def is_own(owner: str, body: Body) -> bool:
    """Whether what was written for this owner (a UID, or empty where that was not written) is this object's."""
    return owner == uid_of(body) or (not owner and was_reconciled(body))
