"""The container of each manifest in tests/api/compat as a real process: its own command line, the real agent, a stub script.

tests/api/test_compat.py has the same jobs from apply to completion, with played agents; what a container's shell makes of
the line and what the agent makes of that is here. The container's root is a folder.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from tests.agent_client import until
from tests.api.compat_jobs import EXPECTED
from tests.e2e.agent_process import PACKAGES, AgentProcess
from tests.free_ports import free_port
from tests.long_runs import LongRun
from tests.patience import PATIENCE_S
from tests.slow import all_but_first
from tests.unit.compat.test_command_lines import INPROCESS, OF_THE_IMAGE, container_of

from elastipod_agent.authentication import Credentials

# One of each kind: flags beside the script and after it, a module, a shell with variables, a pipe, workers that outlive
# faults, a program that is no Python, nothing but a smoke test.
KINDS = (
    "documents-launcher",
    "hyp-1.1-values",
    "hyp-1.1-all",
    "recipe-elastic",
    "checkpointless-gpt-full",
    "baseline-gpt-full",
    "smoke",
)
OF_THE_CONTAINER = re.compile(r"(?<![\w./-])/(?:opt|workspace|app|fsdp|fsx|data|tmp/hyperpod|train\.py)(?:/[\w.-]+)*")
STUB = """
import os
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "on", os.environ["NNODES"], flush=True)
"""
# Where workers outlive faults, a script waits for each of its runs.
AT_THE_BARRIER = """
import os
from hyperpod_elastic_agent.ipc import InProcessRestartSocketClient
os.environ.update(InProcessRestartSocketClient().hyperpod_barrier()[1]["worker_envs"])
"""
SCRIPTS = (
    *("train.py", "lora.py", "pretrain.py", "gpt.py", "my_package/train.py", "workspace/train.py", "opt/train/sft.py"),
    *("opt/train/pretrain.py", "fsdp/train.py", "app/sft.py"),
    *(f"opt/amazon/examples/{name}.py" for name in ("llama3/lora", "llama3/pretrain", "gpt_oss/lora", "gpt_oss/full")),
)
SILENT = {"smoke"}  # its command is `true`
# What an operator says though the pod was made for another size.
NNODES = 2


class Container(AgentProcess):
    """A process that a container's command starts, with the agent in it; what the container holds is in a folder."""

    def __init__(self, manifest: str, folder: Path) -> None:
        container, environ = container_of(manifest)
        self.port, self.log, self.credentials = free_port(), folder / "printed.log", Credentials()
        environ = {name: _inside(value, folder) for name, value in environ.items()}
        environ |= {
            "PATH": f"{folder}/bin:{os.environ['PATH']}", "HOME": str(folder), "PYTHONPATH": f"{PACKAGES}:{folder}",
            "KUBERNETES_SERVICE_HOST": "127.0.0.1", "ELASTIPOD_AGENT_PORT": str(self.port),
        }  # fmt: skip
        words = [_inside(word, folder) for word in (*container["command"], *container.get("args", ()))]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                words,
                env=environ,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


def _inside(text: str, folder: Path) -> str:
    return OF_THE_CONTAINER.sub(lambda found: f"{folder}{found[0]}", text)


def fill(folder: Path, script: str) -> None:
    """Put programs into a container's folder: the launcher, and a stub in the place of every script."""
    program = f"#!/bin/sh\nexec {sys.executable}"
    files = dict.fromkeys(SCRIPTS, script) | {
        "bin/hyperpodrun": f'{program} -m elastipod_agent --server-host=127.0.0.1 --no-warm-workers "$@"\n',
        "opt/train/start.sh": f'{program} {folder}/train.py "$@"\n',
        **{f"bin/{name}": f"#!/bin/sh\n{OF_THE_IMAGE[name]}\n" for name in ("ip", "sysctl", "ln")},
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)
    (folder / "data").mkdir()


def run_to_its_end(manifest: str, folder: Path) -> None:
    """Start a container, have its workers train at another size than its pod was made for, and complete them."""
    fill(folder, AT_THE_BARRIER + STUB if manifest in INPROCESS else STUB)
    container = Container(manifest, folder)
    try:
        until(container.answers, "the agent's server")
        container.until("ready")
        assert container.start(1, rank=1, nnodes=NNODES) == (200, None)
        container.until("completed")
        assert container.end() == 0
    finally:
        with suppress(ProcessLookupError):
            os.killpg(container.process.pid, signal.SIGKILL)
        container.process.wait(PATIENCE_S)
    printed = container.printed()
    workers = EXPECTED[manifest].workers
    assert "group_rank=1" in printed
    ranks = [f"rank {rank} of {NNODES * workers} on {NNODES}" for rank in range(workers, 2 * workers)]
    lines = [line for line in printed.splitlines() if line.startswith("[default")]
    said = [rank for rank in ranks if sum(f":{rank}" in line for line in lines) == 1]
    assert said == ([] if manifest in SILENT else ranks), printed


@pytest.mark.parametrize("manifest", all_but_first(KINDS, 2))
def test_a_container_trains_with_its_own_command_line(manifest: str, tmp_path: Path) -> None:
    run_to_its_end(manifest, tmp_path)


@pytest.mark.long("command-lines")
def test_every_container_trains_with_its_own_command_line(long_run: LongRun, tmp_path: Path) -> None:
    for count, manifest in enumerate(EXPECTED, 1):
        folder = tmp_path / manifest
        folder.mkdir()
        run_to_its_end(manifest, folder)
        long_run.count(manifests=count)
