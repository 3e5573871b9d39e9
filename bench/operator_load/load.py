"""The whole that is measured: control plane, kwok, fake agents and the operator, as processes, and what they say."""

from __future__ import annotations

import asyncio
import os
import resource
import secrets
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
from bench.common.machine import cpu_s, resident_mib
from bench.common.processes import Failed, Process, Processes, free_port
from bench.common.samples import quantile
from bench.operator_load.api import ApiClient
from bench.operator_load.cluster import LoadCluster, cluster, kwok_command, node
from bench.operator_load.jobs import JOBS
from bench.operator_load.timed_operator import read_times

T = TypeVar("T")
OPEN_FILES = 100_000
TIMES = "operator-times"
RECONCILE, DECISION, API_WRITE, POD_ORDER = "reconcile", "decision", "api_write", "pod_order"


@dataclass(frozen=True, slots=True)
class Usage:
    """What the operator used by one moment."""

    at: float
    cpu_s: float
    rss_mib: float


@dataclass(frozen=True, slots=True)
class Times:
    """How long each thing took that the operator did in a while, in seconds: by what, writes also by their kind."""

    seconds: Mapping[str, Sequence[float]]

    def count(self, what: str) -> int:
        return len(self.seconds.get(what, ()))

    def quantile_ms(self, what: str, share: float) -> float:
        """Give the smallest time that at least this share of them do not exceed. Raises Failed where nothing was done."""
        if not self.count(what):
            raise Failed(f"the operator did no {what} in that time")
        return 1000 * quantile(self.seconds[what], share)


class Load:
    """A running whole. All waits have deadlines and raise Failed."""

    def __init__(self, made: LoadCluster, api: ApiClient, operator: Process, fleet: Process, session: aiohttp.ClientSession,
                 agent_port: int, control_port: int, times: Path) -> None:  # fmt: skip
        self.cluster = made
        self.api = api
        self.operator = operator
        self.agent_port = agent_port
        self._fleet = fleet
        self._session = session
        self._control = f"http://127.0.0.1:{control_port}"
        self._times = times

    async def control(self, method: str, path: str) -> dict[str, Any]:
        """Ask the fleet of agents."""
        async with self._session.request(method, self._control + path) as answer:
            value: dict[str, Any] = await answer.json()
            return value

    async def about(self, job: str = "") -> dict[str, Any]:
        """Say what happened to the pods and agents of a job, or of all."""
        return await self.control("GET", f"/about?job={job}")

    async def until(
        self, what: str, holds: Callable[[], Awaitable[T | None]], within_s: float, every_s: float = 0.1
    ) -> T:
        """Wait for a condition. Raises Failed after the deadline, or when the operator ended."""
        end = time.monotonic() + within_s
        while not (value := await holds()):
            self.operator.require_alive()
            self._fleet.require_alive()
            if time.monotonic() > end:
                raise Failed(f"waited {within_s:g} s in vain for {what}; agents: {await self.about()}")
            await asyncio.sleep(every_s)
        return value

    async def until_trains(self, name: str, pods: int, within_s: float) -> dict[str, Any]:
        """Wait until all agents of a job run, and give what is known of it."""

        async def trains() -> dict[str, Any] | None:
            seen = await self.about(name)
            return seen if seen["states"].get("running", 0) == seen["pods"] == pods else None

        # To count all agents takes the process that plays them as long as some of their answers.
        return await self.until(f"{pods} agents of {name or 'all jobs'} to run", trains, within_s, 0.1 if name else 2)

    async def create(self, body: dict[str, Any]) -> dict[str, Any]:
        return await self.api.call("POST", JOBS, body)

    async def delete(self, name: str, within_s: float = 120) -> None:
        """Delete a job and wait until its pods are gone."""
        await self.api.call("DELETE", f"{JOBS}/{name}")

        async def is_gone() -> bool:
            return bool((await self.about(name))["pods"] == 0)

        await self.until(f"the end of {name}", is_gone, within_s)

    async def usage(self) -> Usage:
        """Say what the operator used so far."""
        pid = self.operator.pid
        return Usage(at=time.monotonic(), cpu_s=cpu_s(pid), rss_mib=resident_mib(pid))

    def times(self, since: Usage, until: Usage) -> Times:
        """Give how long everything took that the operator finished between two moments."""
        return Times(read_times(self._times, since.at, until.at))


@asynccontextmanager
async def load(folder: Path, nodes: int) -> AsyncIterator[Load]:
    """Bring everything up in an empty folder with so many played nodes, and take it down at the end."""
    _allow_open_files()
    with Processes() as processes, cluster(folder / "cluster") as made:
        operator_config = made.prepare()
        agent_port, control_port, metrics_port = free_port(), free_port(), free_port()
        env = {**os.environ, "PYTHONPATH": os.getcwd()}
        operator_env = {**operator_environment(operator_config, folder), "PYTHONPATH": os.getcwd()}
        processes.start("kwok", kwok_command(made), env, folder / "kwok.log")
        command = [
            sys.executable,
            "-m",
            "bench.operator_load.fleet",
            str(made.kubeconfig),
            str(agent_port),
            str(control_port),
            operator_env["ELASTIPOD_INSTALL_KEY_FILE"],
        ]
        fleet = processes.start("the fleet of agents", command, env, folder / "fleet.log")
        async with ApiClient(made.kubeconfig) as api, aiohttp.ClientSession() as session:
            await api.all_of(*(("POST", "/api/v1/nodes", node(f"node-{n}")) for n in range(nodes)))
            operator = processes.start(
                "the operator",
                [*timed_command(folder / TIMES), *operator_command(metrics_port)[3:]],
                operator_env,
                folder / "operator.log",
            )
            it = Load(made, api, operator, fleet, session, agent_port, control_port, folder / TIMES)

            async def is_up() -> bool:
                with suppress(aiohttp.ClientError):
                    await it.about()
                    async with session.get(f"http://127.0.0.1:{metrics_port}/readyz") as answer:
                        said: str = await answer.text()
                        return "leading" in said
                return False

            async def nodes_ready() -> bool:
                listed = await api.call("GET", "/api/v1/nodes")
                conditions = [n["status"].get("conditions") or () for n in listed["items"]]
                return all(any(c["type"] == "Ready" and c["status"] == "True" for c in one) for one in conditions)

            await it.until("operator and agents to be up", is_up, 60)
            await it.until("kwok to play the nodes", nodes_ready, 120, every_s=1)
            yield it


def operator_command(metrics_port: int) -> list[str]:
    """Give the command line of the real operator."""
    return [sys.executable, "-m", "elastipod.cli", "operator", f"--metrics-port={metrics_port}", "--log-level=warning"]


def timed_command(times: Path) -> list[str]:
    """Give the beginning of a command line of elastipod whose process writes down the times of what it does."""
    return [sys.executable, "-m", "bench.operator_load.timed_operator", str(times)]


def operator_environment(kubeconfig: Path, folder: Path) -> dict[str, str]:
    """Give its environment: its own user, an install key as the chart makes one."""
    key = folder / "install-key"
    key.touch(mode=0o600)
    key.write_text(secrets.token_hex(32) + "\n")
    return {
        **os.environ,
        "KUBECONFIG": str(kubeconfig),
        "ELASTIPOD_INSTALL_KEY_FILE": str(key),
        "POD_NAMESPACE": "default",
    }


def _allow_open_files() -> None:
    """Every agent is a connection; processes that are started take the limit over. Left as it is without the right."""
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))
