"""What the fork server imports before it forks, and whether that left a process that may be forked."""

from __future__ import annotations

import ctypes
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path

# What a script's imports and first step pull in, the dear ones first. Found by comparing sys.modules before and after the
# examples' first steps, checkpoints included; see the design note. A name that the installed torch lacks is skipped.
MODULES = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.optim",
    "torch.optim.lr_scheduler",
    "torch.optim.swa_utils",
    "torch.amp",
    "torch.utils.data",
    "torch.utils.data.distributed",
    "torch._dynamo",  # the first optimizer imports it
    "torch.distributed.device_mesh",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "torch.distributed.fsdp",
    "torch.distributed._composable.fsdp",  # where fully_shard lives before torch 2.6
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.elastic.multiprocessing.errors",  # @record
    "torch.utils._sympy.reference",  # FSDP2's first step
    "torch.utils.serialization",  # torch.save and torch.load
    "torch.utils.serialization.config",
    "numpy",
    "numpy.random",
    "torchdata",
    "torchdata.stateful_dataloader",
    "multiprocessing.queues",
    "elastipod",
)
# torch.cuda.is_available() asks the CUDA driver, which cannot be used in a child any more once it has been asked in the
# parent; with this variable it asks NVML. Third-party modules do call it when they are imported.
_ASK_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
_MAX_QUESTIONS = 1000
_DEVICE_FOLDERS = ("/dev/dri/", "/dev/accel")
_HARMLESS_DEVICES = {"/dev/null", "/dev/zero", "/dev/random", "/dev/urandom", "/dev/full", "/dev/tty"}


class NotForkable(Exception):
    """This process must not be forked; the text says why, for people."""


def load(wanted: Sequence[str], tell: Callable[[str], None]) -> list[str]:
    """Import everything; ``wanted`` are the user's names. Gives a sentence for each of them that cannot be had.

    tell: is told each module before it is imported. Raises NotForkable when an import fails half-way.
    """
    notes: list[str] = []
    with _environment_for_imports():
        for name in (*MODULES, *wanted):
            tell(name)
            missing = _load(name)
            if missing and name in wanted:
                notes.append(f"{name} is not preloaded: there is no module {missing}")
    return notes


def _load(name: str) -> str | None:
    """Import one module, and all public names of our own library; gives what is missing for it. Raises NotForkable."""
    try:
        module = import_module(name)
        if name == "elastipod":
            for public in module.__all__:
                with suppress(ImportError, AttributeError):  # of a torch without that; who asks for it will be told
                    getattr(module, public)
    except ModuleNotFoundError as error:
        return error.name or str(error)
    except BaseException as error:  # a module may do anything when it is imported, also exit
        raise NotForkable(f"importing {name} failed: {type(error).__name__}: {error}") from error
    return None


@contextmanager
def _environment_for_imports() -> Iterator[None]:
    is_ours = _ASK_NVML not in os.environ
    if is_ours:
        os.environ[_ASK_NVML] = "1"
    try:
        yield
    finally:
        if is_ours:
            os.environ.pop(_ASK_NVML, None)


def close_nvml() -> None:
    """End what a question to NVML has begun: torch asks and leaves the devices open, and opens them anew when it asks again.

    Who uses NVML through its own Python package keeps what that holds, and `check` then refuses.
    """
    if "pynvml" in sys.modules:
        return
    with suppress(OSError, AttributeError):  # not loaded: nobody asked
        nvml = ctypes.CDLL("libnvidia-ml.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        for _ in range(_MAX_QUESTIONS):
            if nvml.nvmlShutdown() != 0:
                return


def check(own_descriptors: Iterable[int]) -> None:
    """Make sure that a fork of this process is as good as a fresh one. Raises NotForkable.

    own_descriptors: those that the server itself holds.
    """
    others = [comm for task in os.listdir("/proc/self/task") if int(task) != os.getpid() and (comm := _comm(task))]
    if others:
        raise NotForkable(f"imported modules left {len(others)} thread(s) running: {', '.join(sorted(others)[:8])}")
    torch = sys.modules.get("torch")
    for device in ("cuda", "xpu"):
        module = getattr(torch, device, None)
        if module is not None and getattr(module, "is_initialized", bool)():
            raise NotForkable(f"an imported module initialized {device}")
    for descriptor in sorted(set(_open_descriptors()).difference(own_descriptors)):
        what = describe_unshareable(descriptor)
        if what:
            raise NotForkable(f"imported modules left {what} open")


def describe_unshareable(descriptor: int) -> str | None:
    """Say what is open there when several workers must not have it from one parent: anything but a plain file."""
    try:
        mode = os.fstat(descriptor).st_mode
        target = os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:  # the one that listed the folder
        return None
    is_device = stat.S_ISCHR(mode) and target not in _HARMLESS_DEVICES
    is_device |= target.startswith(_DEVICE_FOLDERS)
    is_plain = stat.S_ISREG(mode) or stat.S_ISDIR(mode) or (stat.S_ISCHR(mode) and not is_device)
    return None if is_plain else target


def _open_descriptors() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/fd")]


def _comm(task: str) -> str:
    with suppress(OSError):  # it has ended
        return Path(f"/proc/self/task/{task}/comm").read_text("utf-8", "replace").strip()
    return ""
