"""Ranks that stop, fail or die in the middle of a save; run by test_checkpoints through checkpoint_cases."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from tests.e2e.rank_worlds import World, run_world
from tests.patience import PATIENCE_S
from torch.distributed.device_mesh import init_device_mesh

from elastipod.checkpoint import CheckpointManager, heartbeat, rank_connections, transfer_blocks
from elastipod.checkpoint.communicator import Communicator
from elastipod.checkpoint.saver import Saver
from elastipod.collectives import all_gather_json
from elastipod.errors import CheckpointError
from elastipod.torch_compat import DTensor

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # torch 2.4 and 2.5
    from torch.distributed._composable.fsdp import fully_shard  # type: ignore[attr-defined]

SILENCE_TIMEOUT_S = 6.0  # long enough for a loaded machine
VICTIM = 2


class Shares:
    """A state of which every rank has a part of its own, so that each node's image has a copy on another node."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(300, 300, bias=False)
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    @torch.no_grad()
    def set(self, step: int) -> None:
        self.model.weight.fill_(step)

    def numbers(self) -> list[float]:
        whole = cast(DTensor, self.model.weight).full_tensor()
        return [float(each) for each in whole.unique()]  # type: ignore[no-untyped-call]


def lose_ranks(folder: Path) -> dict[str, Any]:
    """Let one of three ranks be slow, stop, fail and die in saves of one world; gives what each rank heard of each save."""
    rank_connections.SILENCE_TIMEOUT_S, heartbeat.HEARTBEAT_S = SILENCE_TIMEOUT_S, 0.2
    transfer_blocks.BLOCK_BYTES = transfer_blocks.SMALL_BYTES = 4096

    def body(rank: int) -> list[list[str]]:
        state = Shares()
        checkpoints = CheckpointManager(folder / "checkpoints", memory=folder / f"node-{rank}", keep=9)
        heard: list[list[str]] = []

        def save(name: str, *, durable: bool = True) -> None:
            step = len(heard) + 1
            state.set(step)
            checkpoints.save_async(step, model=state.model, optimizer=state.optimizer, durable=durable)
            began = time.monotonic()
            try:
                checkpoints.wait()
                said = "saved"
            except CheckpointError as error:
                said = str(error)
            heard.append([name, said, "in time" if time.monotonic() - began < PATIENCE_S else "late"])
            (folder / f"{name}-{rank}").touch()

        def meet() -> None:
            all_gather_json(lambda: None)  # as training does: over the group that is not given up

        def on_victim(place: type, name: str, what: Callable[[], object], *, at_call: int = 0) -> Callable[[], None]:
            whole = getattr(place, name)
            calls: list[None] = []

            def instead(*arguments: Any) -> Any:
                calls.append(None)
                if len(calls) == at_call + 1:
                    what()
                return whole(*arguments)

            if rank == VICTIM:
                setattr(place, name, instead)
            return lambda: setattr(place, name, whole)

        def stop() -> None:
            (folder / f"stopped-{len(heard)}").touch()
            os.kill(os.getpid(), signal.SIGSTOP)

        def fail() -> None:
            raise OSError("its network card is gone")

        mend = on_victim(Saver, "_write_rank_file", lambda: time.sleep(SILENCE_TIMEOUT_S + 0.5))
        save("slow")
        mend()
        meet()
        mend = on_victim(Saver, "_write_rank_file", stop)
        save("stopped while it writes")
        mend()
        meet()
        mend = on_victim(Communicator, "_post_blocks", fail, at_call=3)
        save("fails while copies travel", durable=False)
        mend()
        meet()
        mend = on_victim(Communicator, "_post_blocks", stop, at_call=3)
        save("stopped while copies travel", durable=False)
        mend()
        meet()
        save("all well")
        meet()
        on_victim(Communicator, "_post_blocks", lambda: os.kill(os.getpid(), signal.SIGKILL), at_call=3)
        save("killed while copies travel", durable=False)
        return heard

    world = World(3, body)
    for name in ("stopped while it writes", "stopped while copies travel"):
        _until(lambda name=name: all((folder / f"{name}-{rank}").exists() for rank in range(3) if rank != VICTIM))  # type: ignore[misc]
        os.kill(world.pids[VICTIM], signal.SIGCONT)
    told = world.results(lost=[VICTIM])

    def resume(rank: int, *, memory: str = "node") -> list[Any]:
        state = Shares()
        with CheckpointManager(folder / "checkpoints", memory=folder / f"{memory}-{rank}") as checkpoints:
            found = checkpoints.load_latest(model=state.model, optimizer=state.optimizer)
            assert found is not None
            return [found.step, *state.numbers()]

    def resume_from_a_dying_one(rank: int) -> str:
        """Let the one who has the copy of the lost node's image die while it sends it."""
        if rank == 1:
            Communicator._post_blocks = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment,method-assign]
        try:
            resume(rank, memory="node" if rank else "new")
        except CheckpointError as error:
            return str(error)
        return "resumed"

    lost = World(3, resume_from_a_dying_one).results(lost=[1])
    return {"heard": told[:VICTIM], "lost in a load": [lost[0], lost[2]], "resumed": run_world(3, resume)}


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
