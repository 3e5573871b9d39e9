"""Builds the calls to agents from the actions of a plan. Makes no call itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ..core.actions import Action, AssignSpare, PrepareWorkers, ShutDownAgent, StartWorkers, StopWorkers
from ..core.names import master_port
from ..core.next_generation import next_of
from ..core.record import Record, RestartMode
from ..core.snapshot import AgentState, ObservedAgent, ObservedPod
from .agent_ports import AgentStatuses
from .commands import Command
from .encoded_json import EncodedJson
from .polled_agent import Address

# The list of addresses is only sent up to this many pods, and up to this many entries.
MAX_RANK_IPS = 512
MAX_RANK_ENTRIES = 16_384


AgentAction = StartWorkers | AssignSpare | PrepareWorkers | StopWorkers | ShutDownAgent
Call = tuple[str, tuple[str, ...], dict[str, Any] | None]
"""Path, key (see Command) and body."""


@dataclass(frozen=True)
class CommandBuilder:
    """Builds the calls of one decision. pods: the job's, by name. address: gives the address of a pod's agent.

    Parts that all calls share are computed once and are the same object in all of them, so that CommandSender serializes them once.
    """

    spec: Mapping[str, Any]
    pods: Mapping[str, ObservedPod]
    record: Record
    statuses: AgentStatuses
    address: Callable[[ObservedPod], Address]

    def build(self, action: Action) -> Command | None:
        """Give the call for an action; None if it calls no agent or the pod has no address yet."""
        if not isinstance(action, AgentAction):
            return None
        pod = self.pods.get(action.pod)
        if pod is None or not pod.ip:
            return None
        fact = self.statuses.fact(pod.uid)
        path, key, body = _CALLS[type(action)](self, action, fact)
        if body is not None and fact.generation is None:  # the original agent does not know these fields
            for ours in ("generation", "leaves", "next"):
                body.pop(ours, None)
        return Command(pod.uid, self.address(pod), path, body, key)

    def _start_workers(self, action: StartWorkers, fact: ObservedAgent) -> Call:
        if action.is_early:
            following = self._next
            body = following._start(action.group_rank, fact) | {"early": True}
            return "/start", ("start", str(following.record.generation)), body
        return "/start", ("start", str(self.record.generation)), self._start(action.group_rank, fact)

    def _assign_spare(self, action: AssignSpare, fact: ObservedAgent) -> Call:
        return "/start", ("spare", str(self.record.generation)), self._start(action.number, fact) | {"spare": True}

    def _prepare_workers(self, action: PrepareWorkers, fact: ObservedAgent) -> Call:
        generation = self.record.generation
        body = {"nnodes": len(self.record.members), "generation": generation, **self._store}
        return "/prepare", ("prepare", str(generation)), body

    def _stop_workers(self, action: StopWorkers, fact: ObservedAgent) -> Call:
        said = f"{action.generation} {action.graceful} {action.reach} {action.keeps} {action.leaves} {action.next_rank}"
        return "/stop", ("stop", said), self._stop(action, fact)

    def _shut_down(self, action: ShutDownAgent, fact: ObservedAgent) -> Call:
        return "/shutdown", ("shutdown",), None

    def _start(self, group_rank: int, fact: ObservedAgent) -> dict[str, Any]:
        # Workers keep state that other workers may need; so do newcomers to a job with such workers.
        is_kept = fact.restart_mode == RestartMode.IN_PROCESS or self._keeps_state
        return {
            "rank": group_rank,
            "nnodes": len(self.record.members),
            "faultCount": self.record.generation - 1,
            **self._store,
            "log_monitoring_configuration": (self.spec.get("runPolicy") or {}).get("logMonitoringConfiguration")
            or None,
            "ipVersion": None,
            "rankIps": self._rank_ips if is_kept else None,
            "worker_data": self._worker_data if is_kept else None,
            "spare": False,
            "progress": self._progress,
            "generation": self.record.generation,
        }

    def _stop(self, action: StopWorkers, fact: ObservedAgent) -> dict[str, Any]:
        body: dict[str, Any] = {"is_graceful": action.graceful, "generation": action.generation}
        if action.graceful:
            body["timeout"] = action.timeout_s
            if action.leaves is not None:
                body["leaves"] = action.leaves
            if action.next_rank is not None:
                # Of what workers leave for each other nothing is known before they stop: agents that have any do not begin by themselves.
                body["next"] = self._next._start(action.next_rank, fact) | {"worker_data": None}
            if fact.memory_state:
                mode = RestartMode.IN_PROCESS if action.keeps else RestartMode.PROCESSES
                body["restart_mode"] = mode.value
        elif action.reach is not RestartMode.IN_PROCESS or (action.keeps and self._may_keep(fact)):
            # Absent, it means in process to an agent that was started for it, and new processes to any other.
            body["restart_mode"] = action.reach.value
        return body

    def _may_keep(self, fact: ObservedAgent) -> bool:
        """Whether an agent may keep workers. It does not say so before the successors of dead ones have announced it, too."""
        return bool(fact.memory_state) or fact.state in (AgentState.RUNNING, AgentState.STOPPING)

    @cached_property
    def _next(self) -> CommandBuilder:
        """Build the calls of the generation that follows the drain."""
        following = next_of(self.record)
        assert following is not None
        record = replace(
            self.record, generation=following.generation, members=following.members, master_addr=following.master_addr,
            agents_serve_store=following.agents_serve_store,
        )  # fmt: skip
        return replace(self, record=record)

    @cached_property
    def _keeps_state(self) -> bool:
        return any(self.statuses.fact(pod.uid).memory_state for pod in self._members)

    @cached_property
    def _store(self) -> dict[str, Any]:
        """Give where the workers of the present generation meet."""
        store = {"master_addr": self.record.master_addr, "master_port": master_port(self.record.generation)}
        first = next((pod for pod in self._members if pod.id == self.record.members[0]), None)
        if self.record.agents_serve_store and first is not None:
            store["store_port"] = self.address(first).port
        return store

    @cached_property
    def _progress(self) -> dict[str, Any]:
        return self.statuses.progress((pod.uid for pod in self.pods.values()), self.record.generation)

    @cached_property
    def _worker_data(self) -> EncodedJson | list[Any] | None:
        return self.statuses.worker_data(pod.uid for pod in self._members)

    @cached_property
    def _members(self) -> list[ObservedPod]:
        by_id = {pod.id: pod for pod in self.pods.values()}
        return [by_id[member] for member in self.record.members if member in by_id]

    @cached_property
    def _rank_ips(self) -> list[dict[str, Any]] | None:
        """Give the address of each global rank, or of each group rank if the workers per pod are not a number."""
        members = self._members
        if len(members) > MAX_RANK_IPS:
            return None
        text = str(self.spec.get("nprocPerNode") or "")
        per_pod = int(text) if re.fullmatch(r"[1-9][0-9]{0,3}", text) else 1
        if len(members) * per_pod > MAX_RANK_ENTRIES:
            return None
        addresses = [pod.ip for pod in members for _ in range(per_pod)]
        return [{"rank": rank, "ip": ip} for rank, ip in enumerate(addresses)]


_CALLS: Mapping[type[AgentAction], Callable[[CommandBuilder, Any, ObservedAgent], Call]] = {
    StartWorkers: CommandBuilder._start_workers,
    AssignSpare: CommandBuilder._assign_spare,
    PrepareWorkers: CommandBuilder._prepare_workers,
    StopWorkers: CommandBuilder._stop_workers,
    ShutDownAgent: CommandBuilder._shut_down,
}
