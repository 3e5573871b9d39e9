"""The hosts of official releases, played by one server on loopback with their layout: /<host>/<path>."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.patience import PATIENCE_S


def archive(files: Mapping[str, bytes]) -> bytes:
    """Give a compressed tar file."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for name, body in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(body)
            tar.addfile(entry, io.BytesIO(body))
    return gzip.compress(content.getvalue(), compresslevel=1)


@dataclass(slots=True)
class ReleaseHosts:
    """What is served (path -> content), which paths hang, and what was asked for."""

    files: dict[str, bytes] = field(default_factory=dict)
    moved: dict[str, str] = field(default_factory=dict)
    hanging: set[str] = field(default_factory=set)
    meeting: threading.Barrier | None = None  # of the first request to each host; they are answered together
    asked: list[str] = field(default_factory=list)
    met: set[str] = field(default_factory=set)
    url: str = ""
    closing: threading.Event = field(default_factory=threading.Event)

    def add(self, url: str, content: bytes) -> None:
        self.files["/" + url.partition("://")[2]] = content

    def add_blob(self, registry: str, repository: str, kind: str, content: bytes) -> str:
        """Serve a blob or a manifest under its digest; give that."""
        digest = "sha256:" + hashlib.sha256(content).hexdigest()
        self.add(f"{registry}/v2/{repository}/{kind}/{digest}", content)
        return digest

    def add_image(self, registry: str, repository: str, arch: str, layers: list[dict[str, bytes]]) -> str:
        """Serve an image for one architecture; give the digest of its index."""
        blobs = [self.add_blob(registry, repository, "blobs", archive(layer)) for layer in layers]
        manifest = json.dumps({"layers": [{"digest": blob} for blob in blobs]}).encode()
        digest = self.add_blob(registry, repository, "manifests", manifest)
        entries = [
            {"digest": "sha256:0", "platform": {"os": "linux", "architecture": "s390x"}},
            {"digest": digest, "platform": {"os": "linux", "architecture": arch}},
        ]
        return self.add_blob(registry, repository, "manifests", json.dumps({"manifests": entries}).encode())


@contextmanager
def release_hosts() -> Iterator[ReleaseHosts]:
    """Serve on loopback until the end of the block."""
    hosts = ReleaseHosts()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hosts.asked.append(self.path)
            path = self.path.removeprefix(hosts.url)
            host = path.split("/")[1]
            if hosts.meeting and host not in hosts.met:
                hosts.met.add(host)
                hosts.meeting.wait(PATIENCE_S)
            if path in hosts.hanging:
                hosts.closing.wait(PATIENCE_S)
            elif path in hosts.moved:
                self.send_response(302)
                self.send_header("Location", hosts.url + hosts.moved[path])
                self.end_headers()
            elif path in hosts.files:
                self.send_response(200)
                self.send_header("Content-Length", str(len(hosts.files[path])))
                self.end_headers()
                self.wfile.write(hosts.files[path])
            else:
                self.send_error(404)

        def log_message(self, format: str, *args: object) -> None:
            """Keep quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hosts.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hosts
    finally:
        hosts.closing.set()
        server.shutdown()
        thread.join()
        server.server_close()


def wait_for_threads(before: set[threading.Thread], deadline_s: float = 5) -> None:
    """Return when no thread is left that was not there before."""
    end = time.monotonic() + deadline_s
    while set(threading.enumerate()) - before and time.monotonic() < end:
        time.sleep(0.01)
