"""An operator beside a cluster that has no kubelet: started again when it loses its lease, as the kubelet would do."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

LOST_ITS_LEASE = b"the lease was lost"  # the API server of a busy machine may not answer for as long as a lease lasts
MAX_STARTS = 10


class RestartedOperator:
    """A context in which the operator runs. It is not started again after any other end: that is a failure of the test.

    log: what all its processes print, one after the other.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        self._command, self._environ, self._log = command, environ, log
        self._is_over = threading.Event()
        self._printed_before = 0  # by earlier processes, in bytes
        self.starts = 0
        """How often it was started."""
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._keep_running, name="operator", daemon=True)

    @property
    def is_alive(self) -> bool:
        """Whether it runs, or is started again."""
        return self._thread.is_alive()

    def __enter__(self) -> RestartedOperator:
        self._log.write_bytes(b"")
        self._process = self._start()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._is_over.set()
        while self._thread.is_alive():
            assert self._process is not None
            self._process.terminate()
            self._thread.join(20)
            self._process.kill()
            self._thread.join(5)

    def _start(self) -> subprocess.Popen[bytes]:
        self._printed_before = self._log.stat().st_size
        self.starts += 1
        with self._log.open("ab") as output:
            return subprocess.Popen(
                self._command, env=dict(self._environ), stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    def _keep_running(self) -> None:
        assert self._process is not None
        for _ in range(MAX_STARTS - 1):
            self._process.wait()
            if self._is_over.is_set() or LOST_ITS_LEASE not in self._log.read_bytes()[self._printed_before :]:
                return
            self._process = self._start()
        self._process.wait()
