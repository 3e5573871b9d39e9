"""Saves that are killed, cut off or out of room; run by test_checkpoints through checkpoint_cases."""

from __future__ import annotations

import io
import logging
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.e2e.checkpoint_run import Run
from tests.e2e.rank_worlds import World, run_world
from tests.patience import PATIENCE_S

from elastipod.checkpoint import CheckpointManager
from elastipod.checkpoint.directory_store import DirectoryStore
from elastipod.checkpoint.image_slots import ImageSlots
from elastipod.checkpoint.load_plan import LoadPlan
from elastipod.checkpoint.memory_directory import MemoryDirectory
from elastipod.errors import CheckpointError, FencedError


class Numbered:
    """A state in which every number tells its step: what is torn or mixed cannot hide."""

    def __init__(self) -> None:
        self.model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(20_000)) for _ in range(4)])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def set(self, step: int) -> None:
        with torch.no_grad():
            for parameter in self.model:
                parameter.fill_(step)

    def step(self) -> int:
        numbers = {int(each) for parameter in self.model for each in parameter.unique().tolist()}
        assert len(numbers) == 1, f"a checkpoint holds several steps: {numbers}"
        return numbers.pop()


def kills(folder: Path, count: int, seed: int, in_memory: bool) -> dict[str, Any]:
    """Kill savers at random instants, ``count`` times over; each successor begins where the last one may have got to.

    Every resume must be whole, and not older than the last save that was reported as complete.
    """
    chance = random.Random(seed)
    told = folder / "told"
    tiers: dict[str, int] = {}
    resumed = 0

    def body(rank: int) -> None:
        state = Numbered()
        checkpoints = CheckpointManager(
            folder / "checkpoints", keep=2, memory=folder / "memory" if in_memory else False
        )
        resume = checkpoints.load_latest(model=state.model, optimizer=state.optimizer)
        step = resume.step if resume else 0
        assert state.step() == step
        if rank == 0:
            with open(told, "a") as file:
                file.write(f"resumed {step} {resume.tier if resume else 'nothing'}\n")
        while True:
            step += 1
            state.set(step)
            checkpoints.save_async(step, model=state.model, optimizer=state.optimizer, durable=step % 2 == 0)
            checkpoints.wait()
            if rank == 0:
                with open(told, "a") as file:
                    file.write(f"saved {step} {'durable' if step % 2 == 0 else 'memory'}\n")

    for _ in range(count):
        seen = len(_lines(told))
        world = World(2, body)
        deadline = time.monotonic() + PATIENCE_S
        wanted = seen + 1 + chance.randrange(4)  # it has resumed, and made some saves or none
        while len(_lines(told)) < wanted:
            assert time.monotonic() < deadline, "nobody resumed"
            time.sleep(0.002)
        time.sleep(chance.random() * 0.08)  # about the time of one save
        victims = [0, 1] if chance.random() < 0.5 else [chance.randrange(2)]
        for victim in victims:
            world.kill(victim)
        for rank in {0, 1} - set(victims):
            time.sleep(0.02)
            world.kill(rank)
        world.results(lost=[0, 1])
        promised = 0
        for word, step, tier in _lines(told):
            if word == "saved" and (tier == "durable" or in_memory):
                promised = max(promised, step)
            if word == "resumed":
                assert step >= promised, f"resumed from step {step}, though step {promised} had been saved"
        resumed += 1
        tiers[_lines(told)[seen][2]] = tiers.get(_lines(told)[seen][2], 0) + 1
    left = [name for name in os.listdir(folder / "checkpoints") if not name.startswith((".tmp", ".dead"))]
    return {"resumed": resumed, "tiers": tiers, "left": len(left), "last": _lines(told)[-1][1]}


def full_disk(folder: Path) -> dict[str, Any]:
    """Save to a file system that fills up, and is given room again; ``folder`` is on it."""
    heard = io.StringIO()

    def body(rank: int) -> dict[str, Any]:
        logging.basicConfig(stream=heard, level=logging.WARNING, force=True)
        state, checkpoints = Numbered(), CheckpointManager(folder / "checkpoints", keep=1, memory=False)
        there: list[list[int]] = []

        def save(step: int) -> str:
            state.set(step)
            checkpoints.save_async(step, model=state.model, optimizer=state.optimizer)
            try:
                checkpoints.wait()
            except CheckpointError as error:
                return str(error)
            finally:
                there.append([each.step for each in checkpoints._store.list_complete()])
            return "saved"

        said = [save(1)]
        if rank == 0:
            with open(folder / "ballast", "wb") as ballast:
                free = shutil.disk_usage(folder).free
                ballast.write(bytes(max(0, free - 300_000)))
        dist.barrier()
        said.append(save(2))
        left = sorted(os.listdir(folder / "checkpoints"))
        dist.barrier()
        if rank == 0:
            os.unlink(folder / "ballast")
        dist.barrier()
        said.append(save(3))
        return {"said": said, "there": there, "left": left, "heard": heard.getvalue()}

    return {"ranks": run_world(2, body)}


