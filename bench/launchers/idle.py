"""What an agent costs beside a worker that trains: memory and processor, of everything but the worker."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

from bench.common.machine import command_line, cpu_s, descendants, memory
from bench.common.processes import Failed, Process, Processes
from bench.launchers.client import Client
from bench.launchers.nodes import AgentNodes, TorchrunNodes
from bench.launchers.session import Session, until_settled
from bench.launchers.small_operator import SmallOperator

HEARTBEAT_S = 4.5  # how long the real operator's long poll waits at most: that is its heartbeat
STEADY_POLL_S = 5.0  # how often it asks an agent that knows no long polling


class IdleSession(Session):
    """One node whose worker trains for a while. seconds: how long the processor is watched."""

    seconds = 30.0

    def run_agents(self, processes: Processes) -> None:
        operator, over = SmallOperator(), threading.Event()
        try:
            with self._event("idle"):
                nodes = AgentNodes(self.launcher, processes, self.folder)
                node = nodes.begin(0)
                self.job.agents = [node.process]
                nodes.until_ready(node)
                until_settled(node.process)
                self.job.new_world(1, operator.start([node.client]))
                heartbeat = threading.Thread(
                    target=_heartbeats, args=(node.client, over), name="heartbeat", daemon=True
                )
                heartbeat.start()
                self._watch(node.process)
        finally:
            over.set()
            operator.close()

    def run_torchrun(self, processes: Processes) -> None:
        with self._event("idle"):
            since = time.monotonic()
            process = TorchrunNodes(self.launcher, processes, self.folder, "1:1", own_store=False).begin(0)
            self.job.agents = [process]
            self.job.new_world(1, since)
            self._watch(process)

    def _watch(self, agent: Process) -> None:
        self.job.train()
        watched = _all_but_workers(agent, self.job.world[0].pid)
        before, began = {pid: cpu_s(pid) for pid in watched}, time.monotonic()
        time.sleep(self.seconds)
        used, lasted = sum(cpu_s(pid) - before[pid] for pid in watched), time.monotonic() - began
        if changed := set(_all_but_workers(agent, self.job.world[0].pid)) ^ set(watched):
            raise Failed(f"{agent.name} did not keep its processes: {[command_line(pid) for pid in sorted(changed)]}")
        self._add("agent private", memory([agent.pid]).private_mib)
        self._add("agent total", memory(watched).proportional_mib)
        self._add("node total", memory(descendants(agent.pid)).proportional_mib)
        self._add("agent cpu", 100 * used / lasted)


def _all_but_workers(agent: Process, worker: int) -> list[int]:
    """Give the agent and what it keeps beside its worker, such as the server that workers are forked from."""
    workers = set(descendants(worker))
    return [pid for pid in descendants(agent.pid) if pid not in workers]


def _heartbeats(client: Client, over: threading.Event) -> None:
    """Ask as the real operator asks an agent that has nothing to tell."""
    with suppress(OSError, Failed):
        while not over.is_set():
            if client.speaks_ours:
                client.changed(client.status()["version"], HEARTBEAT_S)
            else:
                client.status()
                over.wait(STEADY_POLL_S)
