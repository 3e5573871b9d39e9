"""Lanes drive an agent into one state again and again and make one call there each time; what is kept of its answers is compared."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.agent_client import until
from tests.e2e.original_agents import ControlledAgent, Reply
from tests.e2e.original_steps import START, STEPS, UPDATE, Step
from tests.patience import PATIENCE_S

Observation = dict[str, Any]  # field -> value; fields are flat, so that a difference names one of them
DEAF_S = 25.0  # the original does not leave while it stops workers that go on


@dataclass(frozen=True, slots=True)
class Lane:
    """One state and the way to it from READY. mode: of the workers."""

    name: str
    state: str
    enter: Callable[[ControlledAgent], None]
    mode: str = "sleeps"
    may_be_fresh: bool = False


# -- states ----------------------------------------------------------------------------------------------------------


def stay(agent: ControlledAgent) -> None:
    """Nothing leads there: the agent is as it came up, or was left."""


def _start(agent: ControlledAgent) -> None:
    """Start workers and wait until they wrote that they run, so that handlers of theirs are in place."""
    begun = len(agent.runs())
    code = agent.call("POST", "/start", START).code
    assert code == 200, f"{agent} answers a plain /start with {code}: {agent.printed()}"
    until(lambda: len(agent.runs()) > begun, f"workers of the {agent}", PATIENCE_S)
    agent.status()  # answered after what the agent still had to do for this start


def _complete(agent: ControlledAgent) -> None:
    _start(agent)
    agent.until_state("completed")


def _fault(agent: ControlledAgent) -> None:
    _start(agent)
    agent.until_state("faulted")


def _stop_and_be_ready(agent: ControlledAgent) -> None:
    _start(agent)
    agent.call("POST", "/stop")
    agent.until_state("ready")


def _drain(agent: ControlledAgent) -> None:
    _start(agent)
    agent.call("POST", "/stop", {"is_graceful": True, "timeout": 30})


def _drain_and_be_ready(agent: ControlledAgent) -> None:
    _drain(agent)
    agent.until_state("ready")


def _stop_long(agent: ControlledAgent) -> None:
    """A drain whose workers go on: STOPPING for as long as the test needs."""
    _drain(agent)
    until(lambda: "event" in agent.runs()[-1], "SIGUSR1 to arrive", PATIENCE_S)


LANES = (
    Lane("fresh", "ready", stay, may_be_fresh=True),
    Lane("running", "running", _start, mode="drains"),
    Lane("completed", "completed", _complete, mode="completes"),
    Lane("faulted", "faulted", _fault, mode="crashes"),
    Lane("stopping", "stopping", _stop_long, mode="ignores"),
    Lane("ready again", "ready", _stop_and_be_ready),
    Lane("drained", "ready", _drain_and_be_ready, mode="drains"),
)


# -- driving ---------------------------------------------------------------------------------------------------------


def be_ready(agent: ControlledAgent) -> None:
    """Bring the agent back to READY from wherever it is; workers that outlive a stop are killed."""
    state = agent.state()
    if state == "ready":
        return
    if state == "gone":
        raise AssertionError(f"{agent} is gone (exit code {agent.process.poll()}): {agent.printed()}")
    agent.call("POST", "/stop")
    if state == "stopping":
        kill_workers(agent)
    agent.until_state("ready")


def kill_workers(agent: ControlledAgent) -> None:
    """Kill the workers that run."""
    for pid in agent.living_pids():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def enter(lane: Lane, agent: ControlledAgent, mode: str) -> None:
    """Bring the agent into the lane's state."""
    be_ready(agent)
    agent.set_mode(mode)
    lane.enter(agent)
    assert agent.state() == lane.state, f"{agent} is {agent.status()} in lane {lane.name}"


def drive(lane: Lane, agent: ControlledAgent, steps: tuple[Step, ...] = STEPS) -> dict[str, Observation]:
    """Make every step of a lane; gives what was seen at each."""
    agent.wait_until_up()
    agent.set_mode(lane.mode)
    seen: dict[str, Observation] = {}
    is_fit = lane.may_be_fresh
    for step in steps:
        if step.lanes and lane.name not in step.lanes:
            continue
        if not is_fit or step.mode is not None:
            enter(lane, agent, step.mode or lane.mode)
        seen[step.name], is_fit = observe(lane, agent, step)
    return seen


