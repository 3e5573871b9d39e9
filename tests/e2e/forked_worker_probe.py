"""A worker's script for the tests of warm workers: writes down all that it can see of how it was started.

Run as a file, a module, a folder's __main__ or by --run-path; the report goes to ``$PROBE_DIR/<generation>-<local rank>.json``.
"""

import ctypes
import gc
import json
import locale
import os
import random
import resource
import signal
import stat
import sys
import threading
import warnings
from typing import Any


def c_environ() -> list[str]:
    pointer = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    found: list[str] = []
    while pointer[len(found)]:
        found.append(str(pointer[len(found)], "utf-8"))
    return sorted(found)


def descriptors() -> dict[str, list[Any]]:
    """Kind and target of every open descriptor, but for the one that lists them."""
    found: dict[str, list[Any]] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            mode = os.fstat(int(name)).st_mode
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        found[name] = [stat.S_IFMT(mode), target.partition(":")[0]]
    return found


def stream(item: Any) -> dict[str, Any]:
    return {
        "type": type(item).__name__,
        "raw": type(getattr(item.buffer, "raw", item.buffer)).__name__,
        "name": item.name,
        "mode": item.mode,
        "fileno": item.fileno(),
        "encoding": item.encoding,
        "errors": item.errors,
        "line_buffering": item.line_buffering,
        "write_through": item.write_through,
        "isatty": item.isatty(),
        "seekable": item.seekable(),
        "newlines": repr(item.newlines),
        "is_original": item is getattr(sys, f"__{item.name.strip('<>')}__"),
    }


def status(*names: str) -> dict[str, str]:
    with open("/proc/self/status") as file:
        lines = dict(line.split(":", 1) for line in file)
    return {name: lines[name].strip() for name in names if name in lines}


def described(value: object) -> object:
    return value if isinstance(value, (str, int, float, bool, list, type(None))) else type(value).__name__


def report(main: Any) -> dict[str, Any]:
    return {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "path": sys.path,
        "flags": str(sys.flags),
        "warnoptions": sys.warnoptions,
        "executable": [sys.executable, sys.prefix, sys.base_prefix],
        "limits": [sys.getrecursionlimit(), sys.getswitchinterval(), sys.dont_write_bytecode],
        "hooks": [sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__, sys.gettrace() is None],
        "finders": [[type(one).__name__, getattr(one, "__name__", "")] for one in sys.meta_path],
        "path_hooks": len(sys.path_hooks),
        "gc": [gc.isenabled(), gc.get_threshold()],
        "main": {name: described(value) for name, value in vars(main).items() if name.startswith("__")},
        "main_is_main": sys.modules["__main__"] is main,
        "main_loader": getattr(main.__loader__, "path", None),
        "main_spec": str(main.__spec__),
        "code": report.__code__.co_filename,
        "builtins": main.__builtins__ is sys.modules["builtins"],
        "annotations": "__annotations__" in vars(main),
        "environ": dict(os.environ),
        "c_environ": c_environ(),
        "cwd": os.getcwd(),
        "umask": status("Umask"),
        "nice": os.nice(0),
        "rlimits": {
            name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT")
        },
        "affinity": sorted(os.sched_getaffinity(0)),
        "scheduling": os.sched_getscheduler(0),
        "signals": status(
            "SigBlk", "SigIgn", "SigCgt", "SigPnd", "ShdPnd", "NoNewPrivs", "Seccomp", "CapEff", "Groups"
        ),
        "handlers": {int(n): str(signal.getsignal(n)) for n in signal.valid_signals()},
        "mask": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
        "session": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
        "parent_is_agent": os.getppid() == int(os.environ["PROBE_AGENT"]) if "PROBE_AGENT" in os.environ else None,
        "threads": [status("Threads"), [one.name for one in threading.enumerate()]],
        "main_thread": [
            threading.main_thread() is threading.current_thread(),
            threading.get_native_id() == os.getpid(),
        ],
        "descriptors": descriptors(),
        "streams": [stream(item) for item in (sys.stdin, sys.stdout, sys.stderr)],
        "stdin": [os.readlink("/proc/self/fd/0"), sys.stdin.read()],
        "warnings": [[str(part) for part in one] for one in warnings.filters],
        "locale": [locale.setlocale(locale.LC_ALL), sys.getfilesystemencoding()],
        "comm": open("/proc/self/comm").read(),
        "cmdline": open("/proc/self/cmdline").read().rstrip("\0").split("\0"),
        "children": resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime,
        "death_signal": death_signal(),
    }


def death_signal() -> int:
    value = ctypes.c_int(-1)
    ctypes.CDLL(None).prctl(2, ctypes.byref(value))
    return value.value


def write() -> None:
    seen = report(sys.modules["__main__"])
    seen["luck"] = random.random()
    with open("/proc/self/environ", "rb") as environ:
        seen["shown_environ"] = environ.read().decode().split("\0")
    seen["parent"] = os.getppid()
    name = f"{os.environ['ELASTIPOD_GENERATION']}-{os.environ['LOCAL_RANK']}.json"
    with open(os.path.join(os.environ["PROBE_DIR"], name + ".new"), "w") as file:
        json.dump(seen, file)
    os.rename(file.name, file.name[:-4])


if __name__ == "__main__":
    write()
