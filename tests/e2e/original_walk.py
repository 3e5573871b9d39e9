"""Random walks: both agents get the same calls in the same order, and their workers must fare alike."""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.e2e.original_agents import ControlledAgent
from tests.e2e.original_script import DECISIVE, Difference, Lane, Observation, be_ready, compare, observe, stay
from tests.e2e.original_steps import STEPS, Step

# Without "sleeps", whom SIGUSR1 kills there and not here: that is a step of the other test.
MODES = ("completes", "crashes", "drains", "ignores")
LONG_DRAIN = Step("/stop: graceful, for long", "POST", "/stop", {"is_graceful": True, "timeout": 60})
START = next(step for step in STEPS if step.name == "/start: plain")
STOP = next(step for step in STEPS if step.name == "/stop: no body")
# The others, half of all calls. Drains with a short time would end on their own between two calls, and a generation is
# ours alone: where an agent knows it, it is in every call.
LEFT_OUT = ("graceful", "time ", "generation", "/shutdown")
OTHERS = tuple(step for step in STEPS if not any(word in step.name for word in LEFT_OUT))


@dataclass(slots=True)
class Walk:
    """What a walk found. visits: how often a call was made in each state."""

    differences: list[Difference] = field(default_factory=list)
    visits: Counter[str] = field(default_factory=Counter)
    calls: int = 0
    resyncs: int = 0  # a difference that is meant left the agents in two states: both were made READY


def random_walk(seed: int, calls: int, folder: Path) -> Walk:
    """Make so many calls, chosen by the seed, to one agent of each make."""
    rng = random.Random(seed)  # a walk, not a secret
    pair = [
        ControlledAgent(make, folder / f"walk-{seed}-{make}", "--shutdown-timeout=3")
        for make in ("elastipod", "original")
    ]
    walk = Walk()
    try:
        with ThreadPoolExecutor(2) as both:
            list(both.map(ControlledAgent.wait_until_up, pair))
            for _ in range(calls):
                _one_call(rng, pair, both, walk)
        return walk
    finally:
        for agent in pair:
            agent.end()


def _one_call(rng: random.Random, pair: list[ControlledAgent], both: ThreadPoolExecutor, walk: Walk) -> None:
    states = [agent.state() for agent in pair]
    if states[0] != states[1]:
        walk.resyncs += 1
        list(both.map(be_ready, pair))
        states = ["ready", "ready"]
    step = rng.choice((START, STOP, LONG_DRAIN, rng.choice(OTHERS), rng.choice(OTHERS), rng.choice(OTHERS)))
    mode = rng.choice(MODES)
    for agent in pair if states[0] == "ready" else ():
        agent.set_mode(mode)  # of workers to come: those that run keep theirs
    name = "ready again" if states[0] == "ready" else states[0]
    lane = Lane(name, states[0], stay)
    seen: list[Observation] = [found for found, _ in both.map(lambda agent: observe(lane, agent, step), pair)]
    ours, original = ({step.name: {key: value for key, value in one.items() if key in DECISIVE}} for one in seen)
    walk.differences += compare(name, ours, original)
    walk.visits[states[0]] += 1
    walk.calls += 1
