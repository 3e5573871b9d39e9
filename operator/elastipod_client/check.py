"""The result of one check of `elastipod doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """How a check ended. UNKNOWN: the objects that it needs could not be read."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Check:
    """what: the object of the check. advice: what to do, a whole sentence; empty if there is nothing to do."""

    what: str
    verdict: Verdict
    message: str
    advice: str = ""


def ok(what: str, message: str) -> Check:
    return Check(what, Verdict.OK, message)


def warning(what: str, message: str, advice: str) -> Check:
    return Check(what, Verdict.WARNING, message, advice)


def error(what: str, message: str, advice: str) -> Check:
    return Check(what, Verdict.ERROR, message, advice)


def unknown(what: str, message: str) -> Check:
    return Check(what, Verdict.UNKNOWN, message)
