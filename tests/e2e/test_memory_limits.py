"""Images in a container whose memory limit has no room for them: a sentence and durable storage, no kill by the kernel."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = [pytest.mark.needs_root]

GROUPS = Path("/sys/fs/cgroup")
MIB = 1 << 20
STATE_MIB = 200

# argv: group's folder, limit in MiB beyond what the process has by then (0 for none), checkpoints, memory.
SCRIPT = """
import os, sys, logging
from pathlib import Path
import torch
from elastipod.checkpoint import CheckpointManager
from elastipod.checkpoint.memory_limits import cgroup_limits
logging.basicConfig(level=logging.WARNING)
group, room, checkpoints, memory = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
(group / "cgroup.procs").write_text(str(os.getpid()))
state = torch.nn.Linear(1024, STATE * 256, bias=False)
optimizer = torch.optim.SGD(state.parameters(), lr=0.1)
version_2 = (group / "memory.max").exists()
used = int((group / ("memory.current" if version_2 else "memory.usage_in_bytes")).read_text())
limit = used + (room << 20)
(group / ("memory.max" if version_2 else "memory.limit_in_bytes")).write_text(str(limit))
assert cgroup_limits()[0].limit // 4096 == limit // 4096
with CheckpointManager(checkpoints, memory=memory) as manager:
    for step in (1, 2, 3):
        manager.save(step, model=state, optimizer=optimizer)
print("saved", len(list(Path(memory).rglob("*.bin"))))
""".replace("STATE", str(STATE_MIB))


@contextmanager
def memory_group() -> Iterator[Path]:
    """Make a control group that can limit memory, of whichever version this machine has."""
    top = GROUPS / "memory" if (GROUPS / "memory/memory.limit_in_bytes").exists() else GROUPS
    folder = top / f"elastipod-test-{secrets.token_hex(4)}"
    try:
        if top == GROUPS:
            (GROUPS / "cgroup.subtree_control").write_text("+memory")
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"this machine lets nobody make memory groups: {error}")
    try:
        yield folder
    finally:
        folder.rmdir()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("room_mib", "images", "warnings"),
    [
        pytest.param(STATE_MIB * 3 // 2, 0, 1, id="too little for two images"),
        pytest.param(STATE_MIB * 4, 2, 0, id="enough", marks=pytest.mark.long("variants")),
    ],
)
def test_images_do_not_pass_the_containers_limit(tmp_path: Path, room_mib: int, images: int, warnings: int) -> None:
    memory = Path("/dev/shm") / f"elastipod-test-{secrets.token_hex(4)}"
    try:
        with memory_group() as group:
            done = subprocess.run(
                [sys.executable, "-c", SCRIPT, str(group), str(room_mib), str(tmp_path / "checkpoints"), str(memory)],
                capture_output=True,
                text=True,
                check=False,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
    finally:
        subprocess.run(["rm", "-rf", memory], check=True)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr}"
    assert done.stdout == f"saved {images}\n"
    assert (
        done.stderr.count("no checkpoints are kept in memory, because there is not enough memory for 2 of them")
        == warnings
    )
    assert done.stderr.count("the memory limit of the container allows") == warnings
