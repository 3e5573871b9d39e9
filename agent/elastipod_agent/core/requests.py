"""The request bodies of the control API, validated field by field. Unknown fields are ignored, for other implementations."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from elastipod.ipc.protocol import SERVED_BY_AGENT
from elastipod_agent.core.log_rules import LogRule, parse_log_rules

_MAX_RANK = 1 << 20
_LONGEST_STOP_S = 7 * 86400.0
# Spellings of booleans that clients of the original agent send.
_TRUE, _FALSE = ("true", "t", "yes", "y", "on", "1"), ("false", "f", "no", "n", "off", "0")


class BadBody(ValueError):
    """An invalid body; `field` is the path of the invalid field, empty for the body as a whole."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}" if field else problem)
        self.field = field
        self.problem = problem


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRequest:
    """The operator's facts about the job. ``rank`` is the group rank of the pod, among ``nnodes``.

    store_port: of the agent with group rank 0, if agents serve the store of the workers; None if one of these hosts it. is_early: the
    generation before still drains.
    """

    rank: int
    nnodes: int
    fault_count: int
    master_addr: str
    master_port: int
    log_rules: tuple[LogRule, ...] = ()
    ip_version: str | None = None
    rank_ips: tuple[Mapping[str, Any], ...] = ()
    worker_data: Any = None
    is_spare: bool = False
    generation: int | None = None
    store_port: int | None = None
    is_early: bool = False

    @property
    def store(self) -> str:
        """The host:port at which an agent serves the store; "" if none does."""
        return "" if self.store_port is None else f"{self.master_addr}:{self.store_port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRequest(UpdateRequest):
    """A request to run the workers. ``progress``: {prefix: {progressData, progressCount}}, the checkpoint to resume from."""

    progress: Mapping[str, Any] = field(default_factory=dict)

    @property
    def run_generation(self) -> int:
        """The generation of the run; derived from the fault count if the operator speaks the plain protocol."""
        return self.fault_count + 1 if self.generation is None else self.generation


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareRequest:
    """A request to start the workers ahead of the next generation. nnodes, generation: of the present one.

    store: where the present workers meet, whose state the new ones may follow: host:port of the store that one of them hosts, or
    SERVED_BY_AGENT and that of the agent that serves it; "" if the operator does not say.
    """

    nnodes: int
    generation: int | None = None
    store: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequest:
    """A request to end the workers. timeout_s: the time for a graceful stop; None for the agent's default.

    restart_mode: "" if the operator does not say. leaves: True if this pod goes afterwards, False if it stays, None if the operator
    does not say. next_start: what the agent carries out by itself once its workers have drained; None for none.
    """

    is_graceful: bool = False
    timeout_s: float | None = None
    restart_mode: str = ""
    generation: int | None = None
    leaves: bool | None = None
    next_start: StartRequest | None = None


def parse_start(body: object) -> StartRequest:
    """Read the body of /start. Raises BadBody."""
    fields = _object(body)
    progress = fields.get("progress")
    if progress is None:
        progress = {}
    if not isinstance(progress, Mapping):
        raise BadBody("progress", f"must be an object, not {_kind(progress)}")
    return StartRequest(**_update_fields(fields), progress=progress)


def parse_prepare(body: object) -> PrepareRequest:
    """Read the body of /prepare. Raises BadBody."""
    fields = _object(body)
    address = _text(fields, "master_addr")
    served = _store_port(fields)
    hosted = f"{address}:{_integer(fields, 'master_port', 1, 65535)}" if address else ""
    store = f"{SERVED_BY_AGENT}{address}:{served}" if address and served else hosted
    return PrepareRequest(nnodes=_integer(fields, "nnodes", 1, _MAX_RANK), generation=_generation(fields), store=store)


def parse_update(body: object) -> UpdateRequest:
    """Read the body of /update. Raises BadBody."""
    return UpdateRequest(**_update_fields(_object(body)))


def parse_stop(body: object) -> StopRequest:
    """Read the body of /stop; None (no body) is the plain hard stop. Raises BadBody."""
    if body is None:
        return StopRequest()
    fields = _object(body)
    timeout = fields.get("timeout")
    return StopRequest(
        is_graceful=_boolean(fields, "is_graceful"),
        timeout_s=None if timeout is None else _seconds("timeout", timeout),
        restart_mode=_text(fields, "restart_mode") or "",
        generation=_generation(fields),
        leaves=None if fields.get("leaves") is None else _boolean(fields, "leaves"),
        next_start=_next_start(fields),
    )


