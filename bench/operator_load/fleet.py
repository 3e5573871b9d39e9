"""A process that serves the agents of all played pods: python -m bench.operator_load.fleet KUBECONFIG AGENT_PORT CONTROL_PORT.

Every address of 127/8 is this machine's own, so one socket serves all pods: the address that was called tells the agent.
A watch of the pods tells which agents there are. The benchmark asks at the control port what happened, and when.
"""

from __future__ import annotations

import asyncio
import gc
import json
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from aiohttp import web
from bench.operator_load.api import ApiClient
from bench.operator_load.fake_agent import FakeAgent
from bench.operator_load.jobs import BARE_LABEL

from elastipod_agent.authentication import Credentials, MacGuard
from elastipod_agent.core.states import AgentState
from elastipod_agent.server.http import Admission
from elastipod_agent.server.http_messages import Head, RequestRefused
from elastipod_operator.core.names import LABEL_JOB, LABEL_UID
from elastipod_operator.kube.job_keys import JobKeys, key_secret_of, read_install_keys

CRASH = "ValueError: the benchmark did it"
BACKLOG = 4096
HEAD_LIMIT = 16 * 1024


@dataclass(slots=True)
class Pod:
    """A played pod: when it was first seen and when it ran (monotonic), and its agent once it has an address.

    guard: admits the calls that are signed with the pod's key, None where it has none. Addresses are given again as soon as a
    pod is gone, so a call that was meant for another pod must not be taken.
    """

    job: str
    added_at: float
    ran_at: float = 0.0
    address: str = ""
    agent: FakeAgent | None = None
    guard: MacGuard | None = None
    connections: set[Connection] = field(default_factory=set)


@dataclass(slots=True)
class Starts:
    """The /start calls of one generation of a job that were acted on."""

    count: int = 0
    first: float = 0.0
    last: float = 0.0
    ranks: set[int] = field(default_factory=set)


class Fleet:
    """All pods, and what happened to their agents."""

    def __init__(self, keys: JobKeys) -> None:
        self._keys = keys
        self.pods: dict[str, Pod] = {}
        self.by_job: dict[str, dict[str, Pod]] = {}
        self.by_address: dict[str, Pod] = {}
        self.starts: dict[str, dict[int, Starts]] = {}
        self.requests: dict[str, int] = {}
        self.is_holding = False

    # -- from the watch

    def take(self, kind: str, body: Mapping[str, Any]) -> None:
        """Take an event of the watch."""
        meta, status = body["metadata"], body.get("status") or {}
        uid = meta["uid"]
        if kind == "DELETED":
            self._forget(uid)
            return
        pod = self.pods.get(uid)
        if pod is None:
            pod = self.pods[uid] = Pod(_group(meta.get("labels") or {}), time.monotonic())
            self.by_job.setdefault(pod.job, {})[uid] = pod
        if pod.agent is None and status.get("podIP") and status.get("phase") == "Running":
            if before := self.by_address.get(status["podIP"]):
                self._close(before)
            pod.ran_at, pod.address = time.monotonic(), status["podIP"]
            pod.agent = FakeAgent(held=self.is_holding)
            pod.guard = self._guard_of(body)
            self.by_address[pod.address] = pod

    def _guard_of(self, body: Mapping[str, Any]) -> MacGuard | None:
        """Give what the agent of a pod admits calls with: it holds the key that is in the pod's Secret."""
        meta, container = body["metadata"], body["spec"]["containers"][0]["name"]
        labels, secret = meta.get("labels") or {}, key_secret_of(body, container)
        held = self._keys.credentials(
            labels.get(LABEL_JOB, ""), labels.get(LABEL_UID, ""), meta.get("name", ""), secret
        )
        return MacGuard(Credentials(held.key, held.token, held.pod)) if held.key else None

    def _forget(self, uid: str) -> None:
        pod = self.pods.pop(uid, None)
        if pod is not None:
            self._close(pod)
            del self.by_job[pod.job][uid]
            if self.by_address.get(pod.address) is pod:
                del self.by_address[pod.address]

    def _close(self, pod: Pod) -> None:
        for connection in list(pod.connections):
            connection.abort()

    # -- from the control port

    def release(self) -> float:
        """Make all agents READY that were held back, and the later ones; gives the moment."""
        self.is_holding = False
        for pod in self.pods.values():
            if pod.agent is not None:
                pod.agent.release()
                pod_changed(pod)
        return time.monotonic()

    def crash(self, job: str, count: int) -> int:
        """Let workers of a job fail; gives how many did."""
        done = 0
        for pod in self.by_job.get(job, {}).values():
            if done < count and pod.agent is not None and pod.agent.crash(CRASH):
                pod_changed(pod)
                done += 1
        return done

    def about(self, job: str) -> dict[str, Any]:
        """Say what happened to a job; all jobs together for "" ."""
        pods = list((self.by_job.get(job, {}) if job else self.pods).values())
        ran = [pod.ran_at for pod in pods if pod.ran_at]
        starts = self.starts.get(job, {})
        return {
            "now": time.monotonic(),
            "pods": len(pods),
            "first_added": min((pod.added_at for pod in pods), default=0),
            "last_added": max((pod.added_at for pod in pods), default=0),
            "ran": len(ran),
            "last_ran": max(ran, default=0),
            "polled": sum(any(c.is_polled for c in pod.connections) for pod in pods),
            "states": _counted([pod.agent.state for pod in pods if pod.agent is not None]),
            "starts": {
                str(generation): {"count": s.count, "first": s.first, "last": s.last, "ranks": len(s.ranks)}
                for generation, s in starts.items()
            },
            "requests": self.requests,
        }


