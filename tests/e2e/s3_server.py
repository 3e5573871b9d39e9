"""A real S3 server for a test: versitygw over a folder, with keys of its own."""

from __future__ import annotations

import secrets
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.patience import PATIENCE_S

from elastipod_local import binaries


@dataclass(frozen=True, slots=True)
class S3Server:
    """A server that runs. Bucket names are folders below ``folder``."""

    address: str
    key: str
    secret: str
    folder: Path

    @property
    def options(self) -> dict[str, object]:
        """What s3fs wants to know."""
        return {
            "key": self.key,
            "secret": self.secret,
            "client_kwargs": {"endpoint_url": self.address, "region_name": "us-east-1"},
            "config_kwargs": {"s3": {"addressing_style": "path"}},
        }


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """Run a server over ``folder`` while the block runs; builds it on first use."""
    program = binaries.ensure(["versitygw"])["versitygw"]
    data = folder / "data"
    for path in (data, folder / "sidecar"):
        path.mkdir(parents=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = S3Server(f"http://127.0.0.1:{port}", secrets.token_hex(8), secrets.token_hex(16), data)
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(
            [program, "--port", f"127.0.0.1:{port}", "posix", "--sidecar", folder / "sidecar", data],
            env={"ROOT_ACCESS_KEY": server.key, "ROOT_SECRET_KEY": server.secret, "HOME": str(folder)},
            stdout=log,
            stderr=log,
        )
    try:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=5).close()
                break
            except OSError:
                assert process.poll() is None, (folder / "server.log").read_text()
                assert time.monotonic() < deadline, "the S3 server does not answer"
                time.sleep(0.05)
        yield server
    finally:
        process.kill()
        process.wait()
