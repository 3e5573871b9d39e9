"""A training script over the original's checkpointless library itself: its wrapper, process groups and checkpoint manager.

Only what it imports beside that is stubbed. The script counts steps that all ranks make together, until the file order-<rank> in
$HOME says otherwise: `raise` makes an exception in the wrapped function, `finish` on all ranks ends it.
"""

# Not `from __future__ import annotations`: the library looks for its type among the parameters, and finds no name of it.
import os
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from tests.e2e import checkpointless_stubs

checkpointless_stubs.install()

from hyperpod_checkpointless_training.inprocess.train_utils import HPAgentK8sAPIFactory, wait_rank  # noqa: E402
from hyperpod_checkpointless_training.inprocess.wrap import HPCallWrapper, HPWrapper  # noqa: E402
from hyperpod_checkpointless_training.nemo_plugins.checkpoint_manager import CheckpointManager  # noqa: E402
from hyperpod_checkpointless_training.nemo_plugins.utils import init_process_group  # noqa: E402

PACE_S = 0.02
STEPS = torch.zeros(1, dtype=torch.int64)  # made so far; outlives a fault as a model in memory does


def join() -> None:
    """Form the process group as the library's strategy for NeMo does: over a store next to the master's port."""
    place = SimpleNamespace(
        global_rank=lambda: int(os.environ["RANK"]), world_size=lambda: int(os.environ["WORLD_SIZE"])
    )
    init_process_group(
        SimpleNamespace(
            base_store=None, cluster_environment=place, _timeout=timedelta(minutes=3),
            _get_process_group_backend=lambda: "gloo",
        )
    )  # fmt: skip


def ordered() -> str:
    """Take the order for this rank, if there is one."""
    file = Path(os.environ["HOME"], f"order-{os.environ['RANK']}")
    text = file.read_text() if file.exists() else ""
    if text == "raise":
        file.unlink()
    return text


def train(wrapper: HPCallWrapper) -> None:
    """The code that runs again. wrapper: the library puts itself there."""
    join()
    held = int(STEPS)
    dist.all_reduce(STEPS, dist.ReduceOp.MAX)
    e = os.environ
    run = f"run {e['ELASTIPOD_GENERATION']} restarts {e['JOB_RESTART_COUNT']} rank {e['RANK']} of {e['WORLD_SIZE']}"
    print(run, f"held {held} from {int(STEPS)} pid {os.getpid()}", flush=True)
    while True:
        order = ordered()
        if order == "raise":
            raise ValueError("as ordered")
        may_finish = torch.tensor([order == "finish"], dtype=torch.int64)
        dist.all_reduce(may_finish, dist.ReduceOp.MIN)
        if may_finish:
            print(run, "finished at", int(STEPS), flush=True)
            return
        STEPS.add_(1)
        wrapper.step_upon_restart += 1
        print(run, "step", int(STEPS), "which is", wrapper.step_upon_restart, flush=True)
        time.sleep(PACE_S)


def main() -> None:
    torch.set_num_threads(1)
    wait_rank()
    print("has its rank", os.environ["RANK"], flush=True)
    manager: Any = CheckpointManager()
    HPWrapper(hp_api_factory=HPAgentK8sAPIFactory(), checkpoint_manager=manager, check_memory_status=False)(train)(None)


if __name__ == "__main__":
    main()
