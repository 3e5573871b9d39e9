"""What happens to checkpoints over worlds of ranks; run by test_checkpoints."""

from __future__ import annotations

import io
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests.e2e import bucket_cases, lost_rank_cases, member_cases, partial_state_cases, pipeline_cases
from tests.e2e.checkpoint_run import Run, nodes
from tests.e2e.rank_worlds import run_world, serve
from tests.e2e.torn_save_cases import failing_rank, full_disk, kills, partition, small_memory

from elastipod.checkpoint import CheckpointManager, hierarchy


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
