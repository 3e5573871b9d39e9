"""The history of objects in a cluster, change by change and in the order in which etcd took them.

Versions of all kinds come from one etcd, so changes of several kinds fall in one order. Nothing may be missing: what is
recorded begins with a list, goes on from that list's version, and ends when a second list shows the same objects.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from tests.patience import PATIENCE_S

from elastipod_local.cluster import Cluster
from elastipod_local.controlplane import ControlPlane
from elastipod_local.host import wait_until

Body = dict[str, Any]
CALL_S = PATIENCE_S
# Longer than any run: the API server is to end no watch by itself.
WATCH_S = 7200
GONE = 410
MERGE_PATCH = "application/merge-patch+json"


class HistoryGapError(AssertionError):
    """Changes may be missing, so nothing can be said of what happened."""


@dataclass(frozen=True, slots=True)
class Change:
    """One change of one object. version: of the cluster's etcd. at: seconds of this machine, when it was seen here."""

    version: int
    at: float
    kind: str
    type: str
    """ADDED, MODIFIED or DELETED."""
    body: Body

    @property
    def uid(self) -> str:
        return str(self.body["metadata"]["uid"])


class Client:
    """Calls to a cluster's API server as its administrator, by any number of threads."""

    def __init__(self, cluster: Cluster) -> None:
        server = ControlPlane(cluster.folder, cluster.name, cluster.state().addressing, {}).api_server
        self._address = (server.host, server.port)
        self._context = ssl.create_default_context(cafile=str(server.authority))
        self._context.load_cert_chain(server.certificate, server.key)
        self._own = threading.local()
        self._all: list[http.client.HTTPSConnection] = []

    def call(self, method: str, path: str, body: Body | None = None, fine: tuple[int, ...] = ()) -> Body:
        """Make a call and give the answer; {} for an answer that is fine although it is none of success."""
        connection = self._connection()
        kind = MERGE_PATCH if method == "PATCH" else "application/json"
        text = None if body is None else json.dumps(body)
        try:
            connection.request(method, path, text, {"Content-Type": kind, "Accept": "application/json"})
            answer = connection.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException):
            connection.close()  # the next call opens it anew
            raise
        if answer.status in fine:
            return {}
        assert answer.status < 300, f"{method} {path}: {answer.status} {content.decode()[:500]}"
        found: Body = json.loads(content)
        return found

    def open(self) -> http.client.HTTPSConnection:
        """Give a connection of the caller's own, without a limit for what it waits."""
        return http.client.HTTPSConnection(*self._address, context=self._context)

    def close(self) -> None:
        """Close the connections of all threads."""
        for connection in self._all:
            connection.close()

    def _connection(self) -> http.client.HTTPSConnection:
        found: http.client.HTTPSConnection | None = getattr(self._own, "connection", None)
        if found is None:
            found = self._own.connection = http.client.HTTPSConnection(
                *self._address, timeout=CALL_S, context=self._context
            )
            self._all.append(found)
        return found


