"""The environment of one run, for a rank whose process lives over several runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from elastipod.ipc.protocol import EARLY_START_ENV, STORE_ENV
from elastipod_agent.core.requests import StartRequest, UpdateRequest
from elastipod_agent.core.worker_env import Layout

UNSTARTED = StartRequest(rank=-1, nnodes=1, fault_count=0, master_addr="", master_port=-1)
"""Stands for the start of a process that begins before its pod has a rank. Its numbers cannot be used."""


def run_env(update: UpdateRequest, progress: Mapping[str, Any], layout: Layout, local_rank: int) -> dict[str, str]:
    """Give the variables of one local rank in one run, which override its environment."""
    rank = update.rank * layout.nproc + local_rank
    world_size = update.nnodes * layout.nproc
    generation = update.fault_count + 1 if update.generation is None else update.generation
    env = {
        "RANK": str(rank),
        "GROUP_RANK": str(update.rank),
        "ROLE_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "GROUP_WORLD_SIZE": str(update.nnodes),
        "ROLE_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": update.master_addr,
        "MASTER_PORT": str(update.master_port),
        "JOB_RESTART_COUNT": str(update.fault_count),
        "TORCHELASTIC_RESTART_COUNT": str(update.fault_count),
        "SPARE": str(update.is_spare),
        "NNODES": str(update.nnodes),
        "ELASTIPOD_GENERATION": str(generation),
    }
    if update.store:
        env[STORE_ENV] = update.store
    if update.is_early:
        env[EARLY_START_ENV] = "1"
    if progress:
        env["ELASTIPOD_PROGRESS"] = json.dumps(progress, separators=(",", ":"))
    return env


def before_generation(nnodes: int, present: int) -> StartRequest:
    """Give the start from which to build the environment of a process that is started ahead of the next generation.

    It names the present generation, not the next one: storage that the process used by mistake would be fenced against those who
    train.
    """
    return replace(UNSTARTED, nnodes=nnodes, fault_count=max(0, present - 1))


def before_rank(last: StartRequest | None, nnodes: int) -> StartRequest:
    """Give the start from which to build the environment of a process whose next rank is not known."""
    return replace(UNSTARTED, nnodes=max(1, nnodes)) if last is None else last
