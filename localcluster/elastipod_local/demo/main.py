"""`make demo`: an elastic job trains on a real cluster while nodes come and go, a worker crashes, and an urgent job arrives.

Act 1: nodes come and go (2 -> 4 -> 2 replicas), and a worker is killed. Act 2: the job is back at 4, all that its queue has,
when an urgent job arrives; it gives up 2 replicas, continues with its minimum, and grows back. Through all of that the workers
that stay keep their processes and their state in memory. At the end one resize restarts the processes, for comparison.

The demo uses only what a user has: helm, kubectl, Kueue's queues, and nodes. It shows the events as they happen, then checks
them and writes report.json and timeline.svg to .run/demo/. It removes everything that it created, also on Ctrl-C. It takes about
three minutes; the first run fetches or builds Kubernetes, Kueue and the node images, and says how long that takes.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from elastipod_local.cluster import Cluster
from elastipod_local.demo.result import DemoResult, collect_diagnostics
from elastipod_local.demo.steps import Demo
from elastipod_local.demo.view import make_view
from elastipod_local.errors import LocalClusterError, UnsupportedError, what_the_machine_refused
from elastipod_local.host import is_root
from elastipod_local.machine import require_nodes_possible
from elastipod_local.paths import checkout_root
from elastipod_local.state import exclusive

DONE, FAILED, UNSUPPORTED, INTERRUPTED = 0, 1, 2, 130


class Interrupted(BaseException):
    """SIGINT or SIGTERM arrived; no `except Exception` may catch it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; give 0 if everything was shown, 1 if not, 2 if it cannot run here, 130 if interrupted."""
    parser = argparse.ArgumentParser(
        prog="make demo",
        usage='make demo [ARGS="--keep"]',
        description=__doc__,
        epilog="Exit status: 0 everything was shown, 1 something was not (it is named), 2 not possible on this machine, 130 Ctrl-C.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--keep", action="store_true", help="keep the cluster and the job's pods running at the end")
    options = parser.parse_args(argv)
    try:
        _require_machine()
        root = checkout_root()
        with exclusive(root / ".run" / "demo" / "lock", wait_s=0), _interruptible():
            return _run(root, keep=options.keep)
    except LocalClusterError as error:
        print(f"demo: {error}", file=sys.stderr)
        return UNSUPPORTED if isinstance(error, UnsupportedError) else FAILED
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"demo: {what_the_machine_refused(error)}", file=sys.stderr)
        return FAILED


def _require_machine() -> None:
    """Raise LocalClusterError with one sentence if nodes cannot be created."""
    if sys.platform != "linux":
        raise UnsupportedError(
            f"the demo creates Kubernetes nodes from Linux namespaces, and this is {sys.platform}; "
            "run it on a Linux machine or in a Linux virtual machine, as root"
        )
    if not is_root():
        raise UnsupportedError(
            "the demo creates Kubernetes nodes from Linux namespaces, which needs root; run it as root: sudo make demo"
        )
    require_nodes_possible()


def _run(root: Path, *, keep: bool) -> int:
    view = make_view()
    demo = Demo(root, view)
    result: DemoResult | None = None
    status = FAILED
    try:
        result = demo.run()
        status = FAILED if result.shortcomings else DONE
    except LocalClusterError as error:
        view.close()
        print(f"\ndemo: {error}", file=sys.stderr)
        print(
            f"diagnostics of the cluster are in {collect_diagnostics(demo.cluster.kubectl, root / '.run' / 'demo')}",
            file=sys.stderr,
        )
        print(f"the logs of its own processes are in {demo.cluster.folder / 'logs'}", file=sys.stderr)
    except Interrupted:
        status = INTERRUPTED
        print("\ndemo: interrupted; taking everything down", file=sys.stderr)
    finally:
        view.close()
        _take_down(demo.cluster, keep=keep and status != INTERRUPTED)
    if result:
        print(f"\n{result.summary}")
        for sentence in result.shortcomings:
            print(f"not shown: {sentence}", file=sys.stderr)
    return status


def _take_down(cluster: Cluster, *, keep: bool) -> None:
    """Take the cluster down without interruption, or say how to use it."""
    if keep and cluster.is_running():
        print(f"\nThe cluster is up: export KUBECONFIG={cluster.kubeconfig}")
        program = Path(sys.executable).with_name("elastipod")  # in .venv, which is on no PATH
        print(f"Take it down with: {program} local down --name {cluster.name}")
        return
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    cluster.down()


@contextmanager
def _interruptible() -> Iterator[None]:
    """Turn SIGINT and SIGTERM into Interrupted, so that everything is taken down on the way out."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise Interrupted

    before = {signum: signal.signal(signum, interrupt) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


if __name__ == "__main__":
    sys.exit(main())
