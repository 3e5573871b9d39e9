"""Ways in which a worker's script may end. Run as a script: the generation says which one; none of it needs torch.

What each prints, and with what it ends, must be the same for a worker that was forked and one that was exec'ed.
"""

import atexit
import io
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from types import FrameType, TracebackType
from typing import IO

FOLDER = os.environ.get("CASES_DIR", ".")


def out(*words: object) -> None:
    print(*words, flush=True)


def kept(name: str) -> IO[str]:
    """Open a file that nobody will close."""
    return open(os.path.join(FOLDER, name), "w")


class Last:
    """Speaks when it is thrown away."""

    def __del__(self, out: Callable[..., None] = out) -> None:
        out("finalized")


def returns() -> None:
    out("working")


def exits_with_a_number() -> None:
    sys.exit(3)


def exits_with_a_large_number() -> None:
    sys.exit(259)


def exits_with_a_text() -> None:
    sys.exit("no data")


def exits_with_nothing() -> None:
    sys.exit()


def raises() -> None:
    try:
        dict[str, float]()["lr"]
    except KeyError as error:
        raise ValueError("bad options") from error


def raises_with_a_hook() -> None:
    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        assert trace is not None
        out("hook", kind.__name__, value, trace.tb_frame.f_code.co_name, sys.exc_info())
        out("names", [frame.f_code.co_name for frame in frames(trace)])

    def frames(trace: TracebackType | None) -> Iterator[FrameType]:
        while trace:
            yield trace.tb_frame
            trace = trace.tb_next

    sys.excepthook = hook
    raises()


def raises_with_a_broken_hook() -> None:
    sys.excepthook = lambda *_: 1 / 0
    raises()


def raises_what_cannot_be_compiled() -> None:
    compile("a b", os.path.join(FOLDER, "made_up.py"), "exec")


def leaves_at_once() -> None:
    out("leaving")
    os._exit(5)


def kills_itself() -> None:
    out("dying")
    os.kill(os.getpid(), signal.SIGKILL)


def is_interrupted() -> None:
    signal.raise_signal(signal.SIGINT)


def is_terminated() -> None:
    signal.raise_signal(signal.SIGTERM)


def has_exit_handlers() -> None:
    atexit.register(out, "first registered")
    atexit.register(out, "last registered")
    sys.exit(4)


def has_a_failing_exit_handler() -> None:
    atexit.register(lambda: 1 / 0)
    atexit.register(sys.exit, 9)


def has_a_thread_to_wait_for() -> None:
    def work() -> None:
        time.sleep(0.2)
        out("thread done")

    threading.Thread(target=work).start()
    out("main done")


def has_a_failing_thread() -> None:
    thread = threading.Thread(target=lambda: 1 / 0, name="broken")
    thread.start()
    thread.join()


def leaves_a_file_open() -> None:
    globals()["file"] = kept("open")
    globals()["file"].write("data")
    local = kept("local")
    local.write("data")
    globals()["cycle"] = [local, None]
    globals()["cycle"][1] = globals()["cycle"]


def leaves_a_file_to_a_daemon_thread() -> None:
    """The interpreter itself loses this one: only a forked worker's is looked at, see the test."""
    file = kept("daemon")
    file.write("data")
    threading.Thread(target=lambda file: time.sleep(60), args=(file,), daemon=True).start()


def leaves_a_busy_daemon_thread() -> None:
    globals()["last"], globals()["file"] = Last(), kept("busy")
    globals()["file"].write("data")

    def spin() -> None:
        while True:
            sum(range(100))

    threading.Thread(target=spin, daemon=True).start()


def leaves_objects() -> None:

    def count() -> Iterator[int]:
        try:
            yield 1
        finally:
            out("generator closed")

    globals()["last"], globals()["numbers"] = Last(), count()
    next(globals()["numbers"])


def leaves_a_temporary_file() -> None:
    globals()["temporary"] = tempfile.NamedTemporaryFile(dir=FOLDER, prefix="temporary-")  # noqa: SIM115 left open on purpose
    globals()["folder"] = tempfile.TemporaryDirectory(dir=FOLDER, prefix="temporary-")
    out("made", len(os.listdir(FOLDER)) > 0)


def logs_into_a_file() -> None:
    logging.basicConfig(filename=os.path.join(FOLDER, "log"), level="INFO")
    logging.info("logged")


def writes_through_a_stream_of_its_own() -> None:
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)), encoding="utf-8")
    print("buffered by the script")


def closes_its_output() -> None:
    out("last words")
    sys.stdout.close()


def cannot_flush_its_output() -> None:
    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(28, "No space left on device")

    sys.stdout = Full()


def runs_a_program() -> None:
    out(
        subprocess.run(
            [sys.executable, "-c", "print('child', end='')"], capture_output=True, text=True, check=True
        ).stdout
    )
    subprocess.run(["echo", "child prints"], check=True)


def forks() -> None:
    pid = os.fork()
    if not pid:
        atexit.register(out, "child's handler")
        sys.exit(7)
    out("child ended with", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def double(number: int) -> tuple[int, str]:
    return number * 2, __name__


def uses_child_processes() -> None:
    for method in ("fork", "spawn", "forkserver"):
        with get_context(method).Pool(1) as pool:
            out(method, pool.apply(double, (21,)))
            pool.close()
            pool.join()


CASES = [value for value in list(globals().values()) if callable(value) and value.__module__ == __name__]
CASES = [case for case in CASES if case.__name__ not in ("out", "kept", "Last", "double")]

if __name__ == "__main__":
    CASES[int(os.environ["ELASTIPOD_GENERATION"]) - 1]()
