"""The steps of the demo. It only uses what a user has: helm, kubectl, nodes and jobs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import yaml

from elastipod_local import binaries
from elastipod_local.cluster import Cluster
from elastipod_local.demo.kill import kill_worker
from elastipod_local.demo.report import KILL_MARK, Kind, Mark, Run
from elastipod_local.demo.result import DemoResult, audit, write_result
from elastipod_local.demo.run_log import find_logs, read_run
from elastipod_local.demo.urgent_job import UrgentRun
from elastipod_local.demo.view import View
from elastipod_local.demo.watcher import JobEvent, JobSnapshot, Watcher
from elastipod_local.errors import LocalClusterError, UnsupportedError
from elastipod_local.kueue_config import KueueOptions
from elastipod_local.paths import cluster_dir
from elastipod_local.prepare import prepare
from elastipod_local.state import NodeOptions

CLUSTER = "demo"
OPERATOR_NAMESPACE = "aws-hyperpod"
QUEUE = "examples/lm/queue.yaml"
CLUSTER_MANIFESTS = ("examples/storage.yaml", QUEUE)
JOB = "examples/lm/job.yaml"
URGENT_JOB = "examples/lm/job-urgent.yaml"
NODES = NodeOptions(cpus=1)  # room for one replica of an example each, on any machine
STEPS = 14
TRAIN_S = 8.0  # how long each size trains, so that it is visible
UNSAVED_STEPS = 5  # steps since the last durable checkpoint when the worker is killed
INSTALL_DEADLINE_S = 120
START_DEADLINE_S = 300  # torch takes minutes to import where a busy machine reads it for the first time
RESIZE_DEADLINE_S = 120
RECOVERY_DEADLINE_S = 60
NEW_PROCESSES = {"spec": {"elastipod": {"recovery": "Process"}}}
STALL_S = 120  # without a step, after which a job is given up that is to train to its end


@dataclass(frozen=True, slots=True)
class ExampleJob:
    """An example: its file, and its name in the manifest."""

    file: Path
    name: str

    @classmethod
    def of_file(cls, file: Path) -> ExampleJob:
        return cls(file, yaml.safe_load(file.read_text())["metadata"]["name"])


@dataclass(slots=True)
class DemoLog:
    """The demo's own records: when it applied the jobs, its actions on the cluster, and the duration of its steps."""

    created_at: dict[str, float] = field(default_factory=dict)
    marks: list[Mark] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def mark(self, name: str, at: float | None = None) -> None:
        self.marks.append(Mark(name, time.time() if at is None else at))