class Recorder:
    """Records what becomes of all objects of some kinds; as a context manager. paths: of the kinds, by name.

    There must be none of them at the beginning, so that the history has no past.
    """

    def __init__(self, client: Client, paths: Mapping[str, str]) -> None:
        self._client = client
        self._paths = paths
        self._changes: list[Change] = []
        self._present: dict[str, dict[str, Change]] = {kind: {} for kind in paths}
        self._lock = threading.Lock()
        self._watches: list[_Watch] = []
        self._problem: Exception | None = None

    def __enter__(self) -> Recorder:
        for kind, path in self._paths.items():
            listed = self._client.call("GET", path)
            assert not listed["items"], f"there are objects at {path} already"
            self._watches.append(_Watch(self, self._client, kind, path, int(listed["metadata"]["resourceVersion"])))
        for watch in self._watches:
            watch.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for watch in self._watches:
            watch.end()
        if error is None:
            self._check()

    def now(self, kind: str) -> dict[str, Body]:
        """Give the objects of a kind as they are, by name."""
        self._check()
        with self._lock:
            return {name: change.body for name, change in self._present[kind].items()}

    def complete(self, deadline_s: float = PATIENCE_S) -> list[Change]:
        """Give the whole history in order, once it has led to what lists show; to be called when nothing changes any more.

        Raises HistoryGapError when it never does: then something was missed.
        """
        try:
            wait_until(self._leads_to_lists, deadline_s=deadline_s, what="history and lists to agree", every_s=0.3)
        except Exception as error:
            raise HistoryGapError(str(error)) from error
        with self._lock:
            found = sorted(self._changes, key=lambda change: change.version)
        return found

    def take(self, kind: str, type: str, body: Body) -> None:
        """Take a change from a watch. Raises HistoryGapError when it cannot follow what was taken before."""
        change = Change(int(body["metadata"]["resourceVersion"]), time.monotonic(), kind, type, body)
        name = body["metadata"]["name"]
        with self._lock:
            before = self._present[kind].get(name)
            is_known = before is not None and before.uid == change.uid
            if is_known == (type == "ADDED") or (before is not None and not is_known):
                raise HistoryGapError(f"{type} of {kind} {name} {change.uid} does not follow {before and before.type}")
            if type == "DELETED":
                del self._present[kind][name]
            else:
                self._present[kind][name] = change
            self._changes.append(change)

    def failed(self, problem: Exception) -> None:
        """Note what ended a watch; whoever asks next gets it."""
        self._problem = self._problem or problem

    def _check(self) -> None:
        if self._problem is not None:
            raise self._problem

    def _leads_to_lists(self) -> bool:
        self._check()
        for kind, path in self._paths.items():
            items = self._client.call("GET", path)["items"]
            with self._lock:
                known = {name: change.version for name, change in self._present[kind].items()}
            if known != {item["metadata"]["name"]: int(item["metadata"]["resourceVersion"]) for item in items}:
                return False
        return True


class _Watch(threading.Thread):
    """A watch of one kind, from the version of a list on. One that breaks goes on behind the last change that it gave."""

    def __init__(self, recorder: Recorder, client: Client, kind: str, path: str, version: int) -> None:
        super().__init__(name=f"watch of {kind}", daemon=True)
        self._recorder = recorder
        self._client = client
        self._kind = kind
        self._path = path
        self._version = version
        self._ending = threading.Event()
        self._connection: http.client.HTTPSConnection | None = None

    def run(self) -> None:
        while not self._ending.is_set():
            try:
                self._follow()
            except (OSError, http.client.HTTPException, ValueError) as error:  # a line cut short is no JSON
                if not self._ending.wait(0.2):
                    print(f"{self.name} goes on: {type(error).__name__} {error}")
            except Exception as error:
                self._recorder.failed(error)
                return

    def end(self) -> None:
        """End it, whatever it waits for."""
        self._ending.set()
        sock = self._connection.sock if self._connection is not None else None
        if sock is not None:
            with suppress(OSError):  # it may be closed by now
                sock.shutdown(socket.SHUT_RDWR)
        self.join(30)

    def _follow(self) -> None:
        query = f"?watch=1&allowWatchBookmarks=true&timeoutSeconds={WATCH_S}&resourceVersion={self._version}"
        connection = self._connection = self._client.open()
        try:
            connection.request("GET", self._path + query, headers={"Accept": "application/json"})
            if self._ending.is_set():
                return  # nobody else would end this connection
            for event in self._events(connection.getresponse()):
                self._take(event)
        finally:
            connection.close()

    def _events(self, answer: http.client.HTTPResponse) -> Iterator[Body]:
        if answer.status == GONE:
            raise HistoryGapError(f"{self._path} cannot be watched from {self._version} any more")
        if answer.status != http.client.OK:
            raise OSError(f"{self._path} is answered with {answer.status}")
        while line := answer.readline():
            yield json.loads(line)

    def _take(self, event: Body) -> None:
        body = event["object"]
        if event["type"] == "ERROR":
            if body.get("code") == GONE:
                raise HistoryGapError(f"{self._path} lost its past at {self._version}: {body.get('message')}")
            raise OSError(f"{self._path}: {body.get('message')}")
        version = int(body["metadata"]["resourceVersion"])
        if event["type"] != "BOOKMARK":
            if version <= self._version:
                raise HistoryGapError(f"{self._kind}: version {version} came after {self._version}")
            self._recorder.take(self._kind, event["type"], body)
        self._version = max(self._version, version)
