"""The environment of one worker: torchrun's own set, the original agent's names, and ours (contracts, 4)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from elastipod_agent.core.requests import Start


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What every worker of this pod is told alike, whatever the generation.

    nproc: workers per pod. run_id, role, max_restarts: torchrun's.
    """

    nproc: int
    run_id: str
    role: str
    max_restarts: int


def pod_env(base: Mapping[str, str], start: Start, layout: Layout) -> dict[str, str]:
    """Give the environment that pre- and post-scripts get, and on which every worker's is built."""
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
    if start.progress:
        env["ELASTIPOD_PROGRESS"] = json.dumps(start.progress, separators=(",", ":"))
    return env


def worker_env(
    base: Mapping[str, str], start: Start, layout: Layout, local_rank: int, *, worker_file: str, error_file: str
) -> dict[str, str]:
    """Give the whole environment of the worker with this local rank; ``base`` is the agent's own."""
    env = pod_env(base, start, layout)
    rank = global_rank(start, layout, local_rank)
    env.update(
        RANK=str(rank),
        LOCAL_RANK=str(local_rank),
        ROLE_RANK=str(rank),
        ROLE_WORLD_SIZE=env["WORLD_SIZE"],
        ROLE_NAME=layout.role,
        # The worker with rank 0 hosts the store itself; see elastipod_agent.workers.group.
        TORCHELASTIC_USE_AGENT_STORE="False",
        TORCHELASTIC_ERROR_FILE=error_file,
        ELASTIPOD_WORKER_FILE=worker_file,
    )
    env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if layout.nproc > 1:
        env.setdefault("OMP_NUM_THREADS", "1")
    return env


def global_rank(start: Start, layout: Layout, local_rank: int) -> int:
    """Give the worker's rank in the whole job: pods in group order, local ranks in order within each."""
    return start.rank * layout.nproc + local_rank
