"""Imports modules in the fork server, and checks that the process can still be forked."""

from __future__ import annotations

import ctypes
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

# Modules that a script's imports and first step load, the expensive ones first. Found by comparing sys.modules before and after the first
# steps of the examples, with checkpoints; see docs/design/warm-workers.md. Modules that the installed torch lacks are skipped.
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
    "encodings.ascii",
    "encodings.idna",  # the first connection of a process looks a host up by name
    "elastipod",
)
# torch.cuda.is_available() initializes the CUDA driver, which a child cannot use once the parent has; with this variable torch asks NVML
# instead. Third-party modules call it when they are imported.
_ASK_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
_MAX_QUESTIONS = 1000
_DEVICE_FOLDERS = ("/dev/dri/", "/dev/accel")
_HARMLESS_DEVICES = {"/dev/null", "/dev/zero", "/dev/random", "/dev/urandom", "/dev/full", "/dev/tty"}


class NotForkable(Exception):
    """This process must not be forked; the text says why."""


def load(wanted: Sequence[str], tell: Callable[[str], None]) -> list[str]:
    """Import everything; ``wanted`` are the user's modules. Gives a sentence for each of them that does not exist.

    tell: called with each module before its import. Raises NotForkable if an import fails half-way.
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
    """Import one module; of elastipod all public names. Gives the name of a missing module, else None. Raises NotForkable."""
    try:
        module = import_module(name)
        if name == "elastipod":
            for public in module.__all__:
                with suppress(
                    ImportError, AttributeError
                ):  # the installed torch lacks it; a script that uses it gets the error
                    getattr(module, public)
    except ModuleNotFoundError as error:
        return error.name or str(error)
    except BaseException as error:  # an import may do anything, even exit
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


def register_gloo() -> None:
    """Have torch find its own gloo now. Each worker's first process group reads the metadata of all installed packages for that otherwise.

    Only from torch 2.15 on. NCCL is left to the workers: a script may choose by a variable which one that is.
    """
    backend = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "Backend", None)
    find = getattr(backend, "_ensure_backend_registered", None)
    if find is None:
        return
    found = {each.name: each.value for each in entry_points(group="torch.distributed.backends")}
    if found.get("gloo", "").startswith("torch."):  # another package's could be anything
        find("gloo")


def close_nvml() -> None:
    """Close NVML, which torch leaves open after a query and opens again when it needs it.

    A module that uses NVML through pynvml keeps it open; `check` then refuses.
    """
    if "pynvml" in sys.modules:
        return
    with suppress(OSError, AttributeError):  # not loaded: nothing to close
        nvml = ctypes.CDLL("libnvidia-ml.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        for _ in range(_MAX_QUESTIONS):
            if nvml.nvmlShutdown() != 0:
                return


def check(own_descriptors: Iterable[int]) -> None:
    """Check that a fork of this process is as good as a new process. Raises NotForkable.

    own_descriptors: those of the server itself.
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
    """Describe what is open there if workers must not share it: anything but a regular file; else None."""
    try:
        mode = os.fstat(descriptor).st_mode
        target = os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:  # the descriptor that listed the directory
        return None
    is_device = stat.S_ISCHR(mode) and target not in _HARMLESS_DEVICES
    is_device |= target.startswith(_DEVICE_FOLDERS)
    is_plain = stat.S_ISREG(mode) or stat.S_ISDIR(mode) or (stat.S_ISCHR(mode) and not is_device)
    return None if is_plain else target


def _open_descriptors() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/fd")]


def _comm(task: str) -> str:
    with suppress(OSError):  # the task has ended
        return Path(f"/proc/self/task/{task}/comm").read_text("utf-8", "replace").strip()
    return ""
