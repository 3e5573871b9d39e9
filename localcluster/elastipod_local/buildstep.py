"""Carries out one RUN or COPY in a root of its own: `python -m elastipod_local.buildstep STEP.json`.

Started by `imagebuild` with new mount and pid namespaces, so that none of its processes can outlive it. Its changes are
written to the upper folder of an overlay. /run, /tmp and /root/.cache are in memory and never part of the image.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from elastipod_local.host import OPEN_UMASK, run

BUILD_FILES = "/run/build"
SOURCE = "/run/build/source"
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")


@dataclass(frozen=True, slots=True)
class BuildStep:
    """One step. lower: folders of the layers below, topmost first; files: what is shown read-only in BUILD_FILES."""

    stage: str  # a scratch folder
    lower: tuple[str, ...]
    upper: str
    command: tuple[str, ...]
    env: dict[str, str]
    workdir: str
    user: str
    files: dict[str, str]  # name in BUILD_FILES -> path on the machine
    source: tuple[str, ...]  # layers, topmost first, or one folder, shown in SOURCE for COPY
    source_writable: bool = False

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> "BuildStep":
        record = json.loads(text)
        for name in ("lower", "command", "source"):
            record[name] = tuple(record[name])
        return cls(**record)


def main(step_file: str) -> int:
    """Carry out the step and give its exit code."""
    os.umask(OPEN_UMASK)  # what it makes is for every user of the image
    step = BuildStep.decode(Path(step_file).read_text())
    run(["mount", "--make-rprivate", "/"])
    root = _mount_root(step)
    _mount_inside(step, root)
    os.chroot(root)
    workdir = Path(step.workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    os.chdir(workdir)
    user, _, group = step.user.partition(":")
    if user:
        os.setgroups([])
        os.setgid(int(group or user))
        os.setuid(int(user))
    return subprocess.run(step.command, env=step.env, stdin=subprocess.DEVNULL).returncode


def _mount_root(step: BuildStep) -> Path:
    stage = Path(step.stage)
    root, work = stage / "root", stage / "work"
    for folder in (root, work):
        folder.mkdir(parents=True, exist_ok=True)
    options = f"lowerdir={':'.join(step.lower)},upperdir={step.upper},workdir={work}"
    run(["mount", "-t", "overlay", "-o", options, "build", root])
    return root


def _mount_inside(step: BuildStep, root: Path) -> None:
    for name in ("proc", "dev", "run", "tmp", "root/.cache"):
        (root / name).mkdir(parents=True, exist_ok=True)
    run(["mount", "-t", "proc", "proc", root / "proc"])
    for name in ("dev", "run", "tmp", "root/.cache"):
        run(["mount", "-t", "tmpfs", "-o", "mode=1777" if name == "tmp" else "mode=755", "build", root / name])
    (root / "dev" / "shm").mkdir()
    (root / "dev" / "shm").chmod(0o1777)  # where Python keeps the locks of its process pools
    for device in DEVICES:
        (root / "dev" / device).touch()
        run(["mount", "--bind", f"/dev/{device}", root / "dev" / device])
    for name, link in {"fd": "/proc/self/fd", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"}.items():
        (root / "dev" / name).symlink_to(link)
    build = Path(f"{root}{BUILD_FILES}")
    build.mkdir()
    for name, path in step.files.items():
        _bind_file(Path(path), build / name)
    _bind_file(Path("/etc/resolv.conf"), root / "etc" / "resolv.conf")
    if step.source:
        _mount_source(step, Path(f"{root}{SOURCE}"))


def _bind_file(source: Path, target: Path) -> None:
    if not target.exists():
        target.touch()
    run(["mount", "--bind", "-o", "ro", source, target])


def _mount_source(step: BuildStep, target: Path) -> None:
    target.mkdir()
    if len(step.source) == 1:
        run(["mount", "--bind", "-o", "rw" if step.source_writable else "ro", step.source[0], target])
    else:
        run(["mount", "-t", "overlay", "-o", f"lowerdir={':'.join(step.source)}", "source", target])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
