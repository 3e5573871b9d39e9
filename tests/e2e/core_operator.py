"""The operator's own core for agents on this machine: what it decides from their answers is recorded, then called.

There is no API server: pods are as the test says, and the record is decoded and encoded again in every pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, cast

from tests.agent_client import until
from tests.e2e.agent_process import AgentProcess
from tests.patience import PATIENCE_S
from tests.unit.core.builders import job, observed, pod

from elastipod_operator.agents.agent_ports import AgentStatuses
from elastipod_operator.agents.command_builder import CommandBuilder
from elastipod_operator.agents.encoded_json import EncodedJson
from elastipod_operator.agents.polled_agent import Address
from elastipod_operator.agents.status import parse_status
from elastipod_operator.core.actions import Action, DeletePod
from elastipod_operator.core.history import HistoryEntry
from elastipod_operator.core.plan import plan
from elastipod_operator.core.record import Record
from elastipod_operator.core.record_codec import decode, encode
from elastipod_operator.core.snapshot import ObservedAgent, ObservedPod, Policy


class Answers:
    """What the agents answered last, by UID of the pod."""

    def __init__(self) -> None:
        self.facts: dict[str, ObservedAgent] = {}

    def fact(self, pod_uid: str) -> ObservedAgent:
        return self.facts.get(pod_uid, ObservedAgent())

    def progress(self, pod_uids: Iterable[str], generation: int = 0) -> dict[str, Any]:
        return {}

    def worker_data(self, pod_uids: Iterable[str]) -> EncodedJson | list[Any] | None:
        return None


class CoreOperator:
    """Decides for a job with one pod for each agent. policy: what the user wishes, which a test may change.

    calls: all that was called, as (ordinal, path, body). generation: the job's newest one before it starts.
    """

    def __init__(self, agents: list[AgentProcess], policy: Policy, generation: int) -> None:
        self.policy = policy
        self.record: Record | None = None
        self.history: list[HistoryEntry] = []
        self.calls: list[tuple[int, str, Mapping[str, Any]]] = []
        self._agents = dict(enumerate(agents))
        self._pods = {n: pod(n, ip="127.0.0.1", generation=generation) for n in self._agents}
        self._answers = Answers()
        now = datetime.now(UTC)
        for each in self._pods.values():
            self._answers.facts[each.uid] = ObservedAgent(trying_since=now)

    def must_go(self, ordinal: int) -> None:
        """Announce the end of a pod, as a notice for its node does: it is not deleted yet."""
        self._pods[ordinal] = replace(self._pods[ordinal], disruption="a test")

    def add(self, agent: AgentProcess) -> None:
        """Let another pod be there, with the next ordinal."""
        ordinal = max(self._agents) + 1
        self._agents[ordinal] = agent
        self._pods[ordinal] = added = pod(
            ordinal, ip="127.0.0.1", generation=self.record.generation if self.record else 0
        )
        self._answers.facts[added.uid] = ObservedAgent(trying_since=datetime.now(UTC))

    @property
    def has_ended(self) -> bool:
        return self.record is not None and bool(self.record.outcome)

    def act(self) -> None:
        """Make one reconcile pass."""
        seen = observed(
            job(decode(encode(self.record)) if self.record is not None else None, self.policy),
            [(each, self._ask(n, each)) for n, each in sorted(self._pods.items())],
            now=datetime.now(UTC),
        )
        todo = plan(seen)
        self.record = todo.record
        self.history += todo.history
        pods, answers = {each.name: each for each in self._pods.values()}, cast(AgentStatuses, self._answers)
        builder = CommandBuilder({}, pods, todo.record, answers, self._address)
        for action in todo.actions:
            self._do(action, builder)

    def act_until(self, condition: Callable[[], object], what: str) -> None:
        """Make passes until a condition holds."""

        def passed() -> object:
            self.act()
            return condition()

        until(passed, what, PATIENCE_S)

    def _ask(self, ordinal: int, seen: ObservedPod) -> ObservedAgent:
        agent, before = self._agents[ordinal], self._answers.fact(seen.uid)
        if agent.process.poll() is not None:
            self._pods[ordinal] = replace(seen, phase="Succeeded")
            return before
        try:
            fact = parse_status(agent.status(), before, datetime.now(UTC)).fact
        except OSError:  # it leaves
            return before
        self._answers.facts[seen.uid] = fact
        return fact

    def _do(self, action: Action, builder: CommandBuilder) -> None:
        command = builder.build(action)
        if isinstance(action, DeletePod):
            ordinal = next((n for n, each in self._pods.items() if each.name == action.name), None)
            if ordinal is not None and self._agents[ordinal].process.poll() is not None:
                del self._pods[ordinal]
        elif command is not None:
            ordinal = next(n for n, each in self._pods.items() if each.uid == command.pod_uid)
            if self._agents[ordinal].process.poll() is None:
                self.calls.append((ordinal, command.path, command.body or {}))
                with suppress(OSError):  # it leaves; an operator calls again, too
                    self._agents[ordinal].call("POST", command.path, command.body)

    def _address(self, pod: ObservedPod) -> Address:
        return Address("job", pod.ip, self._agents[pod.id.ordinal].port)
