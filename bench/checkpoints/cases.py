"""What bench.checkpoint measures, in worlds of ranks forked from one process.

Each case writes files below ``folder`` and images below ``place``, in memory, and gives seconds by name and repetition.
"""

from __future__ import annotations

import gc
import mmap
import os
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.e2e.rank_worlds import run_world, serve
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from elastipod.checkpoint import CheckpointManager
from elastipod.checkpoint.live_objects import LiveObjects
from elastipod.checkpoint.optimizer_state import load_optimizers
from elastipod.checkpoint.training_state import load_models
from elastipod.torch_compat import DTensor

LAYERS = 16
Times = dict[str, list[float]]


class Trained:
    """A model of ``mib`` of weights and twice as much of moments, sharded over the world (FSDP2) with a state to save.

    is_new: as a process that was just started has it, before there are any moments.
    """

    def __init__(self, mib: float, *, is_new: bool = False) -> None:
        width = 4 * round((mib * 2**20 / 4 / LAYERS) ** 0.5 / 4)  # alike for every rank of up to four
        self.model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
        self.model.append(torch.nn.LayerNorm(width))
        self.model[-1].bias.requires_grad_(False)  # as frozen layers are: saved, and without moments
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        trained = [weight for weight in self.model.parameters() if weight.requires_grad]
        matrices = [weight for weight in trained if weight.ndim > 1]
        groups: list[dict[str, Any]] = [{"params": matrices[1:]}, {"params": matrices[:1], "weight_decay": 0.0}]
        self.optimizers = [  # as many trainers have it: the matrices have an optimizer of their own, and one group does not decay
            torch.optim.AdamW(groups),
            torch.optim.AdamW([weight for weight in trained if weight.ndim == 1], weight_decay=0.0),
        ]
        if not is_new:
            self.nested()  # makes the moments

    def nested(self) -> dict[str, Any]:
        weights, moments = get_state_dict(self.model, self.optimizers)
        return {"model": weights, "optimizer": moments}

    def tensors(self) -> list[torch.Tensor]:
        """Give this rank's own part of all that is saved."""
        states = [state for optimizer in self.optimizers for state in optimizer.state.values()]
        moments = [value for state in states for value in state.values()]
        return [t.to_local() if isinstance(t, DTensor) else t for t in (*self.model.parameters(), *moments)]

    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors())


def timed(action: Callable[[], object]) -> float:
    """Let all ranks do something at once; gives the seconds of the slowest."""
    gc.collect()
    dist.barrier()
    began = time.perf_counter()
    action()
    seconds = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def stall(folder: Path, place: str, mib: float, repeat: int) -> dict[str, Any]:
    """How long training stands still for a save, and until it is durable."""
    memory = Path(place)

    def on_rank(rank: int) -> dict[str, Any]:
        run = Trained(mib)
        sources = [tensor.detach() for tensor in run.tensors()]
        targets = [torch.ones_like(source) for source in sources]
        times: Times = {}
        group = dist.new_group(backend="gloo")  # torch's thread may not meet our barriers

        def note(name: str, seconds: float) -> None:
            times.setdefault(name, []).append(seconds)

        def copy() -> None:
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source)

        with CheckpointManager(folder / "ours", keep=1, memory=memory / f"node-{rank}") as ours:
            for step in range(1, repeat + 3):  # the first two make the memory that later ones use
                note("memcpy", timed(copy))
                note("ours: stall", timed(partial(ours.save_async, step, model=run.model, optimizer=run.optimizers)))
                note("ours: until durable", times["ours: stall"][-1] + timed(ours.wait))
                places = folder / f"dcp-{step}", folder / f"dcp-async-{step}"
                note("dcp save", timed(partial(_save, run, places[0])))
                pending: list[Any] = []
                note("dcp async_save: stall", timed(partial(_begin, run, places[1], group, pending)))
                note("dcp async_save: until durable", times["dcp async_save: stall"][-1] + timed(pending[0].result))
                dist.barrier()
                if rank == 0:
                    for place in places:
                        shutil.rmtree(place)
        return {"times": {name: found[2:] for name, found in times.items()}, "bytes": run.num_bytes()}

    answers = run_world(2, on_rank)
    return {"times": answers[0]["times"], "bytes": sum(answer["bytes"] for answer in answers)}


