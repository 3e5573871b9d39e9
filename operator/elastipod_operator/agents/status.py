"""From an agent's /status to facts: pure. An agent is a stranger's program; nothing it says may break the operator."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from ..core.silence import SILENCE_LIMIT
from ..core.snapshot import AgentState, Failure, ObservedAgent

MAX_RESPONSE_BYTES = 1 << 20
# Texts end up in the record, in conditions and in Events. A traceback is cut by who shows it.
MAX_REASON, MAX_MESSAGE, MAX_TRACEBACK = 100, 500, 4096
# As JSON, of one agent. Both go to other agents with the next /start: one of our own takes 8 MiB of it.
MAX_PROGRESS_BYTES = 16 * 1024
MAX_WORKER_DATA_BYTES = 64 * 1024
MAX_EXCESS = 300
PROTOCOL = 1
PLAIN_FIELDS = frozenset({"status", "reason", "message", "progress", "restartMode", "worker_data"})

Number = Annotated[int, Field(ge=0, le=2**53)]


class FailureBody(BaseModel):
    model_config = ConfigDict(extra="ignore")
    global_rank: int | None = None
    exitcode: int | None = None
    signal: str | None = None
    message: str | None = None

    @field_validator("signal", mode="before")
    @classmethod
    def _named(cls, value: Any) -> str | None:
        return None if value is None else str(value)


class WorkerBody(BaseModel):
    model_config = ConfigDict(extra="ignore")
    step: Number | None = None


class ReachBody(BaseModel):
    """What an agent says of another one; is_reached None: it cannot tell."""

    model_config = ConfigDict(extra="ignore")
    address: str | None = None
    is_reached: bool | None = None


class StatusBody(BaseModel):
    """The answer to GET /status; fields beyond the plain protocol are absent in agents of another make."""

    model_config = ConfigDict(extra="ignore")
    status: AgentState
    reason: str | None = None
    message: str | None = None
    protocol: Number | None = None
    version: Number | None = None
    generation: Number | None = None
    drained: bool = False
    terminating: bool = False
    warming: bool = False
    saving: bool = False
    unanswered: bool = False
    failure: FailureBody | None = None
    worker: WorkerBody | None = None
    progress: dict[str, Any] | None = None
    spare: str | None = None
    features: list[Any] | None = None
    reach: ReachBody | None = None
    restart_mode: str | None = Field(None, alias="restartMode")
    worker_data: Any = None

    @field_validator("spare", "restart_mode", mode="before")
    @classmethod
    def _said(cls, value: Any) -> str | None:
        return None if value is None else str(value)[:MAX_REASON]

    @model_validator(mode="before")
    @classmethod
    def _plain_unless_ours(cls, data: Any) -> Any:
        """Agents of another make may use our names for something else."""
        if isinstance(data, dict) and data.get("protocol") is None:
            return {key: value for key, value in data.items() if key in PLAIN_FIELDS}
        return data


class InvalidStatus(ValueError):
    """The answer is not a status of the agent protocol."""


@dataclass(frozen=True, slots=True)
class AgentStatus:
    """A well-formed answer and what the next calls need of it.

    progress: a JSON object, empty for none. worker_data: the entries of a JSON list, empty for none. What is too large is left
    out whole, and `fact.excess` says so.
    """

    fact: ObservedAgent
    version: int | None
    progress: str = ""
    worker_data: str = ""


def parse_status(body: Any, before: ObservedAgent, now: datetime) -> AgentStatus:
    """Turn a decoded /status body into facts. Raises InvalidStatus with one sentence."""
    try:
        answer = StatusBody.model_validate(body)
        progress, worker_data, excess = _extras(answer)
    except RecursionError as error:
        raise InvalidStatus("the agent's /status is not understood: too deep") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "body"
        raise InvalidStatus(f"the agent's /status is not understood: {where}: {first['msg']}") from error
    ours = answer.protocol is not None and answer.protocol >= PROTOCOL
    step = answer.worker.step if answer.worker else None
    moved = step is not None and step != before.step
    is_back = before.last_answer is not None and now - before.last_answer >= SILENCE_LIMIT
    fact = ObservedAgent(
        state=answer.status,
        generation=(answer.generation or 0) if ours else None,
        reason=(answer.reason or "")[:MAX_REASON],
        message=(answer.message or "")[:MAX_MESSAGE],
        drained=answer.drained,
        terminating=answer.terminating,
        warming=answer.warming,
        saving=answer.saving,
        no_drain_handler=answer.unanswered,
        failure=_failure(answer.failure),
        step=step,
        step_at=now if moved else before.step_at if step is not None else None,  # no step of this generation yet
        step_pace=_pace(before, step, now) if moved else before.step_pace,
        trying_since=before.trying_since,
        last_answer=now,
        restart_mode=answer.restart_mode or "",
        is_spare=ours and answer.spare == "True",
        can_reach=ours and "reach" in (answer.features or ()),
        answering_since=now if is_back or before.answering_since is None else before.answering_since,
        refused_answer=excess,
    )
    return AgentStatus(fact, answer.version if ours else None, progress, worker_data)


def parse_reachability(body: Any, address: str) -> bool | None:
    """Give what an agent says of whether it reaches another one; None where it does not tell. Raises InvalidStatus."""
    try:
        told = StatusBody.model_validate(body).reach
    except ValidationError as error:
        raise InvalidStatus("the agent's /status is not understood") from error
    return told.is_reached if told is not None and told.address == address else None


def _extras(answer: StatusBody) -> tuple[str, str, str]:
    """Give progress and worker data as they are kept, and a sentence about what is too large to be."""
    excess = ""
    progress = json.dumps(answer.progress) if answer.progress else ""
    if len(progress) > MAX_PROGRESS_BYTES:
        excess = f"it reports {len(progress)} bytes of progress; at most {MAX_PROGRESS_BYTES} are taken, so none is"
        progress = ""
    worker_data = json.dumps(answer.worker_data)[1:-1] if isinstance(answer.worker_data, list) else ""
    if len(worker_data) > MAX_WORKER_DATA_BYTES:
        excess = (
            f"its workers leave {len(worker_data)} bytes of worker_data for the others; at most {MAX_WORKER_DATA_BYTES} are handed "
            "on, so nobody's is"
        )
        worker_data = ""
    return progress, worker_data, excess


def _pace(before: ObservedAgent, step: int | None, now: datetime) -> timedelta | None:
    """Give the time of one step, from two answers that showed different ones."""
    if before.step_at is None or before.step is None or step is None or step <= before.step:
        return before.step_pace
    return (now - before.step_at) / (step - before.step)


def _failure(answer: FailureBody | None) -> Failure | None:
    if answer is None:
        return None
    rank = -1 if answer.global_rank is None else answer.global_rank
    return Failure(rank, answer.exitcode, (answer.signal or "")[:MAX_REASON], (answer.message or "")[-MAX_TRACEBACK:])
