"""The field's own client, `hyp`, in its own environment beside a cluster: what it answers, and what it lists all the time."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests import peers

from elastipod_local.cluster import Cluster

LIST_EVERY_S = 0.5


class Hyp:
    """One process of the client. It asks for the jobs of some namespaces all the time, from its own thread.

    order: the states that each job was listed with, one after the other. problems: listings that failed. said: what `hyp`
    printed, by its arguments.
    """

    def __init__(self, cluster: Cluster, folder: Path, namespaces: Sequence[str]) -> None:
        self.order: dict[str, list[str]] = {}
        self.problems: list[str] = []
        self.said: dict[str, dict[str, Any]] = {}
        self._namespaces = tuple(namespaces)
        host = json.loads(cluster.kubectl("config", "view", "-o", "json"))["clusters"][0]["cluster"]["server"]
        # Its telemetry has no switch: it is refused at once by a proxy that is not there.
        environ = {
            **os.environ, **cluster.environment(), "HOME": str(folder), "AWS_DEFAULT_REGION": "us-west-2",
            "AWS_EC2_METADATA_DISABLED": "true", "HTTPS_PROXY": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9",
            "NO_PROXY": host.split("//")[1].rsplit(":", 1)[0], "COLUMNS": "200",
        }  # fmt: skip
        script = Path(__file__).with_name("compat_hyp.py")
        self._log = (folder / "hyp.log").open("wb")
        self._process = subprocess.Popen(
            [str(peers.peer_python("hyp")), "-W", "ignore", str(script)],
            env=environ, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
        )  # fmt: skip
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._is_ready = False
        self._thread = threading.Thread(target=self._look, name="hyp list")
        self._thread.start()

    def ask(self, **request: Any) -> dict[str, Any]:
        """Ask for one thing."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            if not self._is_ready:
                self._is_ready = bool(self._process.stdout.readline())
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            said: dict[str, Any] = json.loads(self._process.stdout.readline())
        return said

    def run(self, *words: str) -> str:
        """Run `hyp`, keep what it said, and give what it printed. Its end is in `said`."""
        said = self.said[" ".join(words)] = self.ask(run=list(words))
        return str(said.get("output", ""))

    def succeed(self, *words: str) -> str:
        """Run `hyp` and give what it printed; fails with its words when it does not succeed."""
        output = self.run(*words)
        said = self.said[" ".join(words)]
        assert said.get("code") == 0, said
        return output

    def has_listed(self, states: Mapping[str, str]) -> bool:
        """Whether each job was last listed with its state."""
        return all(self.order.get(name, [""])[-1] == states[name] for name in states)

    def close(self) -> None:
        """End the process."""
        self._stop.set()
        self._thread.join(60)
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(5)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._log.close()

    def _look(self) -> None:
        while not self._stop.is_set():
            for namespace in self._namespaces:
                said = self.ask(list=namespace)
                if "problem" in said:
                    self.problems.append(said["problem"])
                for name, state in said.get("states", {}).items():
                    line = self.order.setdefault(name, [])
                    if line[-1:] != [state]:
                        line.append(state)
            self._stop.wait(LIST_EVERY_S)
