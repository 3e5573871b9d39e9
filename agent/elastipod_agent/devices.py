"""How many workers a pod runs: --nproc-per-node resolved as torchrun resolves it, without importing torch here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

_DEV = Path("/dev")
_ASK_TORCH = """
import torch
count = torch.accelerator.device_count() if hasattr(torch, "accelerator") else torch.cuda.device_count()
print(count)
"""
_ASK_LIMIT_S = 120
MAX_WORKERS = 4096


class BadWorkerCount(ValueError):
    """--nproc-per-node is no count, or asks for devices that are not there."""


def resolve_nproc(wanted: str, environ: Mapping[str, str], *, dev: Path = _DEV) -> int:
    """Give the number of workers for ``auto``, ``cpu``, ``gpu`` or a number. Raises BadWorkerCount with one sentence.

    auto: one per accelerator, without any one per CPU that this process may use.
    """
    if wanted == "cpu":
        return count_cpus()
    if wanted in ("auto", "gpu"):
        found = count_accelerators(environ, dev=dev)
        if not found and wanted == "gpu":
            raise BadWorkerCount("--nproc-per-node is gpu, but this pod has no GPU")
        return found or count_cpus()
    if not re.fullmatch(r"[0-9]+", wanted.strip()) or not 1 <= int(wanted) <= MAX_WORKERS:
        raise BadWorkerCount(f"--nproc-per-node is {wanted!r}; it must be auto, cpu, gpu or 1 to {MAX_WORKERS}")
    return int(wanted)


def count_cpus() -> int:
    """Count the CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


def count_accelerators(environ: Mapping[str, str], *, dev: Path = _DEV) -> int:
    """Count accelerators: NVIDIA's by their device nodes; where others are seen, torch is asked in a child process."""
    nvidia = sum(1 for node in dev.glob("nvidia*") if re.fullmatch(r"nvidia[0-9]+", node.name))
    if nvidia:
        visible = environ.get("CUDA_VISIBLE_DEVICES")
        return nvidia if visible is None else len(_visible(visible))
    if any((dev / name).exists() for name in ("kfd", "davinci_manager", "dri/renderD128", "accel", "hl0")):
        return _ask_torch()
    return 0


def _visible(text: str) -> list[str]:
    """List what CUDA sees of CUDA_VISIBLE_DEVICES: entries up to the first that names no device."""
    found: list[str] = []
    for entry in (one.strip() for one in text.split(",")):
        if not entry or entry.startswith("-"):
            break
        found.append(entry)
    return found


def _ask_torch() -> int:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True, timeout=_ASK_LIMIT_S, check=True
        )
        return int(done.stdout.split()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return 0
