"""What happens to checkpoints over worlds of ranks; run by test_checkpoints."""

from __future__ import annotations

import hashlib
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
from tests.e2e import bucket_cases, lost_rank_cases, member_cases, partial_state_cases, pipeline_cases
from tests.e2e.rank_worlds import World, run_world, serve
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from elastipod.checkpoint import CheckpointManager, Resume, hierarchy
from elastipod.checkpoint.directory_store import DirectoryStore
from elastipod.checkpoint.load_plan import LoadPlan
from elastipod.checkpoint.memory_directory import MemoryDirectory
from elastipod.checkpoint.staging import Staging
from elastipod.errors import CheckpointError, FencedError
from elastipod.torch_compat import DTensor

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # torch 2.4 and 2.5
    from torch.distributed._composable.fsdp import fully_shard  # type: ignore[attr-defined]


class Run:
    """A model that trains: on one process, or over the world as DDP, FSDP2 or HSDP (two replicas).

    As most trainers have it, biases do not decay, which is a parameter group of their own, and one layer is frozen.
    """

    def __init__(self, kind: str, *, seed: int = 0, width: int = 10) -> None:
        torch.manual_seed(seed)
        self.model: torch.nn.Module = torch.nn.Sequential(
            torch.nn.Linear(6, width),
            torch.nn.Tanh(),
            torch.nn.Dropout(0.1),
            torch.nn.Linear(width, width, bias=False).requires_grad_(False),
            torch.nn.Linear(width, 3),
        )
        if kind == "ddp":
            self.model = DistributedDataParallel(self.model)
        elif kind == "fsdp":
            fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        elif kind == "hsdp":
            fully_shard(
                self.model, mesh=init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("a", "b"))
            )
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [parameter for parameter in trained if parameter.ndim > 1], "weight_decay": 0.1},
                {
                    "params": [parameter for parameter in trained if parameter.ndim == 1],
                    "weight_decay": 0.0,
                    "lr": 0.02,
                },
            ],
            lr=0.05,
        )
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 5], gamma=0.5)

    def train(self, first: int, last: int) -> None:
        """Make steps ``first`` to ``last``; every rank has the same samples."""
        for step in range(first, last + 1):
            inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
            self.optimizer.zero_grad()
            self.model(inputs).square().mean().backward()
            self.optimizer.step()
            self.scheduler.step()

    def save(self, checkpoints: CheckpointManager, step: int) -> Path | str:
        return checkpoints.save(
            step, model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, extra={"s": step}
        )

    def save_async(self, checkpoints: CheckpointManager, step: int, *, durable: bool = True) -> None:
        checkpoints.save_async(
            step,
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            extra={"s": step},
            durable=durable,
        )

    def load(self, checkpoints: CheckpointManager) -> Resume | None:
        return checkpoints.load_latest(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler)

    def digest(self) -> str:
        """Give a digest of all weights, moments and the schedule, the same for the same values however they are sharded."""
        found = hashlib.sha256()
        for name, parameter in sorted(self.model.named_parameters()):
            found.update(name.removeprefix("module.").encode())
            state = self.optimizer.state[parameter] if parameter.requires_grad else {}
            assert len(state) == 3 * parameter.requires_grad
            for tensor in (parameter, *(state[key] for key in sorted(state))):
                whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                found.update(whole.detach().numpy().tobytes())
        found.update(repr(self.scheduler.get_last_lr()).encode())
        return found.hexdigest()


def nodes(folder: Path, count: int) -> list[dict[str, str]]:
    """Give each rank a node of its own, with its own memory."""
    return [{"ELASTIPOD_MEMORY_DIR": str(folder / f"node-{number}")} for number in range(count)]


def reshard(folder: Path, path: list[list[Any]]) -> list[Any]:
    """Hand one state on from world to world, [kind, ranks] each; gives, by world, the digests before and after."""

    def body(kind: str, step: int) -> Any:
        def on_rank(rank: int) -> list[Any]:
            run, checkpoints = Run(kind, seed=step + rank), CheckpointManager(folder / "checkpoints", memory=False)
            resume = run.load(checkpoints)
            loaded = run.digest() if resume else ""
            noise = torch.rand(2).tolist()
            run.train(step + 1, step + 2)
            run.save(checkpoints, step + 2)
            checkpoints.close()
            return [resume and [resume.step, resume.world_size, dict(resume.extra)], loaded, run.digest(), noise]

        return on_rank

    return [run_world(size, body(kind, 2 * number)) for number, (kind, size) in enumerate(path)]


def memory(folder: Path) -> dict[str, Any]:
    """Sharded state on four nodes: restart, loss of one node, loss of too many, and growth."""
    durable = folder / "checkpoints"

    def begin(rank: int) -> str:
        run = Run("fsdp")
        with CheckpointManager(durable) as checkpoints:
            run.train(1, 2)
            run.save(checkpoints, 2)
            run.train(3, 4)
            run.save_async(checkpoints, 4, durable=False)
            digest = run.digest()
        return digest

    def go_on(kind: str) -> Any:
        def on_rank(rank: int) -> list[Any]:
            run = Run(kind, seed=9)
            with CheckpointManager(durable) as checkpoints:
                resume = run.load(checkpoints)
                assert resume is not None
                return [resume.tier, resume.step, run.digest()]

        return on_rank

    told: dict[str, Any] = {"saved": run_world(4, begin, environ=nodes(folder, 4))[0]}
    told["restarted"] = run_world(4, go_on("fsdp"), environ=nodes(folder, 4))
    (image,) = (folder / "node-2").rglob("image-gen-000001-rank-00002-slot-1.bin")
    with open(image, "r+b") as file:
        file.write(b"damage")
    told["one image damaged"] = run_world(4, go_on("fsdp"), environ=nodes(folder, 4))
    shutil.rmtree(folder / "node-1")
    told["one node lost"] = run_world(4, go_on("fsdp"), environ=nodes(folder, 4))
    told["shrunk to two"] = run_world(2, go_on("ddp"), environ=[nodes(folder, 4)[number] for number in (0, 3)])
    shutil.rmtree(folder / "node-3")  # which kept the copies of node 1
    told["both keepers lost"] = run_world(4, go_on("fsdp"), environ=nodes(folder, 4))
    return told


