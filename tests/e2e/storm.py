"""A storm over the agents of one job: signals to whatever runs below them, clients that misbehave, calls in any order.

The driver plays the operator between the gusts: it stops every agent, waits until it is ready, and looks at what is left."""

from __future__ import annotations

import random
import re
import signal
import socket
import struct
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from tests.agent_client import until
from tests.e2e.storm_pods import KINDS, Caller, Pod, Tally, _go_on, _parent
from tests.free_ports import free_port

from elastipod.ipc.protocol import RestartMode

RULES = [
    {
        "name": "Loss",
        "logPattern": r".*loss: ([\d.]+)",
        "expectedStartCutOffInSeconds": 60,
        "metricThreshold": 9,
        "operator": "gt",
        "metricEvaluationDataPoints": 3,
    },
    {"name": "Bad", "logPattern": ".*never printed.*", "faultOnMatch": True},
]
SIGNALS = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM, "suspend": signal.SIGSTOP, "pause": signal.SIGSTOP}
CALLS = ("again", "older", "early start", "plain start", "update", "old update", "old stop", "stop", "drain", "status")
CLIENTS = ("silent", "half", "reset", "ipc half", "ipc silent", "ipc garbage", "ipc wait")
MAX_CLIENTS = 30


class Storm:
    """One storm over pods whose agents are ready. Raises AssertionError with the acts of the round at fault."""

    def __init__(
        self, pods: list[Pod], folder: Path, rng: random.Random, *, is_warm: bool, is_standing: bool, deadline_s: float
    ) -> None:
        self.pods = pods
        self.tally = Tally()
        self._folder = folder
        self.rng = rng
        self._is_warm = is_warm
        self._is_standing = is_standing
        self._deadline_s = deadline_s
        self._generation = 0
        self._clients: list[socket.socket] = []
        self._timers: list[threading.Timer] = []
        self._round: list[str] = []
        self._modes = [mode.value for mode in RestartMode] if is_standing else [""]

    def round(self, num_acts: int) -> None:
        """Run one generation with so many acts, and bring all pods back."""
        self._begin_generation()
        for _ in range(num_acts):
            self._act(self.rng.choice(self.pods))
            time.sleep(self.rng.choice([0, 0, 0.01, 0.05, 0.2]))
        self._bring_back()

    def quiet_round(self) -> None:
        """Run one generation undisturbed, to its completion."""
        self.let_clients_go()
        for pod in self.pods:
            for worker in pod.below()["worker"]:  # that stand at the barrier
                _go_on(worker)
        self._begin_generation(is_quiet=True)
        for pod in self.pods:
            self._until(pod, "running", self._deadline_s)
        world = sum(self._nproc(pod) for pod in self.pods)
        until(
            lambda: self._num_running() >= world,
            f"all ranks of generation {self._generation}: {self._said()}",
        )
        (self._folder / f"over-{self._generation}").touch()
        for pod in self.pods:
            self._until(pod, "completed", self._deadline_s)
        self._bring_back(is_quiet=True)

    def let_clients_go(self) -> None:
        """Hang up, and let what was only paused go on."""
        for timer in self._timers:
            timer.join()
        self._timers.clear()
        for client in self._clients:
            client.close()
        self._clients.clear()

    def count_starts(self) -> None:
        """Take the agents' own counts of workers' starts into the tally."""
        starts = [pod.starts() for pod in self.pods]
        self.tally.warm_starts, self.tally.cold_starts = (sum(numbers) for numbers in zip(*starts, strict=True))

    def check_nothing_left(self) -> None:
        """Below a ready agent is only what belongs there, and no zombie."""
        for pod in self.pods:
            until(partial(self._is_clean, pod), f"the end of {self._too_much(pod)}, {self._said()}")

    def _is_clean(self, pod: Pod) -> bool:
        is_staffed = not self._is_standing or len(pod.below()["worker"]) == self._nproc(pod)
        return is_staffed and not self._too_much(pod) and not pod.dead()

    def _too_much(self, pod: Pod) -> list[psutil.Process]:
        found = pod.below()
        wrong = found["unknown"] + found["matcher"] + found["ahead"][self._nproc(pod) :]
        if not self._is_standing:
            wrong += found["worker"] + found["child"]
        else:
            wrong += found["worker"][self._nproc(pod) :]
            own = {one.pid for one in found["worker"]}
            wrong += [one for one in found["child"] if _parent(one) not in own]
        if not self._is_warm:
            wrong += found["server"]
        return wrong

    @staticmethod
    def _nproc(pod: Pod) -> int:
        return 2 if "--nproc-per-node=2" in pod.process.cmdline() else 1

    # -- generations ---------------------------------------------------------------------------------------------

    def _begin_generation(self, *, is_quiet: bool = False) -> None:
        self._generation += 1
        self.tally.generations += 1
        self._round = [f"generation {self._generation}"]
        if self._is_warm and (is_quiet or self.rng.random() < 0.7):
            self._await_servers()
        port = free_port()
        for rank, pod in enumerate(self.pods):
            if not is_quiet and self.rng.random() < 0.05:
                self._note("stop before start")
                assert pod.agent.stop(self._generation)[0] == 200
            code, seen = self._start(pod, self._generation, rank, port)
            assert code == 200, f"{seen}, {self._said()}"
            if not is_quiet:
                self._perhaps_signal(0.2)

    def _await_servers(self) -> None:
        for pod in self.pods:
            until(lambda: len(pod.below()["server"]) == 1, f"the fork server, {self._said()}")  # noqa: B023

    def _start(self, pod: Pod, generation: int | None, rank: int, port: int, **fields: Any) -> tuple[int, Any]:
        nnodes = len(self.pods)
        rules = {"log_monitoring_configuration": RULES} if self.rng.random() < 0.7 else {}
        return pod.agent.start(generation, rank=rank, nnodes=nnodes, master_port=port, **rules, **fields)

    def _bring_back(self, *, is_quiet: bool = False) -> None:
        generation = self._generation
        for pod in self.pods:
            self.tally.states[self._status(pod)["status"]] += 1
            if not is_quiet and self.rng.random() < 0.3:
                self._note("driver drains")
                code, seen = pod.agent.drain(generation, timeout=self.rng.choice([0, 0.05, 0.5]))
            else:
                code, seen = pod.agent.stop(generation, **self._mode())
            assert code == 200, f"{seen}, {self._said()}"
            if not is_quiet:
                self._perhaps_signal(0.3)
        began = time.monotonic()
        for pod in self.pods:
            self._until(pod, "ready", self._deadline_s)
            self.tally.slowest_ready_s = max(self.tally.slowest_ready_s, time.monotonic() - began)
        if not self._is_standing:
            self.check_nothing_left()
        if not is_quiet:
            self._perhaps_signal(0.3)

    def _perhaps_signal(self, chance: float) -> None:
        """Strike in the middle of a start or stop, or while an agent waits."""
        if self.rng.random() < chance:
            self._signal(self.rng.choice(self.pods))

    def _mode(self) -> dict[str, str]:
        mode = self.rng.choice(self._modes)
        return {"restart_mode": mode} if mode else {}

    def _num_running(self) -> int:
        text = "".join(pod.agent.printed() for pod in self.pods)
        return len(set(re.findall(rf"run {self._generation} rank (\d+)", text)))

    def _status(self, pod: Pod) -> dict[str, Any]:
        assert pod.agent.process.poll() is None, f"the agent is gone, {self._said()}\n{pod.agent.printed()[-4000:]}"
        return pod.agent.status()

    def _until(self, pod: Pod, state: str, patience_s: float) -> None:
        self._status(pod)
        try:
            pod.agent.until(state, patience_s)
        except AssertionError as error:
            raise AssertionError(f"{self._said()}: {str(error)[:600]}\n{pod.agent.printed()[-3000:]}") from error

    def _note(self, act: str) -> None:
        self.tally.acts[act] += 1
        self._round.append(act)

    def _said(self) -> str:
        return "after " + ", ".join(self._round)

    # -- acts ----------------------------------------------------------------------------------------------------

    def _act(self, pod: Pod) -> None:
        dice = self.rng.random()
        if dice < 0.6:
            self._signal(pod)
        elif dice < 0.8:
            self._call(pod, self.rng.choice(CALLS))
        else:
            self._client(pod, self.rng.choice(CLIENTS))

    def _signal(self, pod: Pod) -> None:
        name = self.rng.choice(list(SIGNALS))
        if self.rng.random() < 0.08:
            name, kind, target = "pause", "agent", pod.process
        else:
            found = pod.below()
            kinds = [kind for kind in KINDS if found[kind] and (kind != "server" or self._may_hit_server(pod))]
            if not kinds:
                return
            kind = self.rng.choice(kinds)
            target = self.rng.choice(found[kind])
        if kind == "server":
            pod.server_hits += 1
        with suppress(psutil.NoSuchProcess):
            target.send_signal(SIGNALS[name])
            self._note(f"{name} {kind}")
            if name == "pause":
                timer = threading.Timer(self.rng.choice([0.02, 0.1, 0.4]), _go_on, (target,))
                timer.start()
                self._timers.append(timer)

    def _may_hit_server(self, pod: Pod) -> bool:
        """Three losses without a start in between, and the agent would go on without one for good."""
        starts = pod.starts()[0]
        if starts != pod.warm_starts:
            pod.warm_starts, pod.server_hits = starts, 0
        return pod.server_hits == 0

    def _call(self, pod: Pod, call: str) -> None:
        generation, rank = self._generation, self.pods.index(pod)
        agent = pod.agent
        facts: dict[str, Any] = {"rank": rank, "nnodes": len(self.pods), "faultCount": 0}
        facts |= {"master_addr": "127.0.0.1", "master_port": free_port()}
        self._note(call)
        if call == "again":
            answer = self._start(pod, generation, rank, free_port())
            assert answer == (200, None), self._said()
        elif call == "older":
            assert self._start(pod, generation - 1, rank, free_port())[0] in (200, 409)
        elif call == "early start":
            if self._status(pod)["status"] == "running":
                assert self._start(pod, generation + 1, rank, free_port())[0] in (200, 409)
                self._generation = max(generation, int(self._status(pod)["generation"]))
        elif call == "plain start":
            self._start(pod, None, rank, free_port(), faultCount=generation - 1)
        elif call == "update":
            assert agent.call("POST", "/update", {**facts, "generation": generation})[0] == 200, self._said()
        elif call == "old update":
            assert agent.call("POST", "/update", {**facts, "generation": generation - 1})[0] in (200, 409)
        elif call == "old stop":
            assert agent.stop(generation - 1)[0] in (200, 409)
        elif call == "stop":
            assert agent.stop(generation, **self._mode())[0] == 200
        elif call == "drain":
            assert agent.drain(generation, timeout=self.rng.choice([0, 0.05, 0.5, 30]))[0] == 200
        else:
            for _ in range(20):
                self._status(pod)

    def _client(self, pod: Pod, kind: str) -> None:
        while len(self._clients) > MAX_CLIENTS:
            self._clients.pop(self.rng.randrange(len(self._clients))).close()
        self._note(f"client {kind}")
        client = self._ipc_client(pod, kind) if kind.startswith("ipc") else self._http_client(pod, kind)
        if client is not None:
            self._clients.append(client)

    def _http_client(self, pod: Pod, kind: str) -> socket.socket:
        client = socket.create_connection(("127.0.0.1", pod.agent.port))
        if kind == "half":
            lines = (
                b"GET /sta",
                b"POST /start HTTP/1.1\r\nContent-Length: 100000\r\n\r\n{",
                b"POST /stop HTTP/1.1\r\n",
            )
            client.sendall(self.rng.choice(lines))
        elif kind == "reset":
            client.sendall(b"GET /status?after=%d&wait=30 HTTP/1.1\r\nHost: x\r\n\r\n" % self._status(pod)["version"])
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
        return client

    def _ipc_client(self, pod: Pod, kind: str) -> socket.socket | None:
        path = pod.socket_path()
        if path is None:
            return None
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        client.settimeout(5)
        with suppress(OSError):
            client.connect(path)
            if kind == "ipc half":
                client.sendall(b'{"v":1,"call":"hel')
            elif kind == "ipc garbage":
                client.sendall(self.rng.choice([b"\0" * 1000 + b"\n", b"[]\n", b"x" * 300_000, b'{"v":1}\n']))
            elif kind == "ipc wait":
                client.sendall(b'{"v":1,"call":"fault","local_rank":0,"after":1000000,"wait_s":60}\n')
        return client


class Callers:
    """One caller per pod, while the context lasts; then their problems are raised and their counts tallied."""

    def __init__(self, storm: Storm, pause_s: float = 0.02) -> None:
        self._storm = storm
        self._callers = [Caller(pod.agent, pause_s) for pod in storm.pods]

    def __enter__(self) -> None:
        for caller in self._callers:
            caller.start()

    def __exit__(self, *_: object) -> None:
        tally = self._storm.tally
        for caller in self._callers:
            caller.end()
            tally.calls += caller.calls
            tally.slowest_call_s = max(tally.slowest_call_s, caller.slowest_s)
        problems = [caller.problem for caller in self._callers if caller.problem]
        assert not problems, problems