def restore(folder: Path, place: str, mib: float, repeat: int) -> dict[str, Any]:
    """How long a restore takes from each tier, on two ranks that stand for two nodes."""
    memory = Path(place)

    def save(rank: int) -> int:
        return _save_both(folder, memory / f"node-{rank}", mib)

    def load(rank: int) -> Times:
        run = Trained(mib)
        times: Times = {}
        sources = [tensor.detach() for tensor in run.tensors()]
        total = sum(source.numel() * source.element_size() for source in sources)
        bytes_in_memory = torch.frombuffer(mmap.mmap(-1, total), dtype=torch.uint8).fill_(1)
        image = memory / f"plain-{rank}"
        image.write_bytes(bytes(total))

        def copy_mapped() -> None:
            with open(image, "r+b") as file, mmap.mmap(file.fileno(), total) as mapped:
                origin = torch.frombuffer(mapped, dtype=torch.uint8)
                _copy(origin, sources)
                del origin

        def send() -> None:
            if rank == 0:
                dist.send(bytes_in_memory, dst=1)
            else:
                dist.recv(bytes_in_memory, src=0)

        plain: dict[str, Callable[[], None]] = {
            "memcpy": lambda: _copy(bytes_in_memory, sources),
            "memcpy, mapped again": copy_mapped,
            "loopback": send,
        }
        tiers = {"memory": memory / f"node-{rank}", "peer": memory / f"lost-{rank}", "durable": None}
        for _ in range(repeat + 1):  # one after the other, so that what else the machine does meets all alike
            for name, action in plain.items():
                times.setdefault(name, []).append(timed(action))
            for name, root in tiers.items():
                times.setdefault(name, []).append(_timed_load(run, folder / "ours", root))
            times.setdefault("dcp load", []).append(timed(partial(_load, run, folder / "dcp")))
        return {name: found[1:] for name, found in times.items()}

    def load_in_new_process(rank: int) -> Times:
        run = Trained(mib, is_new=True)
        weights = run.tensors()  # there are no moments yet
        ours = _timed_load(run, folder / "ours", memory / f"node-{rank}")
        total = sum(weight.nbytes for weight in weights)
        origin = torch.frombuffer(mmap.mmap(-1, 3 * total), dtype=torch.uint8).fill_(1)
        untouched = torch.frombuffer(mmap.mmap(-1, 2 * total), dtype=torch.uint8)

        def copy() -> None:
            _copy(origin[:total], [weight.detach() for weight in weights])
            _copy(origin[total:], [untouched])

        return {"memory, new process": [ours], "memcpy, new moments": [timed(copy)]}

    num_bytes = sum(run_world(2, save))
    shutil.copytree(memory / "node-1", memory / "lost-1", copy_function=os.link)  # node 0 is lost, node 1 has its copy
    times = run_world(2, load)[0]
    for _ in range(repeat):
        for name, seconds in run_world(2, load_in_new_process)[0].items():
            times.setdefault(name, []).extend(seconds)
    return {"times": times, "bytes": num_bytes}


def reshard(folder: Path, place: str, mib: float, repeat: int, before: int, after: int) -> dict[str, Any]:
    """How long a restore takes on another number of ranks."""
    memory = Path(place)

    def save(rank: int) -> int:
        return _save_both(folder, memory / f"node-{rank % 2}", mib)

    def load(rank: int) -> Times:
        run = Trained(mib)
        times: Times = {}
        for _ in range(repeat + 1):
            for name, root in (("memory", memory / f"node-{rank % 2}"), ("durable", None)):
                times.setdefault(name, []).append(_timed_load(run, folder / "ours", root))
            times.setdefault("dcp load", []).append(timed(partial(_load, run, folder / "dcp")))
        return {name: found[1:] for name, found in times.items()}

    num_bytes = sum(run_world(before, save))
    return {"times": run_world(after, load)[0], "bytes": num_bytes}


def _copy(origin: torch.Tensor, targets: list[torch.Tensor]) -> None:
    """Copy bytes into tensors, one after the other."""
    start = 0
    for target in targets:
        target.copy_(origin[start : start + target.nbytes].view(target.dtype).view(target.shape))
        start += target.nbytes


def _save_both(folder: Path, node: Path, mib: float) -> int:
    """Save the same state with either library; gives this rank's bytes. node: where its memory is."""
    run = Trained(mib)
    with CheckpointManager(folder / "ours", memory=node) as ours:
        ours.save(1, model=run.model, optimizer=run.optimizers)
    _save(run, folder / "dcp")
    return run.num_bytes()


def _timed_load(run: Trained, directory: Path, memory: Path | None) -> float:
    """Load with a manager of its own, whose claim is not part of the time. memory: None for durable storage alone."""
    with CheckpointManager(directory, memory=memory or False) as ours:
        ours.claim()
        return timed(partial(ours.load_latest, model=run.model, optimizer=run.optimizers))


def _save(run: Trained, place: Path) -> None:
    dcp_save(run.nested(), storage_writer=FileSystemWriter(place))


def _begin(run: Trained, place: Path, group: Any, pending: list[Any]) -> None:
    pending.append(dcp_async_save(run.nested(), storage_writer=FileSystemWriter(place), process_group=group))


def _load(run: Trained, place: Path) -> None:
    nested = run.nested()
    dcp_load(nested, storage_reader=FileSystemReader(place))
    live = LiveObjects.of(run.model, run.optimizers)
    load_models(nested["model"], live)
    load_optimizers(nested["optimizer"], nested["optimizer"]["param_groups"], live)


if __name__ == "__main__":
    serve({"stall": stall, "restore": restore, "reshard": reshard})
