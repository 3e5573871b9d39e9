"""A disk of its own for what a job writes, and how it becomes slow for the job alone: the machine's own disk stays as it is."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.host_view import training_processes
from tests.e2e.job_run import JobRun
from tests.patience import PATIENCE_S

from elastipod_local.cgroups import machine_layout
from elastipod_local.cluster import Cluster
from elastipod_local.storage import SHARED_MOUNT

SIZE_BYTES = 256 << 20  # of an image that takes only the room of what is written
# Without a journal nobody else waits for what the job writes.
MAKE_FILE_SYSTEM = ("mkfs.ext4", "-q", "-O", "^has_journal", "-E", "root_owner=65532:65532")


@dataclass
class SlowDisk:
    """The disk of a job. device: `MAJOR:MINOR`. Not slow before `slow_down`."""

    job: JobRun
    device: str
    _limits: set[Path] = field(default_factory=set)

    def slow_down(self, bytes_per_s: int) -> None:
        """Limit what each container that trains now writes to this disk. Writes that wait for the disk (fsync) are slow then."""
        groups = self._groups()
        assert groups, f"nothing of {self.job.name} trains"
        for file, limit in groups.items():
            file.write_text(f"{self.device} {limit.format(bytes_per_s)}")
            self._limits.add(file)

    def quicken(self) -> None:
        """Take the limits off; what waits is written at once."""
        while self._limits:
            file = self._limits.pop()
            with suppress(OSError):  # its container has ended
                file.write_text(f"{self.device} {'wbps=max' if file.name == 'io.max' else '0'}")

    def _groups(self) -> dict[Path, str]:
        """Give, for each container that trains, the file that takes a limit, and the form of the limit.

        Groups of v1 do not inherit limits, so each has its own.
        """
        throttled = [
            (h.mount_point, "blkio.throttle.write_bps_device", "{}")
            for h in machine_layout().hierarchies
            if "blkio" in h.options.split(",")
        ]
        mount_point, name, limit = (throttled or [(Path("/sys/fs/cgroup"), "io.max", "wbps={}")])[0]
        found: dict[Path, str] = {}
        for process in (each for of_pod in training_processes(self.job.name).values() for each in of_pod):
            with suppress(OSError):  # it has ended, before its file was opened or after that
                lines = Path(f"/proc/{process.pid}/cgroup").read_text().splitlines()
                paths = {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines)}
                own = next((path for names, path in paths.items() if "blkio" in names.split(",")), paths.get("", "/"))
                found[mount_point / own.lstrip("/") / name] = limit
        return found

    def seconds_of_saves(self) -> dict[int, float]:
        """Give how long each complete save took, by its step: from the end of the step to rank 0's line that it is saved."""
        ended: dict[int, float] = {}
        saved: dict[int, float] = {}
        for path in sorted(self.job.samples().glob("gen-*-rank-00000.jsonl")):
            for line in (json.loads(text) for text in path.read_text().splitlines() if text.endswith("}")):
                if line["kind"] == "done":
                    ended[line["step"]] = line["t"]
                elif line["kind"] == "saved":
                    saved[line["step"]] = round(line["t"] - ended[line["step"]], 2)
        return saved

    def complete(self) -> list[int]:
        """Give the steps whose checkpoints are complete, oldest first."""
        names = (path.name.split("-") for path in (self.job.samples().parent / "checkpoints").glob("step-*"))
        return sorted(int(step) for _, step, *_ in names)


@contextmanager
def slow_disk(job: JobRun, cluster: Cluster) -> Iterator[SlowDisk]:
    """Give a job that does not exist yet a disk of its own: a file that is a loop device, mounted where all nodes look for its data.

    At the end the job is deleted, and nothing is left of the disk once no process of the cluster has it.
    """
    if not Path("/dev/loop-control").exists():
        pytest.skip("this machine has no loop devices, so no disk can be slow for a job alone")
    claim = "pvc/training-data"
    cluster.kubectl("wait", claim, "--for=jsonpath={.status.phase}=Bound", f"--timeout={PATIENCE_S:g}s")
    volume = cluster.kubectl("get", claim, "-o", "jsonpath={.spec.volumeName}")
    image, here = cluster.folder / f"{job.name}.img", cluster.shared / volume / job.name
    there = f"{SHARED_MOUNT}/{volume}/{job.name}"
    with image.open("wb") as file:
        file.truncate(SIZE_BYTES)
    here.mkdir(parents=True)
    loop = ""
    try:
        _run(*MAKE_FILE_SYSTEM, image)
        loop = _run("losetup", "--find", "--show", image)
        _run("mount", loop, here)
        for node in _nodes(cluster):
            _run(*node, "mount", loop, there)
        disk = SlowDisk(job, _run("lsblk", "--noheadings", "--output=MAJ:MIN", loop))
        try:
            yield disk
        finally:
            disk.quicken()
            job.delete()
    finally:
        _put_away(cluster, image, loop, here, there)


def _put_away(cluster: Cluster, image: Path, loop: str, here: Path, there: str) -> None:
    """Unmount everywhere, lazily. Whoever still looks at the disk keeps it; the kernel frees the device with the last of them."""
    for node in _nodes(cluster):
        _run(*node, "umount", "--lazy", there, check=False)
    _run("umount", "--lazy", here, check=False)
    if loop:
        _run("losetup", "--detach", loop)
    here.rmdir()
    image.unlink()


def _nodes(cluster: Cluster) -> list[tuple[Any, ...]]:
    """Give, for each node that runs, what a command begins with that sees its mounts."""
    inner = [record.inner for record in cluster.state().nodes.values() if record.inner and record.inner.is_alive()]
    return [("nsenter", f"--target={process.pid}", "--mount", "--") for process in inner]


def _run(*command: Any, check: bool = True) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=PATIENCE_S)
    assert not check or done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout.strip()
