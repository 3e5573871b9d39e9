"""Where this agent answers otherwise than the original, on purpose: each with its reason. One that no run needs fails the test."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from tests.e2e.original_script import ABSENT, Difference


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """A difference that is meant.

    step, field: shell patterns over "<lane> <step>" and the field. ours, original: the very values, where not any will
    do. codes: HTTP status of ours and of the original; then what follows from it is meant as well. reason: one sentence.
    """

    step: str
    reason: str
    field: str = "*"
    ours: Any = None
    original: Any = None
    codes: tuple[int, int] | None = None

    def covers(self, found: Difference) -> bool:
        """Tell whether it speaks of this difference."""
        return (
            fnmatchcase(found.step, self.step)
            and fnmatchcase(found.field, self.field)
            and self.ours in (None, found.ours)
            and self.original in (None, found.original)
            and self.codes in (None, found.codes)
        )


def _status(field: str, reason: str, *, step: str = "*", ours: Any = None, original: Any = None) -> Allowed:
    return Allowed(step=step, field=f"*.{field}", reason=reason, ours=ours, original=original)


def _refused(step: str, reason: str, code: int = 200) -> Allowed:
    """What we refuse, and the original takes or answers with another code."""
    return Allowed(step=step, reason=reason, codes=(422, code))


def _taken(step: str, reason: str, code: int = 422) -> Allowed:
    return Allowed(step=step, reason=reason, codes=(200, code))


STATUS = (
    _status(
        "spare",
        "We say what /start or /update said; the original always True without in-process restarts.",
        original="True",
    ),
    _status("spare", "So we show a change of it.", original=ABSENT),
    _status("reason", "A reason names what went wrong: nothing while RUNNING.", ours=ABSENT, original="Running"),
    _status(
        "reason", "A drain that ran out of time is told from one that did not.", ours="DrainTimedOut", original=ABSENT
    ),
    _status(
        "message",
        "A drain that ran out of time is described.",
        ours="str",
        original=ABSENT,
        step="running /stop: graceful, *",
    ),
    _status(
        "message",
        "A repeated /stop may shorten a drain, which then runs out of time.",
        ours="str",
        original=ABSENT,
        step="stopping /stop: graceful",
    ),
    _status("ipversion", "Noted from /update in every restart mode; the original's only in-process.", original=ABSENT),
    _status("assigned_rank", "Noted from /update in every restart mode, like ipversion.", step="* /update: *"),
    _status("assigned_rank", "It had been told by /update already.", step="fresh /start: plain", ours=ABSENT),
    _status(
        "assigned_rank",
        "A /start that starts nothing changes nothing.",
        step="* /start: another fault count",
        ours=ABSENT,
    ),
    _status("progress", "The checkpoint to resume from is shown until workers report another.", original=ABSENT),
    Allowed(
        step="*",
        field="env.NNODES",
        reason="It is the newest /start's, so that scripts see a resize; the original keeps the pod's.",
    ),
)
CALLS = (
    Allowed(
        step="* /start: as a spare",
        reason="A spare waits; the original starts its workers unless restarts are in-process.",
    ),
    Allowed(
        step="ready again /start: spare *",
        reason="As above, in all spellings of true.",
        field="starts",
        ours=0,
        original=1,
    ),
    Allowed(step="ready again /start: spare *", reason="It stays READY then.", field="after.status", ours="ready"),
    Allowed(
        step="stopping /stop: *",
        field="after.status",
        ours="ready",
        reason="A hard stop ends a drain at once, not at its end.",
    ),
    Allowed(
        step="stopping /shutdown",
        field="exit",
        ours=0,
        reason="An agent that is stopping its workers can leave as well.",
    ),
    _taken("running /stop: time 1.5", "Times need not be whole seconds."),
    _refused("running /stop: time true", "A boolean is no time; the original takes it for one second."),
)
BODIES = (
    _refused("*: no UTF-8", "Whatever cannot be read is 422; the original answers some of it with 400.", 400),
    _refused("*: deeply nested", "Whatever cannot be read is 422; the original answers some of it with 400.", 400),
    _refused("*: NaN", "NaN is no JSON; the original fails.", 500),
    _taken("*: JSON *", "The content type is not asked for, bodies are JSON; the original fails.", 500),
    Allowed(
        step="*",
        field="body.places",
        reason="A 422 names the first field at fault, and no place inside a text that is no JSON.",
    ),
    Allowed(step="* GET /status/", reason="Each path has one spelling.", codes=(404, 307)),
    _taken("*: spare None", "null stands for an absent optional field."),
    _taken("*: progress None", "null stands for an absent optional field."),
    _taken("*: rankIps *", "Addresses are not looked into before they are used."),
    _refused("*: * True", "A boolean is no number."),
    _refused("*: rank *", "A group rank is an integer from 0 to nnodes - 1: with another one nobody could train."),
    _refused("*: nnodes *", "There is at least one pod."),
    _refused("*: faultCount -1", "Faults are counted from 0."),
    _refused("*: master_port *", "Ports go from 1 to 65535; with another one the workers could only time out."),
    _refused(
        "*: log_monitoring_configuration *",
        "A rule that cannot be watched is refused by name; the original's never fires.",
    ),
)
ALLOWED = (*STATUS, *CALLS, *BODIES)


def unexplained(found: list[Difference]) -> list[Difference]:
    """Give the differences that no entry of the allow-list covers."""
    return [each for each in found if not any(allowed.covers(each) for allowed in ALLOWED)]
