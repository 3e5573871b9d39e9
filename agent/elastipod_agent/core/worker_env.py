"""The environment of one worker: torchrun's variables, the original agent's, and Elastipod's (docs/design/contracts.md, 4)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from elastipod.ipc.protocol import STORE_ENV
from elastipod_agent.core.nccl_env import nccl_env
from elastipod_agent.core.requests import StartRequest

# Variables that differ between workers or generations. All others are constant as long as the agent lives, so a process can be started
# with them before there is a generation.
VOLATILE = frozenset(
    {
        "ELASTIPOD_GENERATION",
        "ELASTIPOD_PROGRESS",
        STORE_ENV,
        "ELASTIPOD_WORKER_FILE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "JOB_RESTART_COUNT",
        "LOCAL_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "NNODES",
        "RANK",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "TORCHELASTIC_ERROR_FILE",
        "TORCHELASTIC_RESTART_COUNT",
        "WORLD_SIZE",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What is the same for every worker of this pod in every generation.

    nproc: workers per pod. run_id, role, max_restarts: torchrun's. own_devices: with --virtual-local-rank, the variables that show
    each local rank only its device; else empty. keeps_processes: with --inprocess-restart, workers survive a fault.
    """

    nproc: int
    run_id: str
    role: str
    max_restarts: int
    own_devices: tuple[Mapping[str, str], ...] = ()
    keeps_processes: bool = False


def pod_env(base: Mapping[str, str], start: StartRequest, layout: Layout) -> dict[str, str]:
    """Give the environment of pre- and post-train scripts, which is also the base of every worker's."""
    env = dict(base)
    env.update(
        NNODES=str(start.nnodes),
        NPROC_PER_NODE=str(layout.nproc),
        GROUP_RANK=str(start.rank),
        GROUP_WORLD_SIZE=str(start.nnodes),
        LOCAL_WORLD_SIZE=str(layout.nproc),
        WORLD_SIZE=str(start.nnodes * layout.nproc),
        MASTER_ADDR=start.master_addr,
        MASTER_PORT=str(start.master_port),
        JOB_RESTART_COUNT=str(start.fault_count),
        TORCHELASTIC_RESTART_COUNT=str(start.fault_count),
        TORCHELASTIC_MAX_RESTARTS=str(layout.max_restarts),
        TORCHELASTIC_RUN_ID=layout.run_id,
        ELASTIPOD_GENERATION=str(start.run_generation),
    )
    if start.store:
        env[STORE_ENV] = start.store
    if start.progress:
        env["ELASTIPOD_PROGRESS"] = json.dumps(start.progress, separators=(",", ":"))
    return env


def worker_env(
    base: Mapping[str, str], start: StartRequest, layout: Layout, local_rank: int, *, worker_file: str, error_file: str
) -> dict[str, str]:
    """Give the whole environment of the worker with this local rank; ``base`` is the agent's own."""
    env = pod_env(base, start, layout) | _steady_env(base, layout)
    rank = global_rank(start, layout, local_rank)
    env.update(
        RANK=str(rank),
        LOCAL_RANK=str(local_rank),
        ROLE_RANK=str(rank),
        ROLE_WORLD_SIZE=env["WORLD_SIZE"],
        TORCHELASTIC_ERROR_FILE=error_file,
        ELASTIPOD_WORKER_FILE=worker_file,
    )
    if layout.own_devices:
        env |= {**layout.own_devices[local_rank], "LOCAL_RANK": "0", "ELASTIPOD_LOCAL_RANK": str(local_rank)}
    return env


def steady_env(base: Mapping[str, str], layout: Layout) -> dict[str, str]:
    """Give the variables that are the same for all workers of this pod in all generations."""
    return {name: value for name, value in base.items() if name not in VOLATILE} | _steady_env(base, layout)


def _steady_env(base: Mapping[str, str], layout: Layout) -> dict[str, str]:
    """Give the constant variables that the agent adds unless the user has set them."""
    env = {
        "NPROC_PER_NODE": str(layout.nproc),
        "LOCAL_WORLD_SIZE": str(layout.nproc),
        "TORCHELASTIC_MAX_RESTARTS": str(layout.max_restarts),
        "TORCHELASTIC_RUN_ID": layout.run_id,
        "ROLE_NAME": layout.role,
        # The worker with rank 0 hosts the store itself; see elastipod_agent.workers.group.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        # glibc asks the kernel for huge pages then, where it may: a tensor's new memory costs a hundredth of the page faults.
        "GLIBC_TUNABLES": base.get("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"),
        **nccl_env(base, keeps_processes=layout.keeps_processes),
    }
    if layout.nproc > 1:
        env["OMP_NUM_THREADS"] = base.get("OMP_NUM_THREADS", "1")
    return env


def global_rank(start: StartRequest, layout: Layout, local_rank: int) -> int:
    """Give the worker's rank in the whole job: pods in group order, local ranks in order within each."""
    return start.rank * layout.nproc + local_rank