def replicas(folder: Path) -> dict[str, Any]:
    """State that every rank has: any one node's memory is enough, and newcomers are sent theirs."""

    def begin(rank: int) -> list[Any]:
        run = Run("ddp")
        with CheckpointManager(folder / "checkpoints") as checkpoints:
            run.train(1, 3)
            run.save_async(checkpoints, 3, durable=False)
            checkpoints.wait()
        return [run.digest(), len(list((folder / f"node-{rank}").rglob("*.bin")))]

    def go_on(rank: int) -> list[Any]:
        run = Run("ddp", seed=9)
        with CheckpointManager(folder / "checkpoints") as checkpoints:
            resume = run.load(checkpoints)
            assert resume is not None
            loaded = [resume.tier, resume.step, run.digest()]
            run.train(4, 4)
            run.save_async(checkpoints, 4, durable=False)
        return loaded

    told: dict[str, Any] = {"saved": run_world(2, begin, environ=nodes(folder, 2))}
    shutil.rmtree(folder / "node-0")
    told["grown to four"] = run_world(4, go_on, environ=nodes(folder, 4))
    return told


def flipped(folder: Path, size: int) -> dict[str, Any]:
    """Let a bit flip in the weights of one replica of several before a save in memory; a buffer differs anyway."""

    def run_of(rank: int, seed: int) -> Run:
        run = Run("ddp", seed=seed)
        run.model.register_buffer("seen", torch.tensor(float(rank)))
        return run

    def begin(rank: int) -> list[str]:
        run = run_of(rank, 0)
        with CheckpointManager(folder / "checkpoints") as checkpoints:
            run.train(1, 2)
            run.save(checkpoints, 2)
            digests = [run.digest()]
            run.train(3, 4)
            digests.append(run.digest())
            if rank == 1:
                with torch.no_grad():
                    next(run.model.parameters()).view(torch.int32)[0, 0] ^= 1
            run.save_async(checkpoints, 4, durable=False)
        return digests

    def go_on(rank: int) -> list[Any]:
        heard = io.StringIO()
        logging.basicConfig(stream=heard, level=logging.WARNING, force=True)
        run = run_of(rank, 9)
        with CheckpointManager(folder / "checkpoints") as checkpoints:
            resume = run.load(checkpoints)
            assert resume is not None
        return [resume.tier, resume.step, run.digest(), heard.getvalue()]

    told: dict[str, Any] = {"saved": run_world(size, begin, environ=nodes(folder, size))[0]}
    told["resumed"] = run_world(size, go_on, environ=nodes(folder, size))
    return told


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
        deadline = time.monotonic() + 60
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
        attempt(Staging, "_copy_tensors", lambda: save(3))
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
        assert directory.list_complete() == at_claim, "a replaced generation committed or deleted"
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


def in_subgroups(case: Callable[..., Any]) -> Callable[..., Any]:
    """Give the case in worlds that form teams of two, as large worlds form larger ones."""

    def run(*arguments: Any) -> Any:
        whole = hierarchy.MAX_FLAT_RANKS, hierarchy.SUBGROUP_MULTIPLE
        hierarchy.MAX_FLAT_RANKS = hierarchy.SUBGROUP_MULTIPLE = 2
        try:
            return case(*arguments)
        finally:
            hierarchy.MAX_FLAT_RANKS, hierarchy.SUBGROUP_MULTIPLE = whole

    return run


CASES: dict[str, Callable[..., Any]] = {
    "reshard": reshard,
    "memory": memory,
    "replicas": replicas,
    "flipped": flipped,
    "kills": kills,
    "partition": partition,
    "full disk": full_disk,
    "failing rank": failing_rank,
    "small memory": small_memory,
    "partial state": partial_state_cases.partial,
    "members": member_cases.members,
    "stages": partial_state_cases.stages,
    "pipeline": pipeline_cases.worlds,
    "pipeline, whole": pipeline_cases.whole,
    "pipeline, refused": pipeline_cases.refusals,
    "lost ranks": lost_rank_cases.lose_ranks,
    **{
        f"{name}, in teams": in_subgroups(case)
        for name, case in (
            ("reshard", reshard),
            ("memory", memory),
            ("failing rank", failing_rank),
            ("lost ranks", lost_rank_cases.lose_ranks),
        )
    },
    "bucket worlds": bucket_cases.worlds,
    "bucket fences": bucket_cases.fences,
    "bucket trouble": bucket_cases.trouble,
}

if __name__ == "__main__":
    Run("plain").train(1, 1)  # what torch imports late is there before the first fork
    serve(CASES)
