"""`make demo`: a real elastic job on a real cluster goes 2 -> 4 -> 2 replicas, loses a worker, recovers and completes.

Everything is done the way a user does it: helm, kubectl, nodes that come and go. What happened is shown as it happens,
then written to .run/demo/ (report.json, timeline.svg). Whatever was made is taken down again, also on Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import yaml

from elastipod_local import binaries
from elastipod_local.cluster import Cluster
from elastipod_local.demo_outcome import Ending, audit, collect, conclude
from elastipod_local.demo_report import KILL_MARK, Kind, Mark, Run
from elastipod_local.demo_view import View, make_view
from elastipod_local.demo_watch import ENDED, Seen, Watcher
from elastipod_local.demo_worker import kill_worker
from elastipod_local.errors import LocalClusterError, UnsupportedError
from elastipod_local.host import is_root
from elastipod_local.images import ensure_images
from elastipod_local.packages import ensure_packages
from elastipod_local.paths import checkout_root, cluster_dir
from elastipod_local.run_log import find_logs, read_run
from elastipod_local.state import NodeOptions, exclusive

CLUSTER = "demo"
OPERATOR_NAMESPACE = "aws-hyperpod"
EXAMPLE = ("examples/storage.yaml", "examples/lm/job.yaml")
NODES = NodeOptions(cpus=1)  # room for one of the example's replicas each, whatever the machine has
TRAIN_S = 12.0  # how long each size is left to train, so that it can be seen
UNSAVED_STEPS = 5  # steps since the last checkpoint when the worker is killed
INSTALL_DEADLINE_S = 120
START_DEADLINE_S = 120
RESIZE_DEADLINE_S = 120
RECOVERY_DEADLINE_S = 60
END_DEADLINE_S = 240
DONE, FAILED, UNSUPPORTED, INTERRUPTED = 0, 1, 2, 130


class Interrupted(BaseException):
    """SIGINT or SIGTERM arrived; no `except Exception` may hold it up."""


@dataclass(frozen=True, slots=True)
class Job:
    """The example that is applied: its files, and its name as its manifest gives it."""

    files: tuple[Path, ...]
    name: str

    @classmethod
    def of_checkout(cls, root: Path) -> Job:
        files = tuple(root / name for name in EXAMPLE)
        documents = yaml.safe_load_all(files[-1].read_text())
        job = next(document for document in documents if document["kind"] == "HyperPodPyTorchJob")
        return cls(files, job["metadata"]["name"])


@dataclass(slots=True)
class Notes:
    """What the demo itself writes down: the job's creation, what it did to the cluster, and its own seconds."""

    created_at: float = 0.0
    marks: list[Mark] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def mark(self, name: str, at: float | None = None) -> None:
        self.marks.append(Mark(name, time.time() if at is None else at))


