"""The number of workers of a pod: resolves --nproc-per-node as torchrun does, without importing torch."""

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
_ASK_LAUNCHER = """
import sys
from torch.distributed.run import determine_local_world_size
print(determine_local_world_size(sys.argv[1]))
"""
_ASK_LIMIT_S = 120
_OTHER_ACCELERATORS = ("xpu", "hpu", "mlu", "musa", "npu")  # torch's names; plugins provide some of them
MAX_WORKERS = 4096


class BadWorkerCount(ValueError):
    """--nproc-per-node is not a number, or names devices that do not exist."""


def resolve_nproc(wanted: str, environ: Mapping[str, str], *, dev: Path = _DEV) -> int:
    """Give the number of workers for ``auto``, ``cpu``, ``gpu``, another device or a number. Raises BadWorkerCount with one sentence.

    auto: one per accelerator; without accelerators one per CPU that this process may use.
    """
    if wanted == "cpu":
        return count_cpus()
    if wanted in ("auto", "gpu"):
        found = count_accelerators(environ, dev=dev)
        if not found and wanted == "gpu":
            raise BadWorkerCount("--nproc-per-node is gpu, but this pod has no GPU")
        return found or count_cpus()
    if wanted in _OTHER_ACCELERATORS:
        found = _ask_torch(_ASK_LAUNCHER, wanted)
        if not found:
            raise BadWorkerCount(f"--nproc-per-node is {wanted}, but torch sees no such device in this pod")
        return found
    if not re.fullmatch(r"[0-9]+", wanted.strip()) or not 1 <= int(wanted) <= MAX_WORKERS:
        raise BadWorkerCount(f"--nproc-per-node is {wanted!r}; it must be auto, cpu, gpu, xpu or 1 to {MAX_WORKERS}")
    return int(wanted)


def count_cpus() -> int:
    """Count the CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


def count_accelerators(environ: Mapping[str, str], *, dev: Path = _DEV) -> int:
    """Count accelerators: NVIDIA GPUs and Neuron devices by their device nodes; others with torch, in a child process.

    Of Neuron devices the cores count where the device plugin gave the pod some of them (aws.amazon.com/neuroncore).
    """
    nvidia = _count_nodes(dev, "nvidia")
    if nvidia:
        visible = environ.get("CUDA_VISIBLE_DEVICES")
        return nvidia if visible is None else len(_visible(visible))
    neuron = _count_nodes(dev, "neuron")
    if neuron:
        return _neuron_cores(environ) or neuron
    if any((dev / name).exists() for name in ("kfd", "davinci_manager", "dri/renderD128", "accel", "hl0")):
        return _ask_torch()
    return 0


def own_devices(nproc: int, environ: Mapping[str, str]) -> tuple[dict[str, str], ...]:
    """Give, by local rank, the variables that show each worker only its own device, as device 0. Raises BadWorkerCount.

    ROCm's variable is set to the same device, and is the one that counts if it is set. Hidden devices stay hidden.
    """
    name = "HIP_VISIBLE_DEVICES" if environ.get("HIP_VISIBLE_DEVICES") else "CUDA_VISIBLE_DEVICES"
    named = [entry.strip() for entry in environ.get(name, ",".join(map(str, range(nproc)))).split(",")]
    if named == [""]:
        named *= nproc
    if len(named) < nproc:
        raise BadWorkerCount(
            f"--virtual-local-rank gives each of {nproc} workers its own device, but {name} names {len(named)}"
        )
    return tuple({"CUDA_VISIBLE_DEVICES": device, name: device} for device in named[:nproc])


def _count_nodes(dev: Path, name: str) -> int:
    """Count device nodes such as nvidia0, and not those that control them (nvidiactl)."""
    return sum(1 for node in dev.glob(f"{name}*") if re.fullmatch(rf"{name}[0-9]+", node.name))


def _neuron_cores(environ: Mapping[str, str]) -> int:
    """Give the cores that the Neuron runtime may use: entries and ranges such as 0-3,6, or a number of them; 0 for all."""
    visible = environ.get("NEURON_RT_VISIBLE_CORES", "").replace(" ", "")
    if visible:
        cores: set[int] = set()
        for entry in visible.split(","):
            match = re.fullmatch(r"([0-9]{1,4})(?:-([0-9]{1,4}))?", entry)
            if not match:
                raise BadWorkerCount(
                    f"NEURON_RT_VISIBLE_CORES is {visible!r}; it must be cores and ranges such as 0-3,6"
                )
            cores.update(range(int(match[1]), int(match[2] or match[1]) + 1))
        return len(cores)
    number = environ.get("NEURON_RT_NUM_CORES", "")
    return int(number) if re.fullmatch(r"[0-9]{1,4}", number) else 0


def _visible(text: str) -> list[str]:
    """Parse CUDA_VISIBLE_DEVICES as CUDA does: entries up to the first that names no device."""
    found: list[str] = []
    for entry in (one.strip() for one in text.split(",")):
        if not entry or entry.startswith("-"):
            break
        found.append(entry)
    return found


def _ask_torch(question: str = _ASK_TORCH, *arguments: str) -> int:
    try:
        done = subprocess.run(
            [sys.executable, "-c", question, *arguments],
            capture_output=True,
            text=True,
            timeout=_ASK_LIMIT_S,
            check=True,
        )
        return int(done.stdout.split()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return 0
