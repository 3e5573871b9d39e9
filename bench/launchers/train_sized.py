"""A training with `elastipod.State` whose state has a given size, for the benchmark of resizes: `train_sized.py MEGABYTES KIND`.

Kinds are `ddp`, `fsdp2`, and `copies` for FSDP2 with a copy of every step. Each process writes `<log dir>/<pid>-<generation>.log` for
each world, with the lines of train.py; `<pid>-<generation>.phases`, a JSON object of seconds and bytes: what this rank did between
two worlds; and `<pid>-<generation>.costs`, a line for each step: seconds from the end of the script's block in the step before to
its block in this one, without the optimizer's own step and this script's own notes, and those of following among them, when somebody
follows. With FSDP2 there are also `<pid>-<generation>.left`, the same as `.phases` of a rank that has left the world, and
`<pid>-<generation>.stretches`: the bytes of each whole tensor that this rank has, as start and end.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from elastipod import Copies, ElasticBatches, State
from elastipod.in_memory import donor
from elastipod.in_memory.donor import Donor
from elastipod.in_memory.memory_state import MemoryState
from elastipod.in_memory.process_groups import ProcessGroups
from elastipod.in_memory.world_life import WorldLife

IS_WARM = True  # the row needs a mark; a prepared or kept process has torch loaded in any case
STEP_S = 0.05
LAST_STEP = 1_000_000
GLOBAL_BATCH = 128
LAYER = 1 << 20  # elements of a parameter: 4 MiB
COPIES = 3  # of every weight, AdamW's moments included

spent: dict[str, float] = {}
spent_lock = threading.Lock()  # one thread for each follower sends to it


class Sized(nn.Module):
    """A small model, and as many further weights as the state needs for its size; all get a gradient in every step."""

    def __init__(self, megabytes: float) -> None:
        super().__init__()
        # Its statistics change in every step, so State keeps what they were before it.
        self.small = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10))
        left = max(1, int(megabytes * 1e6 / 4 / COPIES) - sum(each.numel() for each in self.small.parameters()))
        sizes = [LAYER] * (left // LAYER) + [left % LAYER] * bool(left % LAYER)
        self.large = nn.ParameterList(torch.randn(size) for size in sizes)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.small(batch) + 1e-6 * torch.stack([each.sum() for each in self.large]).sum()
        return found


def build(mesh: Any = None) -> dict[str, object]:
    torch.manual_seed(0)
    model = Sized(float(sys.argv[1]))
    if mesh is not None:
        for each in (*model.small, model):
            if list(each.parameters()):
                fully_shard(each, mesh=mesh)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3)}


def time_phases() -> None:
    """Note how long each part of a change takes, and what it sends."""
    parts = [
        ("leave", WorldLife, "leave"),
        ("connect", ProcessGroups, "connect"),
        ("offers", MemoryState, "exchange_offers"),
        ("fill", MemoryState, "fill"),
        ("wrap", WorldLife, "_wrap_model"),
        ("compare", MemoryState, "compare"),
        ("apply", State, "_run_apply"),
        ("follow", Donor, "before_step"),
        ("follow", Donor, "after_step"),
    ]
    for name, owner, method in parts:
        setattr(owner, method, _timed(name, getattr(owner, method)))
    isend, follow = getattr(dist, "isend"), getattr(donor, "send")  # noqa: B009 as below

    def sent(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        _count("sent_bytes", [tensor])
        return isend(tensor, *args, **options)

    def followed(peer: Any, head: Any, tensors: Iterable[torch.Tensor] = ()) -> None:
        _count("followed_bytes", tensors)
        follow(peer, head, tensors)

    setattr(dist, "isend", sent)  # noqa: B010 a plain assignment is refused by the type of the module
    setattr(donor, "send", followed)  # noqa: B010


def _count(what: str, tensors: Iterable[torch.Tensor]) -> None:
    with spent_lock:
        spent[what] = spent.get(what, 0) + sum(each.nbytes for each in tensors)


def note_what_leavers_send(folder: Path) -> None:
    """Have each rank that leaves a world write down what it has sent: those that leave the job make no step of another one."""
    leave = WorldLife.leave

    def noted(world: WorldLife, *args: Any, **options: Any) -> None:
        leave(world, *args, **options)
        (folder / f"{os.getpid()}-{world.place.generation}.left").write_text(json.dumps(spent))

    setattr(WorldLife, "leave", noted)  # noqa: B010 as above


def stretches(state: State) -> dict[str, tuple[int, int]]:
    """Give the bytes that this rank has of each tensor: all, or its equal share of the rows, as FSDP2 divides them."""
    tensors = {f"model.{key}": tensor for key, tensor in state.model.state_dict().items()}
    for index, moments in state.optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{key}": tensor for key, tensor in moments.items()}
    found: dict[str, tuple[int, int]] = {}
    for key, tensor in tensors.items():
        start, own = 0, tensor
        if isinstance(tensor, DTensor):
            rows, own = len(tensor), tensor.to_local()
            share = -(-rows // state.world_size)
            start = min(rows, state.rank * share) * tensor.nbytes // rows
        found[key] = (start, start + own.nbytes)
    return found


def _timed(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        began = time.monotonic()
        try:
            return method(*args, **options)
        finally:
            spent[name] = spent.get(name, 0.0) + time.monotonic() - began

    return call


def main() -> None:
    folder = Path(os.environ["BENCH_FOLDER"])
    torch.set_num_threads(1)
    time_phases()
    plan = ElasticBatches(LAST_STEP * GLOBAL_BATCH, GLOBAL_BATCH)
    kind = sys.argv[2]
    options: dict[str, Any] = {"wrap": DistributedDataParallel} if kind == "ddp" else {"mesh": {"shard": -1}}
    if kind != "ddp":
        note_what_leavers_send(folder)
    if kind == "copies":
        options["copies"] = Copies(memory_bytes=4 << 30, every=1)
    state = State(build, **options)
    generation, log, costs, left = -1, None, None, 0.0
    for step in state.steps(plan):
        if is_new := state.generation != generation:
            generation = state.generation
            log = open(folder / f"{os.getpid()}-{generation}.log", "a", buffering=1)  # noqa: SIM115 as long as its world
            now = time.monotonic()
            log.write(f"begin {now:.6f} {int(IS_WARM)}\nimported {now:.6f}\n")
            log.write(f"grouped {now:.6f} {state.rank} {state.world_size}\n")
            costs = open(folder / f"{os.getpid()}-{generation}.costs", "a", buffering=1)  # noqa: SIM115 as long as its world
        with step as batch:
            if costs is not None and not is_new:
                cost = time.monotonic() - left - spent.pop("apply", 0.0) - spent.pop("note", 0.0)
                costs.write(f"{cost:.6f} {spent.pop('follow', 0.0):.6f}\n")
            time.sleep(STEP_S)
            logits = state.model(torch.randn(len(batch.indices), 64))
            nn.functional.cross_entropy(logits, torch.randint(10, (len(batch.indices),))).backward()  # type: ignore[no-untyped-call]
            left = time.monotonic()
        if step.is_done and log is not None:
            done = time.monotonic()
            log.write(f"step {done:.6f} {batch.step} {state.rank} {state.world_size}\n")
            if is_new:
                (folder / f"{os.getpid()}-{generation}.phases").write_text(json.dumps(spent))
                spent.clear()
                if kind != "ddp":
                    (folder / f"{os.getpid()}-{generation}.stretches").write_text(json.dumps(stretches(state)))
            spent["note"] = time.monotonic() - done


if __name__ == "__main__":
    main()
