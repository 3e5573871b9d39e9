"""Calls that operators and agents sign: both sides as they are shipped, and what listeners and impostors on the network do."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from tests.sim.invariant_state import Violation

from elastipod_agent.authentication import KEY_ENV, TOKEN_ENV
from elastipod_agent.authentication import Credentials as AgentCredentials
from elastipod_agent.server.http import admit_everybody
from elastipod_agent.server.http_messages import Head, RequestRefused
from elastipod_operator.agents.authentication import AuthenticationFailed, Authenticators, Credentials, Response

if TYPE_CHECKING:
    from tests.sim.objects import SimPod

KEPT_CALLS = 20
FORGED = b'{"status": "faulted", "reason": "WorkerCrash", "message": "I am the agent"}'


def secret_of(container: Mapping[str, Any]) -> str:
    """Give the Secret that a container takes its key from; "" for none."""
    refs = (one.get("valueFrom", {}).get("secretKeyRef", {}) for one in container.get("env") or ())
    return next((ref["name"] for ref in refs if ref), "")


def agent_credentials(pod: SimPod, secret: Mapping[str, str]) -> AgentCredentials:
    """Give what the agent of a pod finds in its environment."""
    entries = {
        one["name"]: one["valueFrom"]["secretKeyRef"]["key"] for one in pod.containers[0]["env"] if "valueFrom" in one
    }
    return AgentCredentials(secret.get(entries[KEY_ENV], ""), secret.get(entries[TOKEN_ENV], ""), pod.name)


class Network:
    """What lies between the operators and the agents of a job. Somebody listens, and sometimes answers in an agent's place."""

    def __init__(self, met: Counter[str], now: Callable[[], float]) -> None:
        self._met = met
        self._now = now
        self._heard: deque[tuple[SimPod, Head]] = deque(maxlen=KEPT_CALLS)
        self.impostors: dict[str, float] = {}
        """Until when somebody else answers at the address of a pod, by UID."""
        self.has_foreign_secret = False
        """Whether somebody else gave the agents their key."""

    def call(
        self,
        pod: SimPod,
        known: Authenticators,
        credentials: Credentials,
        method: str,
        target: str,
        body: Any,
        answer: Any,
    ) -> bool:
        """Make a call as the operator does; False if it does not believe the answer, or is refused. Raises Violation."""
        is_forged = self.is_impersonated(pod)
        if not (is_forged or credentials.key or credentials.token) and pod.agent and pod.agent.admit is admit_everybody:
            return True  # nothing is signed and nothing checked
        sent, told = json.dumps(body).encode(), json.dumps(answer).encode()

        async def send(headers: dict[str, str]) -> Response:
            if credentials.key and any(credentials.key in value for value in headers.values()):
                raise Violation(f"the key of the job is sent to {pod.name}")
            if credentials.token and any(credentials.token in value for value in headers.values()):
                raise Violation(f"the token of the job is sent to {pod.name}, which has not asked for one")
            if is_forged:
                return Response(200, {}, FORGED)
            return self._deliver(
                pod, Head(method, target, {name.lower(): value for name, value in headers.items()}, True), sent, told
            )

        try:
            _finish(known.of(credentials).exchange(method, target, sent, send))
        except AuthenticationFailed as failure:
            if not is_forged and not self.has_foreign_secret:
                raise Violation(
                    f"the agent of {pod.name} and the operator do not know each other: {failure}"
                ) from failure
            self._met[f"network: {'an impostor is found out' if is_forged else 'a key of somebody else'}"] += 1
            return False
        if is_forged:
            raise Violation(f"the operator believes an impostor in the place of {pod.name}")
        self._met["network: signed calls"] += bool(credentials.key)
        return True

    def is_impersonated(self, pod: SimPod) -> bool:
        """Whether somebody else answers at the address of a pod."""
        return self.impostors.get(pod.uid, 0.0) > self._now()

    def _deliver(self, pod: SimPod, head: Head, sent: bytes, told: bytes) -> Response:
        assert pod.agent is not None
        try:
            admission = pod.agent.admit(head)
            admission.check_body(sent)
        except RequestRefused as refused:
            headers = {name.lower(): value for name, value in refused.response.headers.items()}
            return Response(refused.response.status, headers, b"")
        if "authorization" in head.headers:
            self._heard.append((pod, head))
        return Response(200, {name.lower(): value for name, value in admission.answer_headers(200, told).items()}, told)

    def replay(self) -> int:
        """Send what was heard once more; gives how many calls. Raises Violation for one that an agent takes."""
        living = [(pod, head) for pod, head in self._heard if pod.agent is not None and pod.agent.alive]
        for pod, head in living:
            assert pod.agent is not None
            try:
                pod.agent.admit(head)
            except RequestRefused:
                continue
            raise Violation(f"the agent of {pod.name} takes a call for the second time: {head.method} {head.target}")
        self._met["network: replayed calls are refused"] += len(living)
        return len(living)


def _finish(coroutine: Coroutine[Any, Any, Response]) -> Response:
    """Run a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        found: Response = end.value
        return found
    raise AssertionError("it waits")