def failing_rank(folder: Path) -> list[Any]:
    """Let one of two ranks fail at several places of a save and of a load, each time with a world that goes on."""

    def body(rank: int) -> list[str]:
        run, checkpoints = Run("ddp"), CheckpointManager(folder / "checkpoints", memory=folder / "memory")
        run.train(1, 1)
        run.save(checkpoints, 1)
        said: list[str] = []

        def fail(*_: object, **__: object) -> None:
            raise OSError(f"rank {rank} has had enough")

        def attempt(place: object, name: str, action: Callable[[], object]) -> None:
            whole = getattr(place, name)
            if rank == 1:
                setattr(place, name, fail)
            try:
                action()
                said.append("done")
            except CheckpointError as error:
                said.append(str(error))
            setattr(place, name, whole)

        class Log:
            sync = saved = staticmethod(lambda *_: None)

        def save(step: int, **more: Any) -> None:
            checkpoints.save(step, model=run.model, optimizer=run.optimizer, scheduler=run.scheduler, **more)

        attempt(type(run.scheduler), "state_dict", lambda: save(2))
        attempt(ImageSlots, "fill", lambda: save(3))
        attempt(MemoryDirectory, "publish", lambda: save(4))
        sample_log = Log()
        attempt(sample_log, "saved", lambda: save(5, sample_log=sample_log))
        attempt(DirectoryStore, "size_of", lambda: run.load(checkpoints))
        attempt(LoadPlan, "copy_values", lambda: run.load(checkpoints))
        run.save(checkpoints, 6)
        checkpoints.close()
        return [*said, str([each.step for each in checkpoints._store.list_complete()])]

    return run_world(2, body)


def _lines(told: Path) -> list[tuple[str, int, str]]:
    if not told.exists():
        return []
    lines = told.read_text().split("\n")[:-1]  # the last one may be half a line
    return [(word, int(step), tier) for word, step, tier in (line.split() for line in lines)]


def partition(folder: Path, rounds: int, seed: int) -> dict[str, Any]:
    """Let an old generation go on saving while a new one takes over: nothing of the old may appear afterwards."""
    chance = random.Random(seed)
    commits = fenced = 0
    for number in range(rounds):
        place = folder / f"round-{number}"

        def old(rank: int, place: Path = place) -> str:
            state, checkpoints = Numbered(), CheckpointManager(place, generation=1, memory=False)
            for step in range(1, 10_000):
                state.set(step)
                try:
                    checkpoints.save(step, model=state.model, optimizer=state.optimizer)
                except FencedError:
                    return "fenced"
                except CheckpointError as error:
                    return str(error)
            return "never fenced"

        world = World(1, old)
        while not DirectoryStore(place).list_complete():
            time.sleep(0.001)
        time.sleep(chance.random() * 0.2)
        directory = DirectoryStore(place)
        directory.claim(2)
        at_claim = directory.list_complete()
        (said,) = world.results()
        assert said == "fenced", said
        found = directory.list_complete()
        assert found == at_claim, f"a replaced generation committed or deleted: {at_claim}, then {found}"
        commits += at_claim[0].step
        fenced += 1
    return {"fenced": fenced, "commits": commits}


def small_memory(folder: Path, small: str) -> list[Any]:
    """Save where one of two nodes has no room for images, and resume."""

    def body(rank: int) -> list[Any]:
        heard = io.StringIO()
        logging.basicConfig(stream=heard, level=logging.WARNING, force=True)
        state = Numbered()
        with CheckpointManager(folder / "checkpoints", memory=small if rank else folder / "memory") as checkpoints:
            resume = checkpoints.load_latest(model=state.model, optimizer=state.optimizer)
            step = 1 + (resume.step if resume else 0)
            state.set(step)
            checkpoints.save(step, model=state.model, optimizer=state.optimizer)
        return [resume and [resume.step, resume.tier], heard.getvalue()]

    return [run_world(2, body), run_world(2, body)]
