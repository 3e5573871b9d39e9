"""The text of an agent's status, for people: what `elastipod agent status` prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from elastipod_agent.authentication import Credentials
from elastipod_agent.core.checkpoint_series import NOTHING_COMPLETE

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class AgentAddress:
    """The address of the agent, and the credentials to call it."""

    host: str
    port: int
    credentials: Credentials


def describe(status: Json, target: AgentAddress, now: float) -> Iterator[str]:
    """Give the lines to show; what the agent does not report is left out. now: Unix seconds."""
    details = _mapping(status.get("details"))
    for name, text in _parts(status, details, target, now):
        first, *others = [_plain(line) for line in text.splitlines()] or [""]
        yield f"{name:<11} {first}"
        yield from (f"{'':<11} {line}" for line in others)


def _parts(status: Json, details: Json, target: AgentAddress, now: float) -> Iterator[tuple[str, str]]:
    who = [details.get("job"), details.get("pod") and f"pod {details['pod']}", f"port {target.port}"]
    who.append(f"version {status.get('agent_version', 'unknown')}")
    yield "agent", ", ".join(str(part) for part in who if part)
    yield "state", _state(status, now)
    yield "generation", _generation(status, details)
    yield "workers", _workers(status, details)
    yield "training", _training(_mapping(status.get("worker")), now)
    yield "drain", _drain(status)
    yield "last fault", _fault(status, now)
    yield "checkpoint", _checkpoint(_mapping(status.get("progress")))


def _state(status: Json, now: float) -> str:
    state = str(status["status"])
    entered = _mapping(status.get("transitions")).get(state.upper())
    text = state
    if isinstance(entered, str) and (since := _unix(entered)) is not None:
        text += f" for {_span(now - since)} (since {_clock(since)})"
    if status.get("reason") and state != "faulted":
        text += f", {status['reason']}"
    if status.get("terminating"):
        text += "; the pod is being terminated (SIGTERM)"
    return text


def _generation(status: Json, details: Json) -> str:
    generation = status.get("generation")
    if not generation:
        return "none yet: the operator has not started workers here"
    parts = [str(generation)]
    if status.get("assigned_rank") is not None:
        parts.append(f"group rank {status['assigned_rank']} of {details.get('nnodes') or 'unknown'}")
    if str(status.get("spare")).lower() == "true":
        parts.append("held as a spare")
    if details.get("restarts"):
        parts.append(f"{_counted(details['restarts'], 'restart')} on this pod")
    return ", ".join(parts)


_PREPARATION = {
    "begun": "being prepared for the next generation",
    "ready": "prepared for the next generation",
    "failed": "could not be prepared for the next generation (see the log)",
}


def _workers(status: Json, details: Json) -> str:
    parts = []
    if details.get("nproc"):
        parts.append(f"{details['nproc']} on this pod")
    if details.get("nproc") and details.get("nnodes"):
        parts.append(f"world size {details['nproc'] * details['nnodes']}")
    starts = [
        f"{_counted(details[f'{kind}_starts'], f'{kind} start')}"
        for kind in ("warm", "cold")
        if details.get(f"{kind}_starts")
    ]
    parts += starts
    preparation = _PREPARATION.get(str(status.get("preparation")))
    if preparation:
        parts.append(preparation)
    if not details.get("is_warm", True):
        parts.append("warm starts are off")
    return ", ".join(parts) or "unknown"


def _training(worker: Json, now: float) -> str:
    if worker.get("step") is None:
        return "no step reported yet"
    parts = [f"step {worker['step']}"]
    if worker.get("samples") is not None:
        parts.append(f"{worker['samples']} samples")
    if worker.get("samples_per_s") is not None:
        parts.append(f"{worker['samples_per_s']:.4g} samples/s")
    if worker.get("loss") is not None:
        parts.append(f"loss {worker['loss']:.6g}")
    if worker.get("time"):
        parts.append(f"reported {_span(now - worker['time'])} ago")
    return ", ".join(parts)


def _drain(status: Json) -> str:
    if status.get("drained"):
        return "done: the workers saved a checkpoint and exited"
    if status.get("reason") == "DrainTimedOut":
        return "failed: the workers did not exit in time"
    return "stopping now" if status["status"] == "stopping" else "none"


def _fault(status: Json, now: float) -> str:
    failure = _mapping(status.get("failure"))
    if not failure:
        message = status.get("message")
        return (
            f"{status.get('reason') or 'unknown'}: {message or 'no message'}"
            if status["status"] == "faulted"
            else "none"
        )
    when = _unix(str(failure.get("time")))
    ago = f", {_span(now - when)} ago ({_clock(when)})" if when is not None else ""
    return f"{status.get('reason') or 'fault'}{ago}\n{failure.get('message') or 'no message'}"


def _checkpoint(progress: Json) -> str:
    lines = [
        f"{prefix}: step {entry.get('progressCount', 'unknown')}, {entry.get('progressData', '')}"
        for prefix, entry in sorted(progress.items())
        if isinstance(entry, Mapping) and entry.get("progressCount") != NOTHING_COMPLETE
    ]
    return "\n".join(lines) or "none reported"


def _mapping(value: object) -> Json:
    return value if isinstance(value, Mapping) else {}


def _counted(number: float, what: str) -> str:
    return f"{number:g} {what}{'' if number == 1 else 's'}"


def _unix(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return None


def _clock(unix: float) -> str:
    return f"{datetime.fromtimestamp(unix, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"


def _span(seconds: float) -> str:
    whole = max(0, round(seconds))
    if whole < 120:
        return f"{whole} s"
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if minutes < 120:
        return f"{minutes} min"
    return f"{hours} h {minutes % 60} min" if hours < 48 else f"{days} d {hours % 24} h"


def _plain(text: str) -> str:
    """Make worker output safe for the terminal."""
    return "".join(c if c.isprintable() else " " if c == "\t" else "?" for c in text)
