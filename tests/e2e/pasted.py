"""Pastes the shell blocks of a page into a shell, as a reader does it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

from tests.e2e.conftest import ROOT
from tests.patience import PATIENCE_S

from elastipod_local import binaries
from elastipod_local.cluster import Cluster

SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)


def shell_blocks(page: str, *, leave_out: Collection[str] = ()) -> str:
    """Give the shell blocks of a page as one script, without those of the sections that are named."""
    _, *parts = SECTION.split((ROOT / page).read_text(encoding="utf-8"))
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    assert set(leave_out) <= set(sections), f"{page} has the sections {list(sections)}"
    blocks = [block for title, text in sections.items() if title not in leave_out for block in BLOCK.findall(text)]
    assert blocks, f"{page} has no shell block"
    return "\n".join(blocks)


def shell_environment(cluster: Cluster | None = None) -> Mapping[str, str]:
    """Give the variables of a reader's shell: our commands, and for a cluster its kubeconfig, kubectl and helm."""
    folders = [Path(sys.executable).parent]
    found = {}
    if cluster is not None:
        folders += {binary.parent for binary in binaries.ensure(["kubectl", "helm"]).values()}
        found["KUBECONFIG"] = str(cluster.kubeconfig)
    return {**os.environ, **found, "PATH": os.pathsep.join([*map(str, folders), os.environ["PATH"]])}


def paste(script: str, folder: Path, cluster: Cluster | None = None, *, limit_s: float = 2 * PATIENCE_S) -> str:
    """Run a script in a folder; gives what it printed. Fails at the first command that fails, with all that was printed."""
    command = ["bash", "-euxo", "pipefail", "-c", script]
    environment = dict(shell_environment(cluster))
    done = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=limit_s
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout
