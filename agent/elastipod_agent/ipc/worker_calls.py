"""The calls of the socket: validated field by field, then passed to the coordinator (docs/design/contracts.md, 11)."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from elastipod.ipc.protocol import FOLLOWED_STORE_ENV, MAX_WAIT_S, PROTOCOL, CheckpointType, RestartMode
from elastipod_agent.core.inprocess_restart import StateKind
from elastipod_agent.ipc.run_coordinator import RunCoordinator

MAX_LABELS = 64
_MAX_NAME = 256
_MAX_PREFIX = 1024
_MAX_PATH = 4096
_MAX_TEXT = 4000
_MAX_DEPTH = 100  # of data; parsers that meet it in /status and in each /start give up at some depth
_STALE = {"is_stale": True}

Fields = Mapping[str, Any]


class BadCall(ValueError):
    """An invalid call of a worker; the text is one sentence."""


class WorkerCalls:
    """Answers the calls of workers."""

    def __init__(self, coordinator: RunCoordinator) -> None:
        self._coordinator = coordinator
        self._waiting: dict[str, Callable[[int, Fields], Awaitable[bytes]]] = {
            "barrier": self._barrier,
            "fault": self._fault,
            "rank_info": self._rank_info,
        }
        self._noting: dict[str, Callable[[int, Fields], Fields | None]] = {
            "hello": self._hello,
            "began": self._began,
            "past_barrier": self._past_barrier,
            "keep": self._keep,
            "data": self._data,
            "send_fault": self._send_fault,
            "labels": self._labels,
            "series": self._series,
            "checkpoint": self._checkpoint,
            "latest": self._latest,
        }

    async def answer(self, call: Fields) -> bytes:
        """Answer one call with a JSON object without a line end; cancelled if the worker disconnects. Raises BadCall."""
        if call.get("v") != PROTOCOL:
            raise BadCall(f"protocol {call.get('v')!r} is not supported; this agent supports {PROTOCOL}")
        local_rank = _integer(call, "local_rank")
        if not 0 <= local_rank < self._coordinator.nproc:
            raise BadCall(f"local rank {local_rank} is outside of this pod's 0..{self._coordinator.nproc - 1}")
        name = str(call.get("call"))
        if name in self._waiting:
            return await self._waiting[name](local_rank, call)
        if name not in self._noting:
            raise BadCall(f"there is no call {name!r}")
        return json.dumps(self._noting[name](local_rank, call) or {}).encode()

    async def _barrier(self, local_rank: int, call: Fields) -> bytes:
        has_left = call.get("has_left") is True
        return await self._coordinator.wait_start(local_rank, _integer(call, "after"), _wait_s(call), has_left=has_left)

    async def _fault(self, local_rank: int, call: Fields) -> bytes:
        return await self._coordinator.wait_fault(local_rank, _integer(call, "after"), _wait_s(call))

    async def _rank_info(self, local_rank: int, call: Fields) -> bytes:
        return await self._coordinator.wait_rank_info(local_rank, _integer(call, "after"), _wait_s(call))

    def _hello(self, local_rank: int, call: Fields) -> Fields:
        return {"run": self._coordinator.known_run(local_rank), "now": self._coordinator.run}

    def _began(self, local_rank: int, call: Fields) -> None:
        self._coordinator.note_run(local_rank, _integer(call, "run"))

    def _past_barrier(self, local_rank: int, call: Fields) -> None:
        self._coordinator.note_run(local_rank, _integer(call, "run"), is_past=True)

    def _keep(self, local_rank: int, call: Fields) -> Fields:
        try:
            kind = StateKind(call.get("kind"))
        except ValueError as error:
            raise BadCall(f"kind must be {' or '.join(kind.value for kind in StateKind)}") from error
        self._coordinator.announce(local_rank, kind)
        store = self._coordinator.followed_store
        return {"env": self._coordinator.keep_env | ({FOLLOWED_STORE_ENV: store} if store else {})}

    def _data(self, local_rank: int, call: Fields) -> Fields | None:
        if _integer(call, "run") != self._coordinator.run:
            return _STALE
        data = call.get("data")
        if _is_deeper(data, _MAX_DEPTH):
            raise BadCall(f"data is nested deeper than {_MAX_DEPTH} lists or objects")
        self._coordinator.store_data(local_rank, data)
        return None

    def _send_fault(self, local_rank: int, call: Fields) -> Fields | None:
        reason, message = (
            _text(call, "reason", _MAX_NAME),
            _text(call, "message", _MAX_TEXT),
        )  # cut to size: the fault counts all the same
        try:
            mode = RestartMode(call.get("restart_mode"))
        except ValueError as error:
            raise BadCall(str(error)) from error
        if _integer(call, "run") != self._coordinator.run or not self._coordinator.is_running:
            return _STALE
        self._coordinator.report_fault(local_rank, mode, reason, message)
        return None

    def _labels(self, local_rank: int, call: Fields) -> None:
        labels = call.get("labels")
        if not isinstance(labels, dict) or len(labels) > MAX_LABELS:
            raise BadCall(f"labels must be an object of at most {MAX_LABELS} names")
        self._coordinator.store_labels(local_rank, {name: str(value)[:_MAX_NAME] for name, value in labels.items()})

    def _series(self, local_rank: int, call: Fields) -> None:
        expected = call.get("expected")
        if not isinstance(expected, dict) or not all(isinstance(count, int) for count in expected.values()):
            raise BadCall("expected must give a number for each part of a checkpoint")
        try:
            counts = {CheckpointType(kind).value: count for kind, count in expected.items()}
            self._coordinator.checkpoints.expect(_prefix(call), counts)
        except ValueError as error:
            raise BadCall(str(error)) from error

    def _checkpoint(self, local_rank: int, call: Fields) -> None:
        self._series(local_rank, call)
        step, path = _integer(call, "step"), _text(call, "path")
        if path is not None and len(path) > _MAX_PATH:
            raise BadCall(f"path has {len(path)} characters; at most {_MAX_PATH} are allowed")
        try:
            kind = CheckpointType(call.get("type")).value
            self._coordinator.report_checkpoint(local_rank, _prefix(call), step, path, kind)
        except ValueError as error:
            raise BadCall(str(error)) from error

    def _latest(self, local_rank: int, call: Fields) -> Fields:
        return {"path": self._coordinator.checkpoints.latest(_prefix(call))}


def _is_deeper(value: Any, limit: int) -> bool:
    """Tell whether a value has more lists and objects within each other than that."""
    level = [value]
    for _ in range(limit):
        insides = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level = [inner for inside in insides for inner in inside]
    return any(isinstance(each, dict | list) for each in level)


def _integer(call: Fields, name: str) -> int:
    value = call.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadCall(f"{name} must be an integer")
    return value


def _text(call: Fields, name: str, limit: int | None = None) -> str | None:
    value = call.get(name)
    if value is None or isinstance(value, str):
        return None if value is None else value[:limit]
    raise BadCall(f"{name} must be a string")


def _wait_s(call: Fields) -> float:
    value = call.get("wait_s")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_WAIT_S:
        raise BadCall(f"wait_s is {value!r}; it must be a number of seconds up to {MAX_WAIT_S:g}")
    return float(value)


def _prefix(call: Fields) -> str:
    prefix = call.get("prefix")
    if not isinstance(prefix, str) or len(prefix) > _MAX_PREFIX:
        raise BadCall(f"prefix must be a string of at most {_MAX_PREFIX} characters")
    return prefix
