"""Turns an agent's /status into facts. Agents are untrusted: no response may break the operator. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from ..core.silence import SILENCE_LIMIT
from ..core.snapshot import REPLICATED, SHARDED, AgentState, Failure, ObservedAgent, Preparation

MAX_RESPONSE_BYTES = 1 << 20
# Texts go into the record, conditions and Events. Tracebacks are cut where they are shown.
MAX_REASON, MAX_MESSAGE, MAX_TRACEBACK = 100, 500, 4096
# As JSON, for one agent. Both are sent to other agents with the next /start, which may have 8 MiB.
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
    total_steps: Number | None = None


class InMemoryBody(BaseModel):
    """What an agent says of workers that can live through several generations. kept: how many processes did."""

    model_config = ConfigDict(extra="ignore")
    kind: str | None = None
    kept: Number | None = None


class ReachBody(BaseModel):
    """Whether an agent reaches another one; None if it cannot tell."""

    model_config = ConfigDict(extra="ignore")
    address: str | None = None
    is_reached: bool | None = None


class StatusBody(BaseModel):
    """The response to GET /status. Agents of other makes only send the fields of the plain protocol."""

    model_config = ConfigDict(extra="ignore")
    status: AgentState
    reason: str | None = None
    message: str | None = None
    protocol: Number | None = None
    version: Number | None = None
    generation: Number | None = None
    next_generation: Number | None = None
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
    in_memory: InMemoryBody | None = None
    preparation: str | None = None
    gap_s: float | None = Field(None, ge=0, le=10**9, allow_inf_nan=False)
    steps_repeated: Number | None = None
    restart_mode: str | None = Field(None, alias="restartMode")
    worker_data: Any = None

    @field_validator("spare", "restart_mode", "preparation", mode="before")
    @classmethod
    def _said(cls, value: Any) -> str | None:
        return None if value is None else str(value)[:MAX_REASON]

    @model_validator(mode="before")
    @classmethod
    def _plain_unless_ours(cls, data: Any) -> Any:
        """Ignore our own fields in agents of other makes, which may use the names differently."""
        if isinstance(data, dict) and data.get("protocol") is None:
            return {key: value for key, value in data.items() if key in PLAIN_FIELDS}
        return data


class InvalidStatus(ValueError):
    """The response is not a status of the agent protocol."""


@dataclass(frozen=True, slots=True)
class AgentStatus:
    """A valid response, with the data for the next calls.

    progress: a JSON object, empty for none. worker_data: the entries of a JSON list, empty for none. Data that is too large is
    dropped, and `fact.refused_answer` says so.
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
        raise InvalidStatus("the agent's /status is not valid: nested too deep") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "body"
        raise InvalidStatus(f"the agent's /status is not valid: {where}: {first['msg']}") from error
    ours = answer.protocol is not None and answer.protocol >= PROTOCOL
    step = answer.worker.step if answer.worker else None
    moved = step is not None and step != before.step
    generation = (answer.generation or 0) if ours else None
    was_silent = before.last_answer is not None and now - before.last_answer >= SILENCE_LIMIT
    # One that was told to stop before its silence gets no more time for it.
    is_stopping_still = AgentState.STOPPING is before.state is answer.status and before.generation == generation
    is_back = was_silent and not is_stopping_still
    fact = ObservedAgent(
        state=answer.status,
        generation=generation,
        reason=(answer.reason or "")[:MAX_REASON],
        message=(answer.message or "")[:MAX_MESSAGE],
        drained=answer.drained,
        terminating=answer.terminating,
        warming=answer.warming,
        saving=answer.saving,
        no_drain_handler=answer.unanswered,
        failure=_failure(answer.failure),
        step=step,
        total_steps=answer.worker.total_steps if answer.worker else None,
        step_at=now if moved else before.step_at if step is not None else None,  # no step of this generation yet
        step_pace=_pace(before, step, now) if moved else before.step_pace,
        trying_since=before.trying_since,
        last_answer=now,
        restart_mode=answer.restart_mode or "",
        is_spare=ours and answer.spare == "True",
        memory_state=_memory_state(answer),
        num_kept=answer.in_memory.kept if answer.in_memory is not None else None,
        gap=timedelta(seconds=answer.gap_s) if answer.gap_s is not None else None,
        steps_repeated=answer.steps_repeated or 0,
        can_prepare=ours and "prepare" in (answer.features or ()),
        preparation=_preparation(answer.preparation),
        can_reach=ours and "reach" in (answer.features or ()),
        can_serve_store=ours and "store" in (answer.features or ()),
        can_begin_next=ours and "next" in (answer.features or ()),
        next_generation=answer.next_generation if ours else None,
        generation_at=now if before.generation_at is None or before.generation != generation else before.generation_at,
        answering_since=now if is_back or before.answering_since is None else before.answering_since,
        refused_answer=excess,
    )
    return AgentStatus(fact, answer.version if ours else None, progress, worker_data)


def parse_reachability(body: Any, address: str) -> bool | None:
    """Give whether an agent reaches another one; None if it does not say. Raises InvalidStatus."""
    try:
        told = StatusBody.model_validate(body).reach
    except ValidationError as error:
        raise InvalidStatus("the agent's /status is not valid") from error
    return told.is_reached if told is not None and told.address == address else None


def _extras(answer: StatusBody) -> tuple[str, str, str]:
    """Give progress and worker data as JSON, and a sentence about data that is too large."""
    excess = ""
    progress = json.dumps(answer.progress) if answer.progress else ""
    if len(progress) > MAX_PROGRESS_BYTES:
        excess = f"it reports {len(progress)} bytes of progress; the limit is {MAX_PROGRESS_BYTES}, so none is used"
        progress = ""
    worker_data = json.dumps(answer.worker_data)[1:-1] if isinstance(answer.worker_data, list) else ""
    if len(worker_data) > MAX_WORKER_DATA_BYTES:
        excess = (
            f"its workers leave {len(worker_data)} bytes of worker_data for others; the limit is {MAX_WORKER_DATA_BYTES}, so no "
            "worker_data of the job is used"
        )
        worker_data = ""
    return progress, worker_data, excess


def _memory_state(answer: StatusBody) -> str:
    """Give the kind of state that the workers keep; what a later agent calls otherwise is kept with the same care as shards."""
    kind = answer.in_memory.kind if answer.in_memory is not None else None
    if not kind:
        return ""
    return REPLICATED if kind == REPLICATED else SHARDED


def _preparation(told: str | None) -> Preparation | None:
    """Give how far prepared workers are; what a later agent calls otherwise is neither their end nor the barrier."""
    if not told:
        return None
    return Preparation(told) if told in tuple(Preparation) else Preparation.BEGUN


def _pace(before: ObservedAgent, step: int | None, now: datetime) -> timedelta | None:
    """Give the time of one step, from two responses with different steps.

    Above a second it doubles at most: the heartbeat in which workers come to a standstill has few steps and is no pace.
    """
    if before.step_at is None or before.step is None or step is None or step <= before.step:
        return before.step_pace
    seen = (now - before.step_at) / (step - before.step)
    return seen if before.step_pace is None else min(seen, max(2 * before.step_pace, timedelta(seconds=1)))


def _failure(answer: FailureBody | None) -> Failure | None:
    if answer is None:
        return None
    rank = -1 if answer.global_rank is None else answer.global_rank
    return Failure(rank, answer.exitcode, (answer.signal or "")[:MAX_REASON], (answer.message or "")[-MAX_TRACEBACK:])