def _group(labels: Mapping[str, str]) -> str:
    """Give the job of a pod, or what the benchmark calls a set of bare pods."""
    return labels.get(LABEL_JOB) or labels.get(BARE_LABEL, "")


def _counted(states: list[AgentState]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for state in states:
        counts[state.value] = counts.get(state.value, 0) + 1
    return counts


def pod_changed(pod: Pod) -> None:
    """Answer who waits for news of a pod's agent."""
    for connection in list(pod.connections):
        connection.answer_if_newer()


class Connection(asyncio.Protocol):
    """One connection of the operator to one agent: HTTP/1.1 with keep-alive, as little of it as our operator speaks."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._buffer = b""
        self._pod: Pod | None = None
        self._after: str | None = None
        self._admission = Admission()
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        address = transport.get_extra_info("sockname")[0]
        self._pod = self._fleet.by_address.get(address)
        if self._pod is None or self._pod.agent is None:
            transport.abort()  # nobody listens there
        else:
            self._pod.connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._pod is not None:
            self._pod.connections.discard(self)

    @property
    def _agent(self) -> FakeAgent:
        assert self._pod is not None
        assert self._pod.agent is not None
        return self._pod.agent

    @property
    def is_polled(self) -> bool:
        """Whether the operator knows all about the agent and waits for news."""
        return self._after is not None

    def abort(self) -> None:
        """Drop the connection."""
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].decode("latin-1").split("\r\n")
            headers = {line.partition(":")[0].lower(): line.partition(":")[2].strip() for line in head[1:]}
            length = int(headers.get("content-length", "0"))
            if len(self._buffer) < end + 4 + length:
                return
            body = self._buffer[end + 4 : end + 4 + length]
            self._buffer = self._buffer[end + 4 + length :]
            method, target, _ = head[0].split(" ")
            try:
                self._admission = self._admitted(Head(method, target, headers, True), body)
            except RequestRefused as refused:
                self._admission = Admission()
                self._send(401, json.dumps(refused.response.body).encode(), refused.response.headers)
            else:
                self._request(method, target, body)
        if len(self._buffer) > 64 * HEAD_LIMIT:
            self.abort()

    def _admitted(self, head: Head, body: bytes) -> Admission:
        """Admit a call as an agent does (contracts, 12). Raises RequestRefused."""
        assert self._pod is not None
        if self._pod.guard is None:
            return Admission()
        admission = self._pod.guard.admit(head)
        admission.check_body(body)
        return admission

    def _request(self, method: str, target: str, body: bytes) -> None:
        agent, (path, _, query) = self._agent, target.partition("?")
        self._fleet.requests[path] = self._fleet.requests.get(path, 0) + 1
        if method == "POST":
            asked = json.loads(body) if body else {}
            code = agent.call(path, asked)
            self._send(code, agent.answer())
            if path == "/start" and code == 200 and not asked.get("spare"):
                self._note_start(asked)
            assert self._pod is not None
            pod_changed(self._pod)
            return
        fields = dict(part.partition("=")[::2] for part in query.split("&") if part)
        if fields.get("after") != str(agent.version):
            self._send(200, agent.answer())
            return
        self._after = fields["after"]
        self._timer = asyncio.get_running_loop().call_later(float(fields.get("wait", "0")), self._answer)

    def _note_start(self, asked: dict[str, Any]) -> None:
        assert self._pod is not None
        starts = self._fleet.starts.setdefault(self._pod.job, {}).setdefault(asked["generation"], Starts())
        now = time.monotonic()
        starts.count += asked["rank"] not in starts.ranks
        starts.ranks.add(asked["rank"])
        starts.first, starts.last = starts.first or now, now

    def answer_if_newer(self) -> None:
        """Answer a long poll that is held, when there is something to tell."""
        if self._after is not None and self._after != str(self._agent.version):
            self._answer()

    def _answer(self) -> None:
        self._after = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._send(200, self._agent.answer())

    def _send(self, code: int, body: bytes, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        proven = {**headers, **self._admission.answer_headers(code, body)}
        more = "".join(f"{name}: {value}\r\n" for name, value in proven.items()).encode()
        self._transport.write(
            b"HTTP/1.1 %d Said\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%s\r\n"
            % (code, len(body), more)
            + body
        )


def control(fleet: Fleet) -> web.Application:
    """Give what the benchmark asks: POST /hold, /release, /crash?job=&count=, GET /about?job=."""

    async def hold(_: web.Request) -> web.Response:
        fleet.is_holding = True
        return web.json_response({})

    async def release(_: web.Request) -> web.Response:
        return web.json_response({"at": fleet.release()})

    async def crash(request: web.Request) -> web.Response:
        at = time.monotonic()
        count = fleet.crash(request.query["job"], int(request.query.get("count", "1")))
        return web.json_response({"at": at, "count": count})

    async def about(request: web.Request) -> web.Response:
        return web.json_response(fleet.about(request.query.get("job", "")))

    application = web.Application()
    application.add_routes(
        [web.post("/hold", hold), web.post("/release", release), web.post("/crash", crash), web.get("/about", about)]
    )
    return application


async def _main(kubeconfig: Path, agent_port: int, control_port: int, install_key: str) -> None:
    fleet, loop, over = Fleet(JobKeys(read_install_keys(install_key))), asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, over.set)
    server = await loop.create_server(lambda: Connection(fleet), "0.0.0.0", agent_port, backlog=BACKLOG)  # noqa: S104
    runner = web.AppRunner(control(fleet), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", control_port).start()
    gc.disable()  # thousands of agents in one process would all wait for its garbage, which is little
    async with ApiClient(kubeconfig) as api:
        watching = asyncio.create_task(api.watch("/api/v1/pods", fleet.take))
        ending = asyncio.create_task(over.wait())
        await asyncio.wait([watching, ending], return_when=asyncio.FIRST_COMPLETED)
        watching.cancel()
        ending.cancel()
        if watching.done() and not watching.cancelled():
            watching.result()
    server.close()
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))