def _next_start(fields: Mapping[str, Any]) -> StartRequest | None:
    body = fields.get("next")
    if body is None:
        return None
    try:
        return parse_start(body)
    except BadBody as error:
        raise BadBody(f"next.{error.field}" if error.field else "next", error.problem) from error


def _update_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    nnodes = _integer(fields, "nnodes", 1, _MAX_RANK)
    is_spare = _boolean(fields, "spare", is_number_true=True)
    rank = _integer(fields, "rank", 0, _MAX_RANK)
    if rank >= nnodes and not is_spare:
        raise BadBody("rank", f"is {rank} but nnodes is {nnodes}; group ranks are 0 to nnodes - 1")
    master_addr = _text(fields, "master_addr")
    if not master_addr:
        raise BadBody("master_addr", "must be a non-empty string")
    if not master_addr.isprintable():
        raise BadBody("master_addr", "must be a host name or an address, without control characters")
    return {
        "rank": rank,
        "nnodes": nnodes,
        "fault_count": _integer(fields, "faultCount", 0, 1 << 40),
        "master_addr": master_addr,
        "master_port": _integer(fields, "master_port", 1, 65535),
        "log_rules": _log_rules(fields),
        "ip_version": _text(fields, "ipVersion"),
        "rank_ips": _rank_ips(fields),
        "worker_data": fields.get("worker_data"),
        "is_spare": is_spare,
        "generation": _generation(fields),
        "store_port": _store_port(fields),
        "is_early": _boolean(fields, "early"),
    }


def _object(body: object) -> Mapping[str, Any]:
    if not isinstance(body, Mapping):
        raise BadBody("", f"the body must be a JSON object, not {_kind(body)}")
    return body


def _integer(fields: Mapping[str, Any], name: str, low: int, high: int) -> int:
    if name not in fields:
        raise BadBody(name, "is required")
    value = fields[name]
    if isinstance(value, str) and re.fullmatch(r"\s*[+-]?[0-9]{1,20}\s*", value, re.ASCII):
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise BadBody(name, f"must be an integer, not {_kind(value)}")
    if not low <= value <= high:
        raise BadBody(name, f"is {value}; it must be between {low} and {high}")
    return value


def _generation(fields: Mapping[str, Any]) -> int | None:
    if fields.get("generation") is None:
        return None
    return _integer(fields, "generation", 1, 1 << 40)


def _store_port(fields: Mapping[str, Any]) -> int | None:
    return None if fields.get("store_port") is None else _integer(fields, "store_port", 1, 65535)


def _text(fields: Mapping[str, Any], name: str) -> str | None:
    value = fields.get(name)
    if value is None or isinstance(value, str):
        return value
    raise BadBody(name, f"must be a string, not {_kind(value)}")


def _boolean(fields: Mapping[str, Any], name: str, *, is_number_true: bool = False) -> bool:
    """Parse true or false, or one of the usual spellings. is_number_true: any number but 0 is true as well."""
    value = fields.get(name)
    if value is None:
        return False
    if isinstance(value, bool | int | float) and (value in (0, 1) or (is_number_true and isinstance(value, int))):
        return bool(value)
    if isinstance(value, str) and value.strip().lower() in (*_TRUE, *_FALSE):
        return value.strip().lower() in _TRUE
    raise BadBody(name, f"must be true or false, not {_kind(value)}")


def _seconds(name: str, value: object) -> float:
    """Parse a duration. A value that is too large is cut, because a stop must not fail for it."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            value = None
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise BadBody(name, f"must be a number of seconds, not {_kind(value)}")
    return float(min(max(0, value), _LONGEST_STOP_S))


def _log_rules(fields: Mapping[str, Any]) -> tuple[LogRule, ...]:
    name = "log_monitoring_configuration"
    rules = fields.get(name)
    if rules is None:
        return ()
    try:
        return parse_log_rules(rules)
    except ValueError as error:
        raise BadBody(name, str(error)) from error


def _rank_ips(fields: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    value = fields.get("rankIps")
    if value is None:
        return ()
    if not isinstance(value, list):
        raise BadBody("rankIps", f"must be a list, not {_kind(value)}")
    for index, entry in enumerate(value):
        if not isinstance(entry, Mapping):
            raise BadBody(f"rankIps.{index}", f"must be an object, not {_kind(entry)}")
    return tuple(value)


def _kind(value: object) -> str:
    names = {type(None): "null", bool: "a boolean", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), "a number")
