"""The operator's command sender as it is shipped, over the modelled network: calls get lost, come late, and may be its last ones."""

from __future__ import annotations

import json
from random import Random
from typing import TYPE_CHECKING, Any

from tests.sim.agents import SimAgent
from tests.sim.invariant_state import Violation
from tests.sim.kernel import Kernel, Script
from tests.sim.objects import SimPod
from tests.sim.process import Wait
from tests.sim.status_cache import NO_SESSION

from elastipod_agent.core.fences import CallDecision, CallVerdict
from elastipod_operator.agents.authentication import AuthenticationFailed, Authenticators, Response
from elastipod_operator.agents.commands import CALL_TIMEOUT, Command, CommandSender
from elastipod_operator.core.names import pod_id_of

if TYPE_CHECKING:
    from tests.sim.job_views import JobView, Views

UNAUTHORIZED = 401


class SimCommandSender(CommandSender):
    """The sender of one operator. Calls for several jobs at once, or in the name of another job, are a Violation."""

    def __init__(self, views: Views, kernel: Kernel, rng: Random, known: Authenticators) -> None:
        super().__init__(NO_SESSION, known)
        self._views = views
        self._kernel = kernel
        self._rng = rng
        self._known = known

    async def send(self, commands: list[Command]) -> list[str]:
        view, _ = self._views.of_pods(command.pod_uid for command in commands)
        wrong = [one.pod_uid for one in commands if one.address.job != view.cluster.job_uid]
        if wrong:
            raise Violation(f"calls for another job go to the agents of {wrong}")
        return await super().send(commands)

    async def _exchange(self, command: Command, body: bytes) -> Response:
        view = self._views.of_pod(command.pod_uid)
        status: int = await Wait(self._call_of(view, command, json.loads(body) if body else None))
        if status == UNAUTHORIZED:
            raise AuthenticationFailed("the answer is not from the job's agent")
        return Response(status, {}, b"")

    def _call_of(self, view: JobView, command: Command, body: dict[str, Any] | None) -> Script:
        """Make a call; gives the status of its answer. Raises OSError."""
        yield from view.may_die()
        pod = view.cluster.pods.get(command.pod_uid)
        if pod is not None:
            self._note(view, pod, command, body)
        if pod is None or pod.agent is None or not pod.hears():
            yield from _fail(pod)
        assert pod is not None
        credentials = command.address.credentials
        if not view.cluster.network.call(pod, self._known, credentials, "POST", command.path, body, {}):
            return UNAUTHORIZED
        return (yield from self._travel(view, pod, command.path, body or {}))

    def _note(self, view: JobView, pod: SimPod, command: Command, body: dict[str, Any] | None) -> None:
        found = pod_id_of(pod.labels)
        assert found is not None
        is_late = view.held_until > 0.0  # it stood still; others have decided since
        view.checker.called(command.path, found, body, ending=view.is_ending, by_the_past=is_late)
        if command.path == "/shutdown":
            view.note_sent_away(pod.name, pod.uid)
            if is_late and pod.agent is not None:  # this call has no generation
                view.checker.touched(pod.name, self._kernel.now + 60.0)
                view.cluster.training.touched(pod.agent, "a /shutdown from the past")

    def _travel(self, view: JobView, pod: SimPod, path: str, body: dict[str, Any]) -> Script:
        """A call whose caller does not wait any more arrives all the same, and so does one whose answer is lost."""
        agent, cluster = pod.agent, view.cluster
        assert agent is not None
        is_lossy = cluster.goes_on("lossy_calls")
        is_late = is_lossy and self._rng.random() < 0.3
        is_unanswered = not pod.answers() or is_late or (is_lossy and self._rng.random() < 0.3)
        cluster.met["call: late"] += is_late
        cluster.met["call: answer lost"] += is_unanswered
        delay_s = self._rng.uniform(3.0, 20.0) if is_late else self._rng.uniform(0.001, 0.02)
        decisions: list[CallDecision | None] = []

        def arrive() -> None:
            if agent.alive and pod.node_runs():
                decisions.append(_take(agent, path, body))

        self._kernel.after(delay_s, arrive)
        if is_unanswered:
            yield float(CALL_TIMEOUT.total or 0)
            raise TimeoutError
        yield delay_s + self._rng.uniform(0.001, 0.01)
        if not decisions:
            raise ConnectionResetError("the agent closed the connection")
        (decision,) = decisions
        return 409 if decision is not None and decision.verdict is CallVerdict.REFUSE else 200


def _take(agent: SimAgent, path: str, body: dict[str, Any]) -> CallDecision | None:
    if path == "/shutdown":
        agent.shut_down()
        return None
    return {"/start": agent.start, "/prepare": agent.prepare, "/stop": agent.stop}[path](body)


def _fail(pod: SimPod | None) -> Script:
    """Wait for an answer that does not come. Raises OSError."""
    if pod is not None and pod.refuses():
        yield 0.01
        raise ConnectionRefusedError
    is_connected = pod is not None and pod.agent is not None and pod.agent.hangs()
    yield float((CALL_TIMEOUT.total if is_connected else CALL_TIMEOUT.sock_connect) or 0)
    raise TimeoutError
