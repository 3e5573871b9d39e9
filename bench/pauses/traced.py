"""Notes when some functions of the library end in each worker. The fork server imports it (`--preload`), so no start takes longer for it.

Each process writes `<BENCH_FOLDER>/<pid>.spans`: lines of `<begin> <end> <name>`, in seconds of the machine's monotonic clock.
"""

from __future__ import annotations

import functools
import importlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

FUNCTIONS = """
elastipod.in_memory.elastic_state:State.__init__
elastipod.in_memory.elastic_state:State._stop_as_planned
elastipod.in_memory.elastic_state:State._leave
elastipod.in_memory.elastic_state:State._open_log
elastipod.in_memory.elastic_state:State._check_gradients
elastipod.in_memory.world_life:WorldLife.join
elastipod.in_memory.world_life:WorldLife._next_place
elastipod.in_memory.world_life:WorldLife._wrap_model
elastipod.in_memory.process_groups:ProcessGroups.connect
elastipod.in_memory.memory_state:MemoryState.fill
elastipod.in_memory.memory_state:MemoryState.compare
elastipod.in_memory.memory_state:MemoryState.exchange_offers
elastipod.in_memory.durable_tier:DurableTier.load
elastipod.checkpoint.running:Running.claim
elastipod.checkpoint.resumer:Resumer.resume
elastipod.audit.sample_log:SampleLog.__init__
elastipod.checkpoint.restore:Restore.nested
elastipod.checkpoint.restore:Restore.fit
elastipod.checkpoint.restore:Restore.apply
elastipod.checkpoint.image_source:ImageSource.fill
elastipod.checkpoint.image_source:ImageSource.fill_alone
elastipod.checkpoint.staging:Staging.copy
elastipod.checkpoint.staging:Staging.keep_in_memory
elastipod.checkpoint.saver:Saver._write
"""
SCRIPT = "script"
_files: dict[int, IO[str]] = {}


def note(name: str, begin: float, end: float) -> None:
    """Write one line into this process's file."""
    pid = os.getpid()
    if pid not in _files:
        path = Path(os.environ["BENCH_FOLDER"]) / f"{pid}.spans"
        _files[pid] = open(path, "a", buffering=1)  # noqa: SIM115 as long as the process lives
    _files[pid].write(f"{begin:.6f} {end:.6f} {name}\n")


def timed(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Give the function with a note of each call."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        begin = time.monotonic()
        try:
            return function(*args, **kwargs)
        finally:
            note(name, begin, time.monotonic())

    return call


def noted_at_its_begin(run: Callable[..., Any]) -> Callable[..., Any]:
    """Give what runs a worker's script with a note of its begin; it ends with the process."""

    @functools.wraps(run)
    def call(*args: Any, **kwargs: Any) -> Any:
        now = time.monotonic()
        note(SCRIPT, now, now)
        return run(*args, **kwargs)

    return call


def install() -> None:
    for line in FUNCTIONS.split():
        place, _, path = line.partition(":")
        owner: Any = importlib.import_module(place)
        *outer, name = path.split(".")
        for part in outer:
            owner = getattr(owner, part)
        setattr(owner, name, timed(getattr(owner, name), path))
    program: Any = importlib.import_module("elastipod_agent.fork_server.program")
    program.run = noted_at_its_begin(program.run)


install()
