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
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from elastipod_local import binaries, ports
from elastipod_local.cluster import Cluster
from elastipod_local.demo.result import DemoResult, collect_diagnostics
from elastipod_local.demo.steps import Demo
from elastipod_local.demo.view import View, make_view
from elastipod_local.errors import LocalClusterError, UnsupportedError, what_the_machine_refused
from elastipod_local.host import is_root, say, signals_ignored, stop_signals_raise
from elastipod_local.machine import require_nodes_possible
from elastipod_local.paths import checkout_root
from elastipod_local.state import exclusive

DONE, FAILED, UNSUPPORTED, INTERRUPTED = 0, 1, 2, 130

Foreseen = LocalClusterError | OSError | subprocess.TimeoutExpired  # each has a sentence for the user
FORESEEN = (LocalClusterError, OSError, subprocess.TimeoutExpired)


class Interrupted(BaseException):
    """One of STOP_SIGNALS arrived; no `except Exception` may catch it."""


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
        with stop_signals_raise(Interrupted):
            _require_machine()
            root = checkout_root()
            with exclusive(root / ".run" / "demo" / "lock", wait_s=0):
                return _run(root, keep=options.keep)
    except Interrupted:
        return INTERRUPTED
    except FORESEEN as error:
        return _tell(error)


def _tell(error: Foreseen) -> int:
    """Print the sentence of an error and give the exit status that it stands for."""
    said = str(error) if isinstance(error, LocalClusterError) else what_the_machine_refused(error)
    say(f"demo: {said}", sys.stderr)
    return UNSUPPORTED if isinstance(error, UnsupportedError) else FAILED


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
    ports.require_free(ports.of_cluster(with_kueue=True))


def _run(root: Path, *, keep: bool) -> int:
    view = make_view()
    demo = Demo(root, view)
    result: DemoResult | None = None
    status = FAILED
    try:
        status, result = _show(demo, view, root)
    except Interrupted:
        status = INTERRUPTED
        say("\ndemo: interrupted; taking everything down", sys.stderr)
    finally:
        try:
            with signals_ignored():
                view.close()
                _take_down(demo.cluster, keep=keep and status != INTERRUPTED)
        except FORESEEN as error:
            status = _tell(error)
    if result:
        say(f"\n{result.summary}")
        for sentence in result.shortcomings:
            say(f"not shown: {sentence}", sys.stderr)
    return status


def _show(demo: Demo, view: View, root: Path) -> tuple[int, DemoResult | None]:
    """Run the demo; give the exit status, and the result of a run that got to its end."""
    try:
        result = demo.run()
        return FAILED if result.shortcomings else DONE, result
    except UnsupportedError as error:
        view.close()
        return _tell(error), None
    except LocalClusterError as error:
        view.close()
        say("", sys.stderr)
        status = _tell(error)
        _diagnose(demo.cluster, root)
        return status, None
    except (OSError, subprocess.TimeoutExpired) as error:
        view.close()
        return _tell(error), None


def _diagnose(cluster: Cluster, root: Path) -> None:
    """Collect what the cluster says of itself, if there is one: kubectl without a kubeconfig asks another, and may have to be built."""
    if cluster.kubeconfig.exists() and not binaries.missing(["kubectl"]):
        found = collect_diagnostics(cluster.kubectl, root / ".run" / "demo")
        say(f"diagnostics of the cluster are in {found}", sys.stderr)
    if (logs := cluster.folder / "logs").is_dir():
        say(f"the logs of its own processes are in {logs}", sys.stderr)


def _take_down(cluster: Cluster, *, keep: bool) -> None:
    """Take the cluster down, or say how to use it."""
    if keep and cluster.is_running():
        say(f"\nThe cluster is up: export KUBECONFIG={cluster.kubeconfig}")
        program = Path(sys.executable).with_name("elastipod")  # in .venv, which is on no PATH
        say(f"Take it down with: {program} local down --name {cluster.name}")
        return
    cluster.down()


if __name__ == "__main__":
    sys.exit(main())