class Demo:
    """One run, step by step. Each step reaches its goal or raises with what it observed instead."""

    def __init__(self, root: Path, view: View) -> None:
        self._root = root
        self._view = view
        self._job = ExampleJob.of_file(root / JOB)
        self._urgent_job = ExampleJob.of_file(root / URGENT_JOB)
        self._log = DemoLog()
        self._number = 0
        self._cluster = Cluster(CLUSTER, cluster_dir(CLUSTER), view.detail)

    @property
    def cluster(self) -> Cluster:
        """The demo's cluster, even if it is not running."""
        return self._cluster

    def run(self) -> DemoResult:
        """Run all steps; give the result. Raises LocalClusterError if a step fails."""
        with self._step("build", "fetch or build missing programs and images"):
            self._build()
        with self._step("cluster", "start a Kubernetes cluster: 2 nodes, and Kueue for quota"):
            self._start_cluster()
        with self._step("install", f"install the operator; {QUEUE} creates a queue with quota for 4 replicas"):
            self._install()
        with self._watching(self._job) as watcher:
            self._view.act("Act 1: nodes come and go, and a worker dies")
            self._act_one(watcher)
            self._view.act("Act 2: an urgent job needs the capacity")
            urgent = self._act_two(watcher)
            self._view.act("For comparison: new processes in place of a change in memory")
            self._force_new_processes(watcher)
            with self._step("complete", "wait until the job completes"):
                snapshot = watcher.wait_for_end(stall_s=STALL_S)
        with self._step("audit", "audit both jobs: was every sample trained exactly once?"):
            return self._write_result(snapshot, urgent, watcher.events)

    def _act_one(self, watcher: Watcher) -> None:
        with self._step("start", f"apply {JOB}; wait until 2 replicas train"):
            self._apply(self._job)
            self._train_at_size(watcher, 2, START_DEADLINE_S)
        with self._step("grow", "add 2 nodes; the job grows to 4 replicas"):
            self._log.mark("2 nodes added")
            self._added = self._cluster.add_nodes(2)
            self._train_at_size(watcher, 4, RESIZE_DEADLINE_S)
        with self._step("shrink", "drain these 2 nodes; the job continues with 2"):
            self._drain()
            self._train_at_size(watcher, 2, RESIZE_DEADLINE_S)
        with self._step(
            "crash", "kill one worker with SIGKILL; the other one keeps its process, and the new one gets its state"
        ):
            self._crash(watcher)

    def _act_two(self, watcher: Watcher) -> JobSnapshot:
        """Give the urgent job at its end."""
        with self._step("return", "uncordon these 2 nodes; the job grows to 4, the quota of its queue"):
            self._log.mark("2 nodes returned")
            self._cluster.kubectl("uncordon", *self._added)
            self._train_at_size(watcher, 4, RESIZE_DEADLINE_S)
        with self._watching(self._urgent_job) as urgent_watcher:
            with self._step("arrive", f"apply {URGENT_JOB}; the job gives up 2 replicas and continues with 2"):
                self._log.mark(f"job {self._urgent_job.name} applied")
                self._apply(self._urgent_job)
                _wait_for_size(watcher, 2, RESIZE_DEADLINE_S)
            with self._step("urgent", "the urgent job trains on the freed quota, to its end"):
                _wait_for_size(urgent_watcher, 2, START_DEADLINE_S)
                urgent = urgent_watcher.wait_for_end(stall_s=STALL_S)
        with self._step("regrow", "the urgent job is gone; the job grows back to 4"):
            self._train_at_size(watcher, 4, RESIZE_DEADLINE_S)
        return urgent

    def _force_new_processes(self, watcher: Watcher) -> None:
        name = f"hyperpodjob/{self._job.name}"
        with self._step(
            "compare", "set spec.elastipod.recovery: Process and scale to 2; the workers save, end and start again"
        ):
            self._cluster.kubectl("patch", name, "--type=merge", "--patch", json.dumps(NEW_PROCESSES))
            self._log.mark("scaled to 2, with new processes")
            self._view.detail(self._cluster.kubectl("scale", name, "--replicas=2").strip())
            _wait_for_size(watcher, 2, RESIZE_DEADLINE_S)  # it trains to its end at this size

    def _build(self) -> None:
        names = [*binaries.CONTROL_PLANE, *binaries.NODE, *binaries.KUEUE]
        prepare(names, with_images=True, progress=self._view.detail)

    def _start_cluster(self) -> None:
        if self._cluster.down():
            self._view.detail("removed the remains of an earlier run")
        self._cluster = Cluster.up(CLUSTER, nodes=2, options=NODES, kueue=KueueOptions(), progress=self._view.detail)

    def _install(self) -> None:
        self._cluster.helm(
            *("upgrade", "--install", "elastipod", str(self._root / "charts" / "elastipod")),
            *("--namespace", OPERATOR_NAMESPACE, "--create-namespace", "--set", "image.tag=dev"),
            *("--wait", "--timeout", f"{INSTALL_DEADLINE_S}s"),
            timeout_s=INSTALL_DEADLINE_S + 30,
        )
        for name in CLUSTER_MANIFESTS:
            self._kubectl_apply(self._root / name)

    def _apply(self, job: ExampleJob) -> None:
        self._log.created_at[job.name] = time.time()
        self._kubectl_apply(job.file)

    def _kubectl_apply(self, file: Path) -> None:
        self._view.detail(self._cluster.kubectl("apply", "--filename", str(file)).strip().replace("\n", ", "))

    def _drain(self) -> None:
        self._log.mark("2 nodes drained")
        self._cluster.kubectl(
            *("drain", *self._added, "--ignore-daemonsets", "--delete-emptydir-data"),
            f"--timeout={RESIZE_DEADLINE_S}s",
            timeout_s=RESIZE_DEADLINE_S + 10,
        )

    def _crash(self, watcher: Watcher) -> None:
        """Kill a worker some steps after a durable checkpoint, so that the report shows what memory saves."""
        watcher.wait_for(
            lambda snapshot: snapshot.progress is not None and snapshot.progress.unsaved_steps >= UNSAVED_STEPS,
            f"{UNSAVED_STEPS} steps after a durable checkpoint",
            deadline_s=RECOVERY_DEADLINE_S,
        )
        before = watcher.snapshot.generation
        worker, at = kill_worker(self._newest_pod_uid())
        self._log.mark(KILL_MARK, at)
        self._view.detail(f"killed a worker (pid {worker.pid})")

        def is_back(snapshot: JobSnapshot) -> bool:
            entry = next((entry for entry in snapshot.history if entry.generation == snapshot.generation), None)
            return snapshot.generation > before and entry is not None and entry.kind is Kind.RECOVERY

        watcher.wait_for(is_back, "the recovery from the killed worker", deadline_s=RECOVERY_DEADLINE_S)

    def _newest_pod_uid(self) -> str:
        """Give the UID of the job's pod with the highest ordinal among those that run."""
        answer = self._cluster.kubectl("get", "pods", f"--selector=HPJob={self._job.name}", "--output=json")
        running = [pod["metadata"] for pod in json.loads(answer)["items"] if pod["status"]["phase"] == "Running"]
        uid: str = max(running, key=lambda pod: int(pod["labels"]["elastipod.io/ordinal"]))["uid"]
        return uid

    def _train_at_size(self, watcher: Watcher, size: int, deadline_s: float) -> None:
        """Wait until the job trains at this size, and has trained long enough to be visible."""
        what = _wait_for_size(watcher, size, deadline_s)
        until = time.time() + TRAIN_S
        watcher.wait_for(lambda snapshot: snapshot.at >= until, what, deadline_s=TRAIN_S + 30)

    @contextmanager
    def _watching(self, job: ExampleJob) -> Iterator[Watcher]:
        watcher = Watcher(
            self._cluster.api_server,
            name=job.name,
            shared=self._cluster.shared,
            on_snapshot=self._view.job,
            on_event=partial(self._view.event, job.name),
        )
        with watcher:
            yield watcher

    def _write_result(self, snapshot: JobSnapshot, urgent: JobSnapshot, events: Sequence[JobEvent]) -> DemoResult:
        logs, run = self._run_of(self._job, snapshot)
        urgent_logs, urgent_run = self._run_of(self._urgent_job, urgent)
        urgent_audit = audit(urgent_logs)
        visit = UrgentRun(
            job=self._urgent_job.name,
            run=urgent_run,
            state=urgent.state,
            audit=urgent_audit.report or {"said": urgent_audit.problem},
            audit_exit=urgent_audit.exit_status,
            events=events,
        )
        folder = self._root / ".run" / "demo"
        return write_result(run, audit(logs), snapshot.state, visit, self._log.seconds, folder)

    def _run_of(self, job: ExampleJob, snapshot: JobSnapshot) -> tuple[Path, Run]:
        logs = find_logs(self._cluster.shared, job.name)
        if logs is None:
            raise LocalClusterError(f"no worker wrote a sample log below {self._cluster.shared}; last seen: {snapshot}")
        marks = tuple(self._log.marks) if job is self._job else ()
        return logs, Run(self._log.created_at[job.name], snapshot.history, read_run(logs), marks)

    @contextmanager
    def _step(self, name: str, title: str) -> Iterator[None]:
        """Announce a step and record its duration; an error names the step."""
        self._number += 1
        self._view.step(self._number, STEPS, title)
        began = time.monotonic()
        try:
            yield
        except UnsupportedError:
            raise
        except LocalClusterError as error:
            raise LocalClusterError(f"step {self._number}/{STEPS} ({title}) failed: {error}") from error
        self._log.seconds[name] = round(time.monotonic() - began, 1)


def _wait_for_size(watcher: Watcher, size: int, deadline_s: float) -> str:
    """Wait until a job trains at this size; give its description."""
    what = f"training with {size} replicas"
    watcher.wait_for(lambda snapshot: snapshot.training_size == size, what, deadline_s=deadline_s)
    return what
