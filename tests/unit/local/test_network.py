"""Address blocks of clusters that nobody can take down any more are given to others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.patience import PATIENCE_S

from elastipod_local import network
from elastipod_local.processes import TAG

BRIDGES_LEFT = """
import json, sys
from pathlib import Path
from elastipod_local import network
from elastipod_local.addressing import Addressing
free = network.free_addressing()
for addressing, folder in zip(free, sys.argv[1:]):
    network.create_bridge(addressing, Path(folder))
assert len(network.free_addressing()) >= len(free) - len(sys.argv[1:])
print(json.dumps([one.name for one in sorted(network.LINKS.glob("elastipod*"))]))
"""


@pytest.mark.needs_root
def test_the_bridge_of_a_cluster_without_a_folder_and_processes_is_deleted(tmp_path: Path) -> None:
    kept, gone, alive = (tmp_path / name for name in ("kept", "gone", "alive"))
    kept.mkdir()
    # As a process of a cluster whose folder somebody has removed while it runs.
    process = subprocess.Popen(["sleep", "300"], env={**os.environ, TAG: str(alive)})
    try:
        # The program's network is its own: /sys shows the links of the namespace in which it was mounted.
        inside = 'mount -t sysfs none /sys && exec "$0" "$@"'
        command = ["unshare", "--net", "--mount", "sh", "-c", inside, sys.executable, "-c", BRIDGES_LEFT]
        done = subprocess.run(
            [*command, *map(str, (kept, gone, alive))], capture_output=True, text=True, timeout=PATIENCE_S
        )
    finally:
        process.kill()
        process.wait()
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["elastipod0", "elastipod2"]


REACHED = """
import os, socket, sys
from elastipod_local import network
from elastipod_local.host import run
run(["ip", "link", "set", "lo", "up"])
server = socket.create_server(("127.0.0.1", 0))
port = server.getsockname()[1]
print(network.refusal(os.getpid(), "127.0.0.1", port) or "reached")
server.close()
print(network.refusal(os.getpid(), "127.0.0.1", port))
"""


@pytest.mark.needs_root
def test_what_a_node_cannot_reach_is_told_with_the_kernels_words() -> None:
    done = subprocess.run(
        ["unshare", "--net", sys.executable, "-c", REACHED], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.stdout.splitlines() == ["reached", "Connection refused"], done.stderr


def test_the_lock_for_the_whole_machine_lies_where_only_root_can_put_anything() -> None:
    """Which /run is on every Linux, and /run/lock is not."""
    assert network.ALLOCATION_LOCK.parent == Path("/run")
