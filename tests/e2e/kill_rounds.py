"""Rounds of kills over one job in memory: one or two deaths at any moment, and what followed."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from tests.e2e.host_view import training_processes
from tests.e2e.job_run import JobRun
from tests.e2e.kills import (
    ROLES,
    Kill,
    Rank,
    Victim,
    World,
    agent_of,
    fork_servers,
    generation_of,
    has_fork_server_since,
    kill,
    living_ranks,
    newest_world,
    services,
    world_of,
)
from tests.e2e.operator_processes import Operators
from tests.patience import PATIENCE_S

from elastipod_agent.core.warm_start import MAX_LOSSES

T = TypeVar("T")
RESTART_ORDER = tuple(ROLES)
Away = list[tuple[Victim, Callable[[], object]]]
OPERATORS = ("operator-a", "operator-b")
STEPS_WHILE_AWAY = 3
SHARE_OF_RESIZES, SHARE_OF_PAIRS = 0.2, 0.3
SIZES = (2, 3)


class Rounds:
    """Kills, and looks at what followed. Raises AssertionError when the job does not train again."""

    def __init__(
        self, job: JobRun, samples: Path, operators: Operators, rng: random.Random, shares: Mapping[Victim, int]
    ) -> None:
        self._job, self._samples, self._operators, self._rng, self._shares = job, samples, operators, rng, shares
        self._bag: list[Victim] = []
        self._size = max(SIZES)
        self._ranks: list[Rank] = []
        self._broken = 0
        """The newest generation that has lost a rank."""
        self._lost_servers: Counter[int] = Counter()
        """Fork servers that were killed, by their agents."""

    def round(self) -> list[Kill]:
        """Have one round; gives its kills."""
        rng = self._rng
        before = self.until_whole()
        self._ranks = living_ranks(self._job.name)
        time.sleep(rng.uniform(0, 2))
        moment = "training"
        spare = len(self._ranks) - 1  # ranks that may die and leave one that holds the state
        is_resized = rng.random() < SHARE_OF_RESIZES
        if is_resized:
            spare -= self._size == max(SIZES)
            self._size = next(size for size in SIZES if size != self._size)
            self._job.scale(self._size)
            moment = "resize"
            time.sleep(rng.uniform(0, 2))
        victims = [self._draw(spare)]
        if rng.random() < SHARE_OF_PAIRS:
            victims.append(self._draw(spare - victims[0].trains, besides=victims[0]))
        kills: list[Kill] = []
        away: Away = []
        pods: set[str] = set()
        for number, victim in enumerate(victims):
            if number:
                time.sleep(rng.uniform(0, 1.5))
                moment = "recovery" if pods else moment
            self._kill(victim, pods, away, of_members=moment == "training")
            kills.append(Kill(str(victim), moment, with_others=len(victims) - 1))
        problem = ""
        if not pods and not is_resized and not self._steps_go_on(before.generation):
            problem = "no steps were made while it was away"
        if away:
            time.sleep(rng.uniform(0, 4))
        for _, back in sorted(away, key=lambda each: RESTART_ORDER.index(each[0]) if each[0] in ROLES else len(ROLES)):
            back()
        began = time.monotonic()
        after = self.until_whole(beyond=max(before.generation, self._broken) if pods or is_resized else 0)
        whole_s = round(time.monotonic() - began, 1)
        followed = self._followed(before, after, is_planned=is_resized and not pods)
        followed["unscheduled_s"] = self._unscheduled_s(kills[0].at)
        if not pods and not is_resized and living_ranks(self._job.name) != self._ranks:
            problem = problem or "workers were replaced, though none was killed"
        return [
            replace(each, **{**followed, "whole_s": whole_s, "problem": problem or followed["problem"]})
            for each in kills
        ]

    def until_whole(self, beyond: int = 0) -> World:
        """Wait until the wanted number of ranks trains in one generation, a newer one than that, and both operators run."""
        for name in self._operators.ended():
            self._operators.start(name)

        def whole() -> World | None:
            world = newest_world(self._samples)
            return world if world and world.generation > beyond and world.is_whole(self._size) else None

        return self._until(f"{self._size} ranks to train", whole)

    def _until(self, what: str, check: Callable[[], T | None]) -> T:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            if found := check():
                return found
            for (
                name
            ) in self._operators.ended():  # who cannot renew its lease must end, as its container would start again
                self._operators.start(name)
            time.sleep(0.1)
        raise AssertionError(f"waited {PATIENCE_S:g} s for {what}: {newest_world(self._samples)}\n{self._job.story()}")

    # -- what dies

    def _draw(self, spare: int, besides: Victim | None = None) -> Victim:
        """Draw a victim. spare: ranks that may still die; with none, something that does not train. besides: dies in this round too."""

        def may_die(victim: Victim) -> bool:
            if victim.trains:
                return spare > 0
            if victim is Victim.FORK_SERVER:
                return bool(fork_servers(self._job.name))
            return victim not in ROLES or victim is not besides  # there is one of it

        fit = [at for at, victim in enumerate(self._bag) if may_die(victim)]
        if not fit:
            fresh = [victim for victim, share in self._shares.items() for _ in range(share)]
            self._rng.shuffle(fresh)
            self._bag = fresh + self._bag
            fit = [at for at, victim in enumerate(self._bag) if may_die(victim)]
        assert fit, f"none of {', '.join(self._shares)} may die now, beside {besides}"
        return self._bag.pop(max(fit))

    def _kill(self, victim: Victim, pods: set[str], away: Away, *, of_members: bool) -> None:
        """Kill it.

        pods: those that have lost a rank in this round, and where none is taken again. away: brings back what is gone. of_members:
        of ranks that train, and not of what is only prepared.
        """
        match victim:
            case Victim.OPERATOR:
                name = self._operators.leader() or self._rng.choice(sorted(self._operators.running) or [""])
                if name:
                    self._operators.kill(name)
                    away.append((victim, lambda: self._operators.start(name)))
            case _ if victim in ROLES:
                cluster, role = self._job.cluster, ROLES[victim]
                cluster.kill_role(role)
                away.append((victim, lambda: cluster.start_role(role)))
            case Victim.FORK_SERVER:
                self._kill_fork_server(away)
            case Victim.KUBELET | Victim.CONTAINERD:
                assert kill(self._rng.choice(services(self._job.cluster, str(victim)))), "its node starts it again"
            case _:
                self._kill_rank(victim, pods, of_members=of_members)

    def _kill_fork_server(self, away: Away) -> None:
        """Kill the process that an agent forks its workers from. The agent starts another, unless it has lost too many in a row."""

        def one() -> tuple[int, float] | None:
            servers = fork_servers(self._job.name)
            agent = self._rng.choice(sorted(servers) or [0])
            moment = time.time()
            return (agent, moment) if agent and kill(servers[agent]) else None

        agent, moment = self._until("a fork server to be killed", one)
        self._lost_servers[agent] += 1
        if self._lost_servers[agent] < MAX_LOSSES:
            what = f"another fork server of agent {agent}"
            away.append((Victim.FORK_SERVER, lambda: self._until(what, lambda: has_fork_server_since(agent, moment))))

    def _kill_rank(self, victim: Victim, pods: set[str], *, of_members: bool) -> None:
        """Kill a worker or its agent, of another pod than before: two faults in a row of one replica end more than a process."""
        members = {each.pod for each in self._ranks}
        of_rank_0 = {each.pod for each in self._ranks if each.rank == 0}
        is_0 = victim in (Victim.WORKER_0, Victim.AGENT_0)

        def one() -> bool:
            processes = training_processes(self._job.name)
            found = {pod: processes[pod] for pod in processes if pod not in pods and (pod in members or not of_members)}
            wanted = [pod for pod in sorted(found) if (pod in of_rank_0) == is_0] or sorted(found)
            if not wanted:
                return False
            pod = self._rng.choice(wanted)
            pid = min(found[pod], key=lambda process: process.started).pid
            target = agent_of(pid) if victim in (Victim.AGENT, Victim.AGENT_0) else pid
            generation = generation_of(pid)
            if target is None or not kill(target):
                return False
            # A resize may have ended just before, so that the rank dies in the generation that it led to.
            self._broken = max(self._broken, generation)
            pods.add(pod)
            return True

        self._until(f"a process to be killed: {victim}", one)

    # -- what follows

    def _steps_go_on(self, generation: int) -> bool:
        """Whether the same generation goes on while the victim is away."""
        newest = world_of(self._samples, generation).newest
        deadline = time.monotonic() + PATIENCE_S / 4
        while time.monotonic() < deadline:
            if world_of(self._samples, generation).newest >= newest + STEPS_WHILE_AWAY:
                return True
            time.sleep(0.1)
        return False

    def _followed(self, before: World, after: World, *, is_planned: bool) -> dict[str, Any]:
        """Say what became of the job between two worlds that were whole."""
        worlds = [world_of(self._samples, number) for number in range(before.generation, after.generation + 1)]
        worlds = [world for world in worlds if world.num_logs]  # some generations never came to train
        gap, repeated, newest, last = 0.0, 0, 0, 0.0
        for world in worlds:
            if newest:
                repeated += max(0, newest - world.resumed_step)
                gap = max(gap, (world.began or last) - last)
            newest, last = max(newest, world.newest), max(last, world.last_done or 0.0)
        changes = self._changes(before.generation)
        depths = [str(each.get("depth")) for each in changes]
        problems = []
        if any(depth != "memory" for depth in depths):
            problems.append(f"not in memory: {[each.get('depth_reason', '') for each in changes]}")
        allowed = 0 if is_planned else len(changes)
        if repeated > allowed:
            problems.append(f"{repeated} steps were computed again")
        return {
            "generations": after.generation - before.generation,
            "depths": depths,
            "causes": [f"{each['kind']}: {each['cause']}" for each in changes],
            "gap_s": round(gap, 2),
            "repeated": repeated,
            "problem": "; ".join(problems),
        }

    def _unscheduled_s(self, since: float) -> float:
        waits = [0.0]
        for pod in self._job.until("the pods", self._job.pods):
            made_at = _unix_time(pod["metadata"]["creationTimestamp"])
            placed = [each for each in pod["status"].get("conditions", []) if each["type"] == "PodScheduled"]
            if made_at >= int(since):
                waits += [_unix_time(each["lastTransitionTime"]) - made_at for each in placed]
        return max(waits)

    def _changes(self, generation: int) -> list[dict[str, Any]]:
        history: list[dict[str, Any]] = self._job.until("the history", self._job.history)
        return [each for each in history if each["generation"] > generation]


def _unix_time(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