class Demo:
    """One run, step by step. Each step either gets where it says or raises with what it saw instead."""

    def __init__(self, root: Path, view: View) -> None:
        self._root = root
        self._view = view
        self._job = Job.of_checkout(root)
        self._notes = Notes()
        self._number = 0
        self._cluster = Cluster(CLUSTER, cluster_dir(CLUSTER), view.detail)

    @property
    def cluster(self) -> Cluster:
        """The demo's cluster, whether it is up or not."""
        return self._cluster

    def run(self) -> Ending:
        """Do all steps; give how the run ended. Raises LocalClusterError where one does not get there."""
        with self._step("build", "build what is missing (the first time takes several minutes)"):
            self._build()
        with self._step("cluster", "start a Kubernetes cluster with 2 nodes"):
            self._start_cluster()
        with self._step("install", "install the operator from its chart"):
            self._install()
        with self._watching() as watcher:
            with self._step("start", f"apply {EXAMPLE[-1]} and wait until 2 replicas train"):
                self._start(watcher)
            with self._step("grow", "add 2 nodes; the job grows to 4"):
                self._grow(watcher)
            with self._step("shrink", "drain these 2 nodes; the job shrinks to 2"):
                self._shrink(watcher)
            with self._step("crash", "kill one worker with SIGKILL; the job recovers"):
                self._crash(watcher)
            with self._step("complete", "let the job complete"):
                seen = watcher.wait_for(
                    lambda seen: seen.state in ENDED, "the end of the job", deadline_s=END_DEADLINE_S, may_end=True
                )
        with self._step("audit", "audit the sample logs"):
            return self._conclude(seen)

    def _build(self) -> None:
        names = [*binaries.CONTROL_PLANE, *binaries.NODE, "helm"]
        binaries.ensure(names, self._view.detail)
        ensure_packages(self._view.detail)
        ensure_images(self._view.detail)

    def _start_cluster(self) -> None:
        if self._cluster.down():
            self._view.detail("removed what an earlier run had left")
        self._cluster = Cluster.up(CLUSTER, nodes=2, options=NODES, progress=self._view.detail)

    def _install(self) -> None:
        self._cluster.helm(
            *("upgrade", "--install", "elastipod", str(self._root / "charts" / "elastipod")),
            *("--namespace", OPERATOR_NAMESPACE, "--create-namespace", "--set", "image.tag=dev"),
            *("--wait", "--timeout", f"{INSTALL_DEADLINE_S}s"),
            timeout_s=INSTALL_DEADLINE_S + 30,
        )

    def _start(self, watcher: Watcher) -> None:
        self._notes.created_at = time.time()
        for file in self._job.files:
            self._view.detail(self._cluster.kubectl("apply", "--filename", str(file)).strip().replace("\n", ", "))
        self._await_size(watcher, 2, START_DEADLINE_S)

    def _grow(self, watcher: Watcher) -> None:
        self._notes.mark("2 nodes added")
        self._added = self._cluster.add_nodes(2)
        self._await_size(watcher, 4, RESIZE_DEADLINE_S)

    def _shrink(self, watcher: Watcher) -> None:
        self._notes.mark("2 nodes drained")
        self._cluster.kubectl(
            *("drain", *self._added, "--ignore-daemonsets", "--delete-emptydir-data"),
            f"--timeout={RESIZE_DEADLINE_S}s",
            timeout_s=RESIZE_DEADLINE_S + 10,
        )
        self._await_size(watcher, 2, RESIZE_DEADLINE_S)

    def _crash(self, watcher: Watcher) -> None:
        """Kill a worker some steps after a checkpoint, so that the report shows what a crash costs."""
        watcher.wait_for(
            lambda seen: seen.progress is not None and seen.progress.unsaved_steps >= UNSAVED_STEPS,
            f"{UNSAVED_STEPS} steps after a checkpoint",
            deadline_s=RECOVERY_DEADLINE_S,
        )
        before = watcher.seen.generation
        worker, at = kill_worker(self._newest_pod_uid())
        self._notes.mark(KILL_MARK, at)
        self._view.detail(f"killed the worker with rank {worker.rank} (pid {worker.pid})")

        def is_back(seen: Seen) -> bool:
            entry = next((entry for entry in seen.history if entry.generation == seen.generation), None)
            return seen.generation > before and entry is not None and entry.kind is Kind.RECOVERY

        watcher.wait_for(is_back, "the recovery from the killed worker", deadline_s=RECOVERY_DEADLINE_S)

    def _newest_pod_uid(self) -> str:
        """Give the UID of the job's pod with the highest ordinal among those that run."""
        answer = self._cluster.kubectl("get", "pods", f"--selector=HPJob={self._job.name}", "--output=json")
        running = [pod["metadata"] for pod in json.loads(answer)["items"] if pod["status"]["phase"] == "Running"]
        uid: str = max(running, key=lambda pod: int(pod["labels"]["elastipod.io/ordinal"]))["uid"]
        return uid

    def _await_size(self, watcher: Watcher, size: int, deadline_s: float) -> None:
        """Wait until the job trains at this size, and then has trained at it long enough to be seen."""
        what = f"training with {size} replicas"
        watcher.wait_for(lambda seen: seen.training_size == size, what, deadline_s=deadline_s)
        until = time.time() + TRAIN_S
        watcher.wait_for(lambda seen: seen.at >= until, what, deadline_s=TRAIN_S + 30)

    @contextmanager
    def _watching(self) -> Iterator[Watcher]:
        watcher = Watcher(
            self._cluster.kubectl,
            name=self._job.name,
            shared=self._cluster.shared,
            on_seen=self._view.seen,
            on_event=self._view.event,
        )
        with watcher:
            yield watcher

    def _conclude(self, seen: Seen) -> Ending:
        logs = find_logs(self._cluster.shared)
        if logs is None:
            raise LocalClusterError(f"no worker wrote a sample log below {self._cluster.shared}; last seen: {seen}")
        run = Run(self._notes.created_at, seen.history, read_run(logs), tuple(self._notes.marks))
        return conclude(run, audit(logs), seen.state, self._notes.seconds, self._root / ".run" / "demo")

    @contextmanager
    def _step(self, name: str, title: str) -> Iterator[None]:
        self._number += 1
        self._view.step(self._number, 9, title)
        began = time.monotonic()
        yield
        self._notes.seconds[name] = round(time.monotonic() - began, 1)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; give 0 when all was shown, 1 when not, 2 where it cannot run at all, 130 when interrupted."""
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--keep", action="store_true", help="leave the cluster and the job's pods up at the end")
    options = parser.parse_args(argv)
    try:
        _require_machine()
        root = checkout_root()
        with exclusive(root / ".run" / "demo" / "lock", wait_s=0), _interruptible():
            return _run(root, keep=options.keep)
    except LocalClusterError as error:
        print(f"demo: {error}", file=sys.stderr)
        return UNSUPPORTED if isinstance(error, UnsupportedError) else FAILED


def _require_machine() -> None:
    """Raise UnsupportedError with one sentence where nodes cannot be made."""
    if sys.platform != "linux":
        raise UnsupportedError(
            f"the demo makes Kubernetes nodes out of Linux namespaces, and this is {sys.platform}; "
            "run it on a Linux machine or in a Linux virtual machine, as root"
        )
    if not is_root():
        raise UnsupportedError(
            "the demo makes Kubernetes nodes out of Linux namespaces, which needs root; run it as root: sudo make demo"
        )


def _run(root: Path, *, keep: bool) -> int:
    view = make_view()
    demo = Demo(root, view)
    ending: Ending | None = None
    status = FAILED
    try:
        ending = demo.run()
        status = FAILED if ending.shortcomings else DONE
    except LocalClusterError as error:
        view.close()
        print(f"\ndemo: {error}", file=sys.stderr)
        print(f"what the cluster said is in {collect(demo.cluster.kubectl, root / '.run' / 'demo')}", file=sys.stderr)
    except Interrupted:
        status = INTERRUPTED
        print("\ndemo: interrupted; taking everything down", file=sys.stderr)
    finally:
        view.close()
        _take_down(demo.cluster, keep=keep and status != INTERRUPTED)
    if ending:
        print(f"\n{ending.summary}")
        for sentence in ending.shortcomings:
            print(f"not as it should be: {sentence}", file=sys.stderr)
    return status


def _take_down(cluster: Cluster, *, keep: bool) -> None:
    """Take the cluster down, not to be interrupted; or say how to use it."""
    if keep and cluster.is_running():
        print(f"\nThe cluster is up: export KUBECONFIG={cluster.kubeconfig}")
        print(f"Take it down with: elastipod local down --name {cluster.name}")
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
