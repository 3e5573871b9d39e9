"""The machine we run on: running programs, what it must offer, waiting with a deadline."""

import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO, TypeVar

from elastipod_local.addressing import RANGE
from elastipod_local.errors import CommandError, LocalClusterError, UnsupportedError, WaitedTooLongError

T = TypeVar("T")
Progress = Callable[[str], None]

# How a user ends a command: Ctrl-C, `kill`, and the end of the terminal, as when a connection drops.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Debian keeps ip, iptables and the like in sbin, which a plain user's or cron's PATH may lack.
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Root's own may be stricter, and what pods read belongs to nobody in particular.
OPEN_UMASK = 0o022
# Where no proxy can reach a cluster; the single address is for Python, which knows no ranges.
DIRECT = ("localhost", "127.0.0.1", "127.0.0.0/8", str(RANGE), ".svc", ".cluster.local")


def quiet(_: str) -> None:
    """A progress callback that says nothing."""


def is_root() -> bool:
    return os.geteuid() == 0


def require_linux() -> None:
    """Raise UnsupportedError unless this is Linux."""
    if sys.platform != "linux":
        raise UnsupportedError(
            f"elastipod local makes real Kubernetes nodes out of Linux namespaces and this is {sys.platform}; "
            "run it on a Linux machine or in a Linux virtual machine, as root"
        )


def require_root(what: str) -> None:
    """Raise UnsupportedError unless we are root; `what` begins the sentence, e.g. 'making nodes'."""
    require_linux()
    if not is_root():
        raise UnsupportedError(
            f"{what} needs root (network, mount and pid namespaces); run the command with sudo, "
            "or start a control plane alone with --nodes 0, which any user can"
        )


def tool_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Give our own environment with the system folders added to PATH, `extra` on top, and no proxy before a cluster."""
    path = os.environ.get("PATH", "")
    given = {**os.environ, "PATH": f"{path}:{SYSTEM_PATH}" if path else SYSTEM_PATH, **(extra or {})}
    return {**given, **without_proxy(given)}


def without_proxy(environ: Mapping[str, str]) -> dict[str, str]:
    """Give NO_PROXY, in both its spellings, such that clusters are reached directly whatever proxy the environment names."""
    given = [entry.strip() for name in ("NO_PROXY", "no_proxy") for entry in environ.get(name, "").split(",")]
    # With anything beside it the star would mean nothing to some programs.
    entries = ["*"] if "*" in given else dict.fromkeys(filter(None, [*given, *DIRECT]))
    return dict.fromkeys(("NO_PROXY", "no_proxy"), ",".join(entries))


def find_program(name: str) -> Path | None:
    """Find a program on PATH or in the system folders."""
    found = shutil.which(name, path=tool_environment()["PATH"])
    return Path(found) if found else None


def ends_with_parent(command: Sequence[str | Path]) -> list[str]:
    """Give the command made so that the kernel kills its process when ours dies, whatever ours dies of."""
    return ["setpriv", "--pdeathsig", "KILL", "--", *map(str, command)]


def run(
    command: Sequence[str | Path],
    *,
    input: str | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 120,
    check: bool = True,
    cwd: Path | None = None,
    umask: int = -1,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, which is no later than ours, and give its output as text.

    umask: ours by default. Raises CommandError with the last lines that it wrote to stderr when it fails (unless check is
    False) or takes longer than timeout_s.
    """
    words = [str(word) for word in command]
    environment = tool_environment(env)
    if not shutil.which(words[0], path=environment["PATH"]):
        raise LocalClusterError(f"the program {words[0]} was not found; is it installed?")
    shown = " ".join(words[:6]) + (" ..." if len(words) > 6 else "")
    try:
        done = subprocess.run(
            ends_with_parent(words),
            input=input,
            text=True,
            capture_output=True,
            timeout=timeout_s,
            env=environment,
            cwd=cwd,
            umask=umask,
        )
    except subprocess.TimeoutExpired as late:
        raise CommandError(f"`{shown}` did not end within {timeout_s:g} s", 124, "") from late
    if check and done.returncode != 0:
        said = last_lines(done.stderr or done.stdout, 5)
        raise CommandError(f"`{shown}` ended with exit code {done.returncode}: {said}", done.returncode, said)
    return done


