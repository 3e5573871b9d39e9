"""Nodes that a test plays: node objects with devices and labels, their heartbeats, and a kubelet's part in the life of pods.

The real scheduler places the pods. Each gets an address of loopback on which a modelled agent answers, with the real
agent's fences and states; training in it is nothing but a state."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import ssl
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import aiohttp
import yaml
from aiohttp import web
from tests import web_servers
from tests.api.played_agent import LEAVE_S, PlayedAgent
from tests.patience import PATIENCE_S

T = TypeVar("T")
HEARTBEAT_S = 8.0
READY = {"type": "Ready", "status": "True", "reason": "Played", "message": "a test plays this node"}
# No address is given twice: the pod that had it before may still be somebody's.
NUMBERS = itertools.count(1)
# So long after the end of its containers a real kubelet writes the phase of a pod.
PHASE_LATER_S = 1.0
P5 = {"nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "32", "hugepages-2Mi": "5120Mi", "cpu": "192", "memory": "2Ti"}
G6E = {"nvidia.com/gpu": "4", "cpu": "48", "memory": "384Gi"}
TRAINIUM = {"aws.amazon.com/neurondevice": "16", "vpc.amazonaws.com/efa": "8", "cpu": "128", "memory": "512Gi"}
PLAIN = {"cpu": "16", "memory": "32Gi"}
KINDS = {"ml.c5.4xlarge": PLAIN, "ml.p5.48xlarge": P5, "ml.g6e.12xlarge": G6E, "ml.trn1.32xlarge": TRAINIUM}


class PlayedNodes:
    """A thread that plays nodes of the given kinds and counts on a real control plane; as a context manager.

    manners: by job name, how its agents behave; "mute": nothing listens in its pods. selector: of the pods that come to
    life here; those of nobody's job are mute.
    """

    def __init__(
        self, kubeconfig: Path, counts: Mapping[str, int], manners: Mapping[str, str], selector: str = "HPJob"
    ) -> None:
        self.agents: dict[str, PlayedAgent] = {}
        """Of pods that live, by UID: a name may come back."""
        self.starts: dict[str, list[dict[str, Any]]] = {}
        """Bodies of the /start calls that each pod's agent acted on."""
        self.seen: dict[str, dict[str, Any]] = {}
        """The pods as they came to their nodes, by name; of several of one name the last."""
        self._kubeconfig = yaml.safe_load(kubeconfig.read_text(encoding="utf-8"))
        self._folder = kubeconfig.parent
        self._nodes = {f"{kind.split('.')[1]}-{n}": kind for kind, count in counts.items() for n in range(count)}
        self._strategy_warnings = manners
        self._selector = selector
        self._addresses: dict[str, str] = {}
        self._runners: dict[str, web.AppRunner] = {}
        self._busy: dict[str, asyncio.Task[None]] = {}
        self._finishing: set[str] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._servers: list[web.Server] = []
        self._problem: BaseException | None = None
        self._ends_pods = asyncio.Event()
        self._ends_pods.set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="played nodes")
        self._ready = threading.Event()

    def __enter__(self) -> PlayedNodes:
        self._thread.start()
        assert self._ready.wait(PATIENCE_S), "the nodes were not made"
        if self._problem is not None:
            raise self._problem
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._main.cancel)
        self._thread.join(PATIENCE_S)
        if error is None and self._problem is not None:
            raise self._problem

    def complete(self, jobs: set[str]) -> None:
        """Let the scripts of these jobs come to their end."""

        async def let_end() -> None:
            self._finishing |= jobs
            for agent in self.agents.values():
                if self._job_of(agent.pod) in jobs:
                    agent.complete()

        self._call(let_end())

    def end_pods(self, do_so: bool) -> None:
        """Let kubelets tell of the end of containers and end the pods that are deleted, as they do by default, or neither."""

        async def tell() -> None:
            self._ends_pods.set() if do_so else self._ends_pods.clear()

        self._call(tell())

    def add_node(self, kind: str) -> str:
        """Play one more node from now on; gives its name."""

        async def join() -> str:
            name = f"{kind.split('.')[1]}-{len(self._nodes)}"
            self._nodes[name] = kind
            await self._make_node(name, kind)
            await self._beat()
            return name

        return self._call(join())

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future: Future[T] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return future.result(PATIENCE_S)

    def _job_of(self, pod: str) -> str:
        return str(self.seen[pod]["metadata"]["labels"]["HPJob"])

    # -- in the thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._main = self._loop.create_task(self._play())
        try:
            self._loop.run_until_complete(self._main)
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            self._problem = error
        finally:
            self._ready.set()
            left = asyncio.all_tasks(self._loop)  # an answer may be under way yet
            for task in left:
                task.cancel()
            if left:
                self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self._loop.close()

    async def _play(self) -> None:
        user = self._kubeconfig["users"][0]["user"]
        cluster = self._kubeconfig["clusters"][0]["cluster"]
        context = ssl.create_default_context(cadata=_plain(cluster, "certificate-authority-data"))
        files = (self._folder / "played-nodes.crt", self._folder / "played-nodes.key")
        for path, key in zip(files, ("client-certificate-data", "client-key-data"), strict=True):
            path.touch(mode=0o600)
            path.write_text(_plain(user, key), encoding="utf-8")
        context.load_cert_chain(*files)
        connector = aiohttp.TCPConnector(ssl=context, limit=16)
        async with aiohttp.ClientSession(cluster["server"], connector=connector) as self._session:
            await asyncio.gather(*(self._make_node(name, kind) for name, kind in self._nodes.items()))
            await self._beat()
            self._ready.set()
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._heartbeats())
                    group.create_task(self._watch())
            finally:
                await self._leave()

    async def _leave(self) -> None:
        """Take all down: agents with their connections, and the nodes, whose names the next test may want."""
        beginnings = [task for what, task in self._busy.items() if what.endswith("begins")]
        if beginnings:  # a server that is only being opened cannot be closed yet
            await asyncio.wait(beginnings, timeout=LEAVE_S)
        for task in self._busy.values():
            task.cancel()
        await asyncio.gather(*self._busy.values(), return_exceptions=True)
        await asyncio.gather(*(self._close(uid) for uid in list(self._runners)))
        await asyncio.gather(*self._closing)
        await asyncio.gather(
            *(self._send("DELETE", f"/api/v1/nodes/{name}", None, fine=(404,)) for name in self._nodes)
        )
        await asyncio.sleep(0.3)
        # One that was accepted while its server closed was nobody's to close; it is gone some turns of the loop later.
        end = time.monotonic() + LEAVE_S
        while (left := [server for server in self._servers if server.connections]) and time.monotonic() < end:
            await asyncio.gather(*(server.shutdown(0) for server in left))
            await asyncio.sleep(0.1)

    async def _make_node(self, name: str, kind: str) -> None:
        labels = {
            "kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64",
            "node.kubernetes.io/instance-type": kind, "beta.kubernetes.io/instance-type": kind,
            "sagemaker.amazonaws.com/node-health-status": "Schedulable",
            "sagemaker.amazonaws.com/deep-health-check-status": "Passed", "sagemaker.amazonaws.com/compute-type": "hyperpod",
            "topology.k8s.aws/network-node-layer-3": "nn-3",
        }  # fmt: skip
        room = {**KINDS[kind], "pods": "30"}
        status = {"capacity": room, "allocatable": room, "conditions": [READY]}
        body = {"kind": "Node", "apiVersion": "v1", "metadata": {"name": name, "labels": labels}, "status": status}
        await self._send("POST", "/api/v1/nodes", body)

    async def _heartbeats(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            await self._beat()

    async def _beat(self) -> None:
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        await asyncio.gather(*(self._renew(name, now) for name in self._nodes))
        await self._say_that_they_are_ready()

    async def _renew(self, node: str, now: str) -> None:
        path = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
        lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": node}}
        lease["spec"] = {"holderIdentity": node, "leaseDurationSeconds": 40, "renewTime": now}
        if await self._send("PATCH", f"{path}/{node}", {"spec": lease["spec"]}, fine=(404,)) is None:
            await self._send("POST", path, lease, fine=(409,))

    async def _say_that_they_are_ready(self) -> None:
        """Write it again, as kubelets do, for nodes that were taken for lost: after a pause, or for older ones of their names."""
        listed = await self._send("GET", "/api/v1/nodes?resourceVersion=0", None) or {}
        lost = [
            each["metadata"]["name"]
            for each in listed["items"]
            if all(one["status"] != "True" for one in each["status"].get("conditions") or () if one["type"] == "Ready")
        ]
        status = {"status": {"conditions": [READY]}}
        for node in self._nodes.keys() & set(lost):
            await self._send("PATCH", f"/api/v1/nodes/{node}/status", status, fine=(404, 409))

    async def _watch(self) -> None:
        version = ""
        while True:
            if not version:
                listed = await self._send("GET", f"/api/v1/pods?labelSelector={self._selector}", None) or {}
                version = listed["metadata"]["resourceVersion"]
                for pod in listed["items"]:
                    self._take("ADDED", pod)
            query = f"/api/v1/pods?labelSelector={self._selector}&watch=1&resourceVersion={version}&timeoutSeconds=300"
            async with self._session.get(query, timeout=aiohttp.ClientTimeout(total=None)) as stream:
                version = ""
                buffer = b""
                async for chunk in stream.content.iter_any():
                    *lines, buffer = (buffer + chunk).split(b"\n")
                    for line in lines:
                        event = json.loads(line)
                        if event["type"] == "ERROR":
                            break
                        self._take(event["type"], event["object"])

    def _take(self, kind: str, pod: dict[str, Any]) -> None:
        name, meta = pod["metadata"]["name"], pod["metadata"]
        if pod["spec"].get("nodeName") not in self._nodes:
            return
        if kind == "DELETED" or meta.get("deletionTimestamp"):
            self._begin(f"{meta['uid']} ends", self._end(pod, delete=kind != "DELETED"))
        elif name not in self.seen or self.seen[name]["metadata"]["uid"] != meta["uid"]:
            if pod["status"].get("phase") != "Pending":
                return  # it came to life on nodes of these names that another test played
            self.seen[name] = pod
            self._begin(f"{meta['uid']} begins", self._begin_pod(pod))

    def _begin(self, what: str, coroutine: Coroutine[Any, Any, None]) -> None:
        if what in self._busy:
            coroutine.close()
        else:
            task = self._busy[what] = asyncio.create_task(coroutine)
            task.add_done_callback(self._note_problem)

    def _note_problem(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._problem = self._problem or task.exception()

    async def _begin_pod(self, pod: dict[str, Any]) -> None:
        meta = pod["metadata"]
        number = next(NUMBERS)
        address = self._addresses[meta["uid"]] = f"127.{64 + os.getpid() % 128}.{number // 250}.{number % 250 + 1}"
        job = meta.get("labels", {}).get("HPJob")
        manner = self._strategy_warnings.get(job, "") if job else "mute"
        port = _agent_port(pod)
        if manner != "mute" and port is not None:
            await self._open(pod, address, port, manner)
        now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        states = [
            {"name": c["name"], "image": c["image"], "imageID": "", "ready": True, "restartCount": 0, "started": True,
             "state": {"running": {"startedAt": now}}}
            for c in pod["spec"]["containers"]
        ]  # fmt: skip
        conditions = [
            {"type": kind, "status": "True"} for kind in ("PodScheduled", "Initialized", "ContainersReady", "Ready")
        ]
        await self._patch_status(
            pod, {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}], "startTime": now,
                  "containerStatuses": states, "conditions": conditions},
        )  # fmt: skip

    async def _open(self, pod: dict[str, Any], address: str, port: int, manner: str) -> None:
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        agent = self.agents[uid] = PlayedAgent(name, manner, self.starts.setdefault(name, []))
        agent.left = lambda: self._begin(f"{uid} leaves", self._succeed(pod))

        async def get(request: web.Request) -> web.Response:
            await agent.newer(request.query.get("after"), float(request.query.get("wait", "0")))
            return web.json_response(agent.status())

        async def post(request: web.Request) -> web.Response:
            body = await request.json() if request.can_read_body else {}
            code = 200
            if request.path == "/start":
                code = agent.start(body)
                if self._job_of(name) in self._finishing:
                    agent.complete()
            elif request.path == "/stop":
                code = agent.stop(body)
            elif request.path == "/shutdown":
                agent.shut_down()
            return web.json_response(agent.status(), status=code)

        application = web.Application()
        application.add_routes([web.get("/status", get), web.post("/{path}", post)])
        runner = self._runners[uid] = web.AppRunner(
            application, access_log=None, shutdown_timeout=web_servers.SHUTDOWN_S
        )
        await runner.setup()
        assert runner.server is not None
        self._servers.append(runner.server)
        await web.TCPSite(runner, address, port).start()

    async def _succeed(self, pod: dict[str, Any]) -> None:
        """The kubelet's sequence: the containers are told to have ended while the phase is Running; it follows later."""
        await self._ends_pods.wait()
        ended = {"terminated": {"exitCode": 0, "reason": "Completed"}}
        states = [
            {"name": c["name"], "image": c["image"], "imageID": "", "ready": False, "restartCount": 0, "state": ended}
            for c in pod["spec"]["containers"]
        ]
        conditions = [
            {"type": kind, "status": str(kind in ("PodScheduled", "Initialized"))}
            for kind in ("PodScheduled", "Initialized", "ContainersReady", "Ready")
        ]
        told = {"containerStatuses": states, "conditions": conditions}
        await self._patch_status(pod, {"phase": "Running", **told})
        await asyncio.sleep(PHASE_LATER_S)
        await self._patch_status(pod, {"phase": "Succeeded", **told})
        await asyncio.sleep(0.2)  # the last answer is on its way
        await self._close(pod["metadata"]["uid"])

    async def _end(self, pod: dict[str, Any], *, delete: bool) -> None:
        meta = pod["metadata"]
        beginning = self._busy.get(f"{meta['uid']} begins")
        if beginning is not None:  # what is only being opened cannot be closed yet
            await asyncio.wait([beginning])
        await self._ends_pods.wait()
        await self._close(meta["uid"])
        if delete:
            path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"
            body = {"gracePeriodSeconds": 0, "preconditions": {"uid": meta["uid"]}}
            for _ in range(20):  # somebody may write the pod at the same moment
                await self._send("DELETE", path, body, fine=(404, 409))
                there = await self._send("GET", path, None, fine=(404,))
                if there is None or there["metadata"]["uid"] != meta["uid"]:
                    return
                await asyncio.sleep(0.3)

    async def _close(self, uid: str) -> None:
        agent = self.agents.pop(uid, None)
        if agent is not None:
            agent.close()
        runner = self._runners.pop(uid, None)
        if runner is not None:
            task = asyncio.create_task(web_servers.end(runner))
            self._closing.add(task)  # who is cancelled here leaves it to the end of all
            await asyncio.shield(task)

    async def _patch_status(self, pod: dict[str, Any], status: dict[str, Any]) -> None:
        meta = pod["metadata"]
        path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}/status"
        await self._send("PATCH", path, {"metadata": {"uid": meta["uid"]}, "status": status}, fine=(404, 409))

    async def _send(
        self, method: str, path: str, body: dict[str, Any] | None, fine: tuple[int, ...] = ()
    ) -> dict[str, Any] | None:
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        text = None if body is None else json.dumps(body)
        async with self._session.request(method, path, data=text, headers={"Content-Type": kind}) as answer:
            if answer.status in fine:
                return None
            content = await answer.read()
            assert answer.status < 300, f"{method} {path}: {answer.status} {content.decode()[:500]}"
            value: dict[str, Any] = json.loads(content)
            return value


def _agent_port(pod: Mapping[str, Any]) -> int | None:
    """Give the port of the pod's agent; None for a pod that another test made by hand and left to whichever nodes come."""
    for container in pod["spec"]["containers"]:
        for entry in container.get("env") or ():
            if entry["name"] == "ELASTIPOD_AGENT_PORT":
                return int(entry["value"])
    return None


def _plain(user: Mapping[str, str], key: str) -> str:
    return base64.b64decode(user[key]).decode()


def until(what: str, holds: Callable[[], T | None], limit_s: float) -> T:
    """Wait until a function gives something true, and give that; AssertionError after the limit."""
    end = time.monotonic() + limit_s
    while not (value := holds()):
        assert time.monotonic() < end, f"not within {limit_s:g} s: {what}"
        time.sleep(0.3)
    return value