def observe(lane: Lane, agent: ControlledAgent, step: Step) -> tuple[Observation, bool]:
    """Make one step; gives what was seen and whether the lane's state is still untouched."""
    noted, before = len(agent.runs()), reduce_status(agent.status())
    replies = _send(step, agent)
    seen: Observation = {"code": [reply.code for reply in replies] if step.times > 1 else replies[0].code}
    if step.times == 1:
        seen |= reduce_body(replies[0].body)
    if step.path == "/shutdown" and step.method == "POST":
        code = agent.exit_code(DEAF_S if lane.state == "stopping" else PATIENCE_S)
        return {**seen, "exit": code, "left": 0 if code is None else len(agent.living_pids())}, False
    was_refused = all(reply.code >= 400 for reply in replies)
    if step.method == "POST" and not was_refused and step.path != "/update":
        agent.settled(
            needs_worker=step.path == "/start",
            may_be_ready_at_once=step.path == "/stop" and step.times == 1,
        )
    after = {
        name: value
        for name, value in reduce_status(agent.status()).items()
        if name == "status" or value != before.get(name)
    }
    runs = agent.runs()[noted:]
    seen |= {f"after.{name}": value for name, value in after.items()}
    starts = [run["env"] for run in runs if "env" in run]
    seen |= {"starts": len(starts), "signals": sum("event" in run for run in runs)}
    if starts:
        seen |= {f"env.{name}": value for name, value in starts[-1].items()}
    is_untouched = agent.state() == lane.state and not runs
    is_update = step.path == "/update" and not was_refused
    if is_untouched and is_update:
        agent.call("POST", "/update", UPDATE)
    is_read = step.method != "POST" or was_refused or step.path == "/status" or is_update
    return seen, is_untouched and (is_read or lane.may_be_fresh)


def _send(step: Step, agent: ControlledAgent) -> list[Reply]:
    if step.times == 1:
        return [step.send(agent)]
    barrier = threading.Barrier(step.times)

    def one(_: int) -> Reply:
        barrier.wait()
        return step.send(agent)

    with ThreadPoolExecutor(step.times) as pool:
        return sorted(pool.map(one, range(step.times)), key=lambda reply: reply.code)


# -- what is compared ------------------------------------------------------------------------------------------------


def reduce_status(body: Mapping[str, Any]) -> Observation:
    """Give what two agents can agree on in a /status: no times, no texts, no versions; their kinds instead."""
    kept: Observation = {}
    for name, value in body.items():
        if name == "transitions":
            kept[name] = sorted(value)
            kept["transitions' times"] = sorted({_kind_of_time(time) for time in value.values()})
        elif name in ("message", "agent_version"):
            kept[name] = type(value).__name__
        elif name not in OURS_ONLY:
            kept[name] = value
    return kept


# Fields of ours in /status (docs/design/contracts.md, 3); a client of the original leaves unknown ones alone.
OURS_ONLY = (
    "protocol", "features", "version", "generation", "drained", "terminating", "warming", "saving", "unanswered", "in_memory",
    "preparation", "gap_s", "steps_repeated", "boot_id", "failure", "worker",
)  # fmt: skip


def _kind_of_time(text: object) -> str:
    try:
        zone = datetime.fromisoformat(str(text)).tzinfo
    except ValueError:
        return "no ISO time"
    return f"ISO time with offset {zone}"


def reduce_body(body: object) -> Observation:
    """Give an answer's shape: a status field by field, a 422 by the places it complains about, else the value."""
    if isinstance(body, dict) and "status" in body:
        return {"body": "status", **{f"body.{name}": value for name, value in reduce_status(body).items()}}
    if isinstance(body, dict) and isinstance(body.get("detail"), list):
        entries = [entry if isinstance(entry, dict) else {} for entry in body["detail"]]
        places = sorted({".".join(map(str, entry.get("loc", ()))) for entry in entries})
        shape = sorted(
            {f"{name}: {type(entry.get(name)).__name__}" for entry in entries for name in ("loc", "msg", "type")}
        )
        return {"body": "problems", "body.places": places, "body.entries": shape}
    if isinstance(body, dict):
        return {"body": {name: type(value).__name__ for name, value in body.items()}}
    return {"body": body}


@dataclass(frozen=True, slots=True)
class Difference:
    """One field of one step in which the agents differ; ABSENT where an agent has no such field."""

    step: str  # "<lane> <step>"
    field: str
    ours: Any
    original: Any
    codes: tuple[object, object]  # HTTP status of ours and of the original in this step

    def __str__(self) -> str:
        return f"{self.step} | {self.field} | ours {self.ours!r} | original {self.original!r}"


ABSENT = "(absent)"

# Where the codes differ already, the rest of what differs follows from it, but for what became of the workers.
DECISIVE = ("code", "after.status", "starts", "signals", "exit")


def compare(lane: str, ours: Mapping[str, Observation], original: Mapping[str, Observation]) -> list[Difference]:
    """Give every field in which two agents differ, over all steps of a lane; what follows from another is left out."""
    assert ours.keys() == original.keys()
    found = []
    for step, seen in ours.items():
        other = original[step]
        names = dict.fromkeys([*seen, *other])
        if seen["code"] != other["code"]:
            names = dict.fromkeys(DECISIVE)
        if seen.get("starts") != other.get("starts"):
            names = {name: None for name in names if not name.startswith("env.")}
        for name in names:
            mine, theirs = seen.get(name, ABSENT), other.get(name, ABSENT)
            if mine != theirs:
                found.append(Difference(f"{lane} {step}", name, mine, theirs, (seen["code"], other["code"])))
    return found


def run_lane(lane: Lane, folder: Path, make: str, steps: tuple[Step, ...] = STEPS) -> dict[str, Observation]:
    """Run a lane against a fresh agent of one make; the agent is ended whatever comes."""
    agent = ControlledAgent(make, folder / f"{lane.name.replace(' ', '-')}-{make}", "--shutdown-timeout=3")
    try:
        return drive(lane, agent, steps)
    finally:
        agent.end()
