"""A storm over one operator and many jobs: the operator is killed again and again while jobs resize and their workers die."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.e2e.host_view import Generation, training_processes
from tests.e2e.job_run import JOBS_PATH, PODS_PATH, JobRun
from tests.e2e.operator_processes import Operators

KILL_EVERY_S = (5.0, 15.0)
ACT_EVERY_S = (1.0, 4.0)
LOOK_EVERY_S = 1.0
TELL_EVERY_S = 15.0
# So long a killed operator stays away where the other one is to take over: longer than the lease lasts.
AWAY_S = 20.0
# Steps beyond all earlier ones before a job's workers are killed again: three faults without progress are the job's end.
PROGRESS = 3
DEADLY = (signal.SIGKILL, signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGTERM)


@dataclass
class Life:
    """One job in the storm. entries: its history by generation, also of generations that the annotation has dropped."""

    job: JobRun
    maximum: int
    samples: Path
    entries: dict[int, dict[str, Any]] = field(default_factory=dict)
    state: str = ""
    restarts: int = 0
    size: str = ""
    acts: Counter[str] = field(default_factory=Counter)
    crashed_at_step: int = 0

    def step(self) -> int:
        """Give the newest step of any generation, from the logs of rank 0."""
        logs = sorted(self.samples.glob("gen-*-rank-00000.jsonl"))
        return max((_last_step(path) for path in logs[-2:]), default=0)

    def looked_at(self, body: dict[str, Any]) -> None:
        """Take the job as it is now. Raises AssertionError when it went back, or remembers its past otherwise."""
        name, status = self.job.name, body.get("status", {})
        annotations = body["metadata"].get("annotations", {})
        entries: list[dict[str, Any]] = json.loads(annotations.get("elastipod.io/history", "[]"))
        numbers = [entry["generation"] for entry in entries]
        newest = max(self.entries, default=0)
        assert numbers == list(range(numbers[0], numbers[-1] + 1)) if numbers else True, (name, numbers)
        assert not newest or (numbers and numbers[0] <= newest + 1 and numbers[-1] >= newest), (name, newest, numbers)
        for entry in entries:
            known = self.entries.setdefault(entry["generation"], entry)
            fixed = {key: value for key, value in entry.items() if key != "running_at"}
            assert {key: known[key] for key in fixed} == fixed, (name, known, entry)
            assert known["running_at"] in (None, entry["running_at"]), (name, known, entry)
            known["running_at"] = entry["running_at"]
        restarts = status.get("restartCount", 0)
        assert restarts >= self.restarts, f"{name}: {restarts} restarts after {self.restarts}"
        self.restarts, self.size = restarts, annotations.get("elastipod.io/size", "")
        conditions = status.get("conditions") or [{}]
        self.state = conditions[-1].get("type", "")
        assert self.state != "Failed", (name, conditions)


def _last_step(path: Path) -> int:
    with path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - 4096))
        steps = [
            line.partition(b'"step":')[2].partition(b",")[0] for line in file if line.startswith(b'{"kind":"step"')
        ]
    return int(steps[-1]) if steps else 0


class Storm:
    """The storm, run from one thread. Every invariant that can be seen from outside is looked at once a second."""

    def __init__(self, operators: Operators, lives: list[Life], rng: random.Random, say: Callable[[str], None]) -> None:
        self.lives = {life.job.name: life for life in lives}
        self.kills: Counter[str] = Counter()
        self.leaders: Counter[str] = Counter()
        self.leases_lost = 0
        self.looks = 0
        self._operators = operators
        self._rng = rng
        self._say = say
        self._to_start: dict[str, float] = {}
        self._began = time.monotonic()

    def run(self, seconds: float) -> None:
        """Storm for so long. The operators run afterwards, and nothing disturbs them any more."""
        self._began = now = time.monotonic()
        end = now + seconds
        kill_at, act_at = now + self._rng.uniform(*KILL_EVERY_S), now
        look_at = tell_at = now
        while (now := time.monotonic()) < end:
            self._start_those_due(now)
            if now >= kill_at:
                self._kill(now)
                kill_at = now + self._rng.uniform(*KILL_EVERY_S)
            if now >= act_at:
                self._act()
                act_at = now + self._rng.uniform(*ACT_EVERY_S)
            if now >= look_at:
                self.look()
                look_at = now + LOOK_EVERY_S
            if now >= tell_at:
                self.tell()
                tell_at = now + TELL_EVERY_S
            time.sleep(0.05)
        self._start_those_due(float("inf"))

    def settle(self, within_s: float) -> None:
        """Wait until every job has completed, and look on."""
        end = time.monotonic() + within_s
        tell_at = 0.0
        while any(life.state != "Completed" for life in self.lives.values()):
            assert time.monotonic() < end, f"not completed: {self.summary()}"
            self.look()
            if time.monotonic() >= tell_at:
                self.tell()
                tell_at = time.monotonic() + TELL_EVERY_S
            time.sleep(LOOK_EVERY_S)

    def look(self) -> None:
        """Read all jobs and pods, and hold them against what must always be true."""
        api = self._operators.api
        bodies = (api.get(JOBS_PATH) or {}).get("items", [])
        for body in bodies:
            if life := self.lives.get(body["metadata"]["name"]):
                life.looked_at(body)
        pods = (api.get(f"{PODS_PATH}?labelSelector=HPJob") or {}).get("items", [])
        alive = [pod["metadata"] for pod in pods if _is_alive(pod)]
        for name, count in Counter(meta["labels"]["HPJob"] for meta in alive).items():
            if life := self.lives.get(name):
                assert count <= life.maximum, f"{name} has {count} pods: {[meta['name'] for meta in alive]}"
        slots = Counter((meta["labels"]["HPJob"], meta["labels"]["elastipod.io/ordinal"]) for meta in alive)
        assert max(slots.values(), default=0) <= 1, [slot for slot, count in slots.items() if count > 1]
        self.looks += 1

    def tell(self) -> None:
        """Say how far it is."""
        self._say(f"{time.monotonic() - self._began:5.0f} s, {self.kills.total()} kills: {self.summary()}")

    def summary(self) -> str:
        return "; ".join(
            f"{life.job.name} {life.state or 'new'} {life.size} g{max(life.entries, default=0)} r{life.restarts} s{life.step()}"
            for life in self.lives.values()
        )

    # -- what befalls operators

    def _start_those_due(self, now: float) -> None:
        for name in self._operators.ended():
            self.leases_lost += 1
            self._to_start[name] = now
        for name in [name for name, due in self._to_start.items() if due <= now]:
            del self._to_start[name]
            self._operators.start(name)

    def _kill(self, now: float) -> None:
        """Mostly the leader, which is back at once; sometimes it stays away, and sometimes both go."""
        leader = self._operators.leader()
        if leader is None and self._to_start:
            return  # the other one is to take over
        self.leaders[leader or "nobody"] += 1
        running = sorted(self._operators.running)
        kind = self._rng.choices(("back at once", "away", "both"), (75, 10, 15))[0]
        if kind == "away" and (leader is None or len(running) < 2):
            kind = "back at once"
        victims = running if kind == "both" else [leader or running[0]] if running else []
        for name in victims:
            self._operators.kill(name)
            self.kills[kind] += 1
            self._to_start[name] = now + (AWAY_S if kind == "away" else 0)

    # -- what befalls jobs

    def _act(self) -> None:
        """Resize a job, kill a worker of it, or delete a pod."""
        life = self._rng.choice([life for life in self.lives.values() if life.state != "Completed"] or [None])
        if life is None:
            return
        act = self._rng.choices((self._crash, self._scale, self._delete_pod), (45, 45, 10))[0]
        act(life)

    def _scale(self, life: Life) -> None:
        size = self._rng.randint(1, life.maximum)
        life.job.scale(size)
        life.acts["scales"] += 1

    def _crash(self, life: Life) -> None:
        step = life.step()
        if step < life.crashed_at_step + PROGRESS:
            self._scale(life)
            return
        processes = sorted(training_processes(life.job.name).items())
        found = [process.pid for _, of_pod in processes for process in of_pod]
        if found:
            with suppress(ProcessLookupError):  # a change of its job may have ended it since it was listed
                os.kill(self._rng.choice(found), self._rng.choice(DEADLY))
                life.crashed_at_step = step
                life.acts["crashes"] += 1

    def _delete_pod(self, life: Life) -> None:
        pods = sorted(pod["metadata"]["name"] for pod in life.job.running_pods())
        if pods:
            life.acts["deleted pods"] += 1
            life.job.cluster.kubectl("delete", "pod", self._rng.choice(pods), "--wait=false", check=False)


def _is_alive(pod: dict[str, Any]) -> bool:
    return "deletionTimestamp" not in pod["metadata"] and pod["status"].get("phase") in ("Pending", "Running")


def losses(trained: Iterable[Generation], entries: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Say which planned resizes lost steps of the generation that had trained before.

    Only what breaks may cost steps: also what broke in between, in a generation that ended before it trained. entries: the history of
    the job by generation.
    """
    found: list[str] = []
    for before, after in pairwise(trained):
        done = max(before.steps, default=before.resumed_step)
        is_planned = all(entries[number]["kind"] == "resize" for number in range(before.number + 1, after.number + 1))
        if is_planned and after.resumed_step != done:
            found.append(
                f"generation {after.number} began after step {after.resumed_step}, {before.number} had made {done}"
            )
    return found
