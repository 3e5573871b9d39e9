"""The calls of one operator to agents: they travel by themselves, get lost, come late, and may be its last ones."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from tests.sim.cluster import Cluster
from tests.sim.invariants import InvariantChecker
from tests.sim.kernel import Kernel, Script
from tests.sim.objects import SimPod
from tests.sim.process import Wait

from elastipod_operator.agents.commands import SETTLE_S, Command
from elastipod_operator.core.names import pod_id_of

if TYPE_CHECKING:
    from tests.sim.job_views import JobView


class SimCommandSender:
    """What the operator's `CommandSender` is to its Reconciler."""

    def __init__(
        self, shell: JobView, kernel: Kernel, rng: Random, cluster: Cluster, checker: InvariantChecker
    ) -> None:
        self._shell = shell
        self._kernel = kernel
        self._rng = rng
        self._cluster = cluster
        self._checker = checker
        self._sent: dict[tuple[object, ...], float] = {}
        self.is_ending = False
        """Whether the job of the commands that are sent next is being deleted."""

    async def send(self, commands: list[Command]) -> list[str]:
        now = self._kernel.now
        self._sent = {key: at for key, at in self._sent.items() if now - at < SETTLE_S}
        due = [command for command in commands if (command.pod_uid, *command.key) not in self._sent]
        is_ending = self.is_ending
        problems: list[str] = await Wait(self._send_all(due, is_ending=is_ending)) if due else []
        return problems

    def _send_all(self, due: list[Command], *, is_ending: bool) -> Script:
        problems = []
        for command in due:
            yield from self._shell.may_die()
            if not self._send(command, is_ending=is_ending):
                problems.append(f"POST {command.path} was not answered")
        yield self._rng.uniform(0.002, 0.02)
        return problems

    def _send(self, command: Command, *, is_ending: bool) -> bool:
        """Let a call travel; gives whether its answer came back."""
        pod = self._cluster.pods.get(command.pod_uid)
        if pod is None:
            return False
        found = pod_id_of(pod.labels)
        assert found is not None
        is_late = self._shell.held_until > 0.0  # it stood still; others have decided since
        self._checker.called(command.path, found, command.body, ending=is_ending, by_the_past=is_late)
        if command.path == "/shutdown":
            self._shell.note_sent_away(pod.name, pod.uid)
            if is_late and pod.agent is not None:  # this call has no generation
                self._checker.touched(pod.name, self._kernel.now + 60.0)
                self._cluster.training.touched(pod.agent, "a /shutdown from the past")
        is_answered = self._travels(pod, command)
        if is_answered:
            self._sent[(command.pod_uid, *command.key)] = self._kernel.now
        return is_answered

    def _travels(self, pod: SimPod, command: Command) -> bool:
        """A late call arrives all the same, and so does one whose answer is lost."""
        if pod.agent is None or not pod.hears():
            return False
        agent, network, known = pod.agent, self._cluster.network, self._shell.authenticators
        if not network.call(pod, known, command.address.credentials, "POST", command.path, command.body, {}):
            return False
        is_lossy = self._cluster.goes_on("lossy_calls")
        is_late = is_lossy and self._rng.random() < 0.3
        is_unanswered = not pod.answers() or is_late or (is_lossy and self._rng.random() < 0.3)
        self._checker.met["call: late"] += is_late
        self._checker.met["call: answer lost"] += is_unanswered

        def arrive() -> None:
            if not agent.alive or not pod.node_runs():
                return
            if command.path == "/start":
                agent.start(command.body or {})
            elif command.path == "/prepare":
                agent.prepare(command.body or {})
            elif command.path == "/stop":
                agent.stop(command.body or {})
            else:
                agent.shut_down()

        self._kernel.after(self._rng.uniform(3.0, 20.0) if is_late else self._rng.uniform(0.001, 0.02), arrive)
        return not is_unanswered