def run_logged(
    command: Sequence[str | Path],
    log: IO[bytes],
    *,
    what: str,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
) -> int:
    """Run a program with its output in an open log file, and give its exit code.

    what: begins the sentence of the LocalClusterError that is raised when it takes longer than timeout_s.
    """
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=timeout_s, env=tool_environment(env)
        ).returncode
    except subprocess.TimeoutExpired as late:
        raise LocalClusterError(
            f"{what} did not end within {timeout_s:g} s: {tail_of(Path(log.name))}; log: {log.name}"
        ) from late


def delete_tree(path: Path) -> None:
    """Delete a file or folder with all below; the tens of thousands of files of a node's disk in a second."""
    run(["rm", "--recursive", "--force", "--one-file-system", "--", path], timeout_s=600)


def is_open(path: Path) -> bool:
    """Tell whether everybody may read a folder and enter it, as OPEN_UMASK leaves it."""
    return path.stat().st_mode & 0o005 == 0o005


def last_lines(text: str, count: int) -> str:
    """Give the last `count` lines that hold anything, joined by ' | '."""
    return " | ".join([line.strip() for line in text.splitlines() if line.strip()][-count:])


def tail_of(log: Path, count: int = 5) -> str:
    """Give the last lines of a log file for an error message; says so when there is none."""
    try:
        with log.open("rb") as stream:
            stream.seek(max(0, log.stat().st_size - 8192))
            return last_lines(stream.read().decode(errors="replace"), count) or "(the log is empty)"
    except FileNotFoundError:
        return "(no log was written)"


def wait_until(
    condition: Callable[[], T | None], *, deadline_s: float, what: str, every_s: float = 0.05, hint: str = ""
) -> T:
    """Call `condition` until it gives something true, and give that back.

    Raises WaitedTooLongError naming `what` (and `hint`, e.g. the place of a log) after deadline_s.
    """
    end = time.monotonic() + deadline_s
    while True:
        if value := condition():
            return value
        if time.monotonic() > end:
            raise WaitedTooLongError(f"waited {deadline_s:g} s for {what}{f'; {hint}' if hint else ''}")
        time.sleep(every_s)


def say(text: str, stream: IO[str] | None = None) -> None:
    """Print to stdout or the given stream at once; a terminal that is gone is no reason to leave work half done."""
    try:
        print(text, file=stream, flush=True)
    except OSError as refused:
        if refused.errno != errno.EIO:
            raise


class Reminder:
    """Tells of a long wait now and then. first_s, every_s: seconds from the beginning, and between two lines after that."""

    def __init__(self, progress: Progress, *, every_s: float, first_s: float | None = None) -> None:
        self._progress = progress
        self._every_s = every_s
        self._began = time.monotonic()
        self._due = self._began + (every_s if first_s is None else first_s)

    def remind(self, what: str) -> None:
        """Say what is waited for, and for how long by now, if that is due. Call it at every look."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + self._every_s
            self._progress(f"{what}, {now - self._began:.0f} s")


@contextmanager
def stop_signals_raise(interruption: type[BaseException]) -> Iterator[None]:
    """Raise `interruption` at the first signal of STOP_SIGNALS and ignore those after it: cleaning up has begun then.

    What `nohup` keeps out stays out.
    """

    def interrupt(signum: int, frame: FrameType | None) -> None:
        for other in before:
            signal.signal(other, signal.SIG_IGN)
        if signum == signal.SIGHUP:
            _leave_terminal()
        raise interruption

    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    handled = [signum for signum in STOP_SIGNALS if not (signum == signal.SIGHUP and ignored)]
    before = {signum: signal.signal(signum, interrupt) for signum in handled}
    try:
        yield
    finally:
        _restore(before)


def _leave_terminal() -> None:
    """Send to nowhere what is printed from now on: a terminal that hung up refuses it, to us and to what we start."""
    for number in (1, 2):
        with suppress(OSError):  # closed long ago
            if stat.S_ISCHR(os.fstat(number).st_mode):  # it says no more than that of itself
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, number)
                os.close(nowhere)


@contextmanager
def signals_ignored() -> Iterator[None]:
    """Keep STOP_SIGNALS out while something is cleaned up; children started meanwhile ignore them as well."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are handled in the main thread only
        return
    before = {signum: signal.signal(signum, signal.SIG_IGN) for signum in STOP_SIGNALS}
    try:
        yield
    finally:
        _restore(before)


def _restore(handlers: Mapping[signal.Signals, Callable[[int, FrameType | None], object] | int | None]) -> None:
    for signum, handler in handlers.items():
        signal.signal(signum, handler)
