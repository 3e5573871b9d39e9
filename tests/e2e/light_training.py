"""A training job in miniature, for pods: the library's data plan, events, checkpoint directory and sample log; no torch.

The ranks meet after every step at rank 0, as a collective would make them. What they train is one number, the sum of the
samples' indices: it goes through every checkpoint and must be exact at the end.
Usage, under hyperpodrun: light_training.py --folder DIR --steps N --pace SECONDS --hurry FILE
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, cast

from elastipod import ElasticBatches, SampleLog, report
from elastipod.checkpoint.directory_store import DirectoryStore
from elastipod.checkpoint.manifest import CheckpointId, Manifest, measure_stream
from elastipod.local_worker import generation_from_env, local_worker, run_id_from_env
from elastipod.worker_file import EventLevel

GLOBAL_BATCH = 12
CHECKPOINT_EVERY = 20
# Others may be started by a later operator than the first ones.
MEETING_S = 120.0
STATE = "state.json"
Said = dict[str, Any]


class Ranks:
    """The connections of one generation's ranks. Every call raises OSError (or EOFError) when another rank is gone."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        self._streams = self._gather(address[1]) if rank == 0 else [self._join(address)]

    def meet(self, mine: Said, decide: Callable[[list[Said]], Said]) -> Said:
        """Bring what every rank says to rank 0 and its decision to every rank. Collective."""
        if self.rank != 0:
            _write(self._streams[0], mine)
            return _read(self._streams[0])
        answer = decide([mine, *(_read(stream) for stream in self._streams)])
        for stream in self._streams:
            _write(stream, answer)
        return answer

    def _gather(self, port: int) -> list[IO[bytes]]:
        if self.world_size == 1:
            return []
        with socket.create_server(("", port), backlog=self.world_size) as listener:
            listener.settimeout(MEETING_S)
            return [cast(IO[bytes], listener.accept()[0].makefile("rwb")) for _ in range(self.world_size - 1)]

    def _join(self, address: tuple[str, int]) -> IO[bytes]:
        deadline = time.monotonic() + MEETING_S
        while True:
            try:
                connection = socket.create_connection(address, timeout=5)
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
            else:
                connection.settimeout(None)
                return cast(IO[bytes], connection.makefile("rwb"))


def _write(stream: IO[bytes], said: Said) -> None:
    stream.write(json.dumps(said).encode() + b"\n")
    stream.flush()


def _read(stream: IO[bytes]) -> Said:
    line = stream.readline()
    if not line:
        raise EOFError("another rank is gone")
    said: Said = json.loads(line)
    return said


def load(directory: DirectoryStore) -> Said:
    """Claim the directory and find where to go on. On rank 0."""
    generation = directory.claim(generation_from_env(), run_id_from_env())
    for found in directory.list_complete():
        manifest = directory.manifest(found)
        if problems := directory.find_problems(manifest, manifest.files):
            raise ValueError("; ".join(problems))
        state = json.loads((directory.path / found.name / STATE).read_text())
        return {"generation": generation, "step": found.step, "from": found.generation, "total": state["total"]}
    return {"generation": generation, "step": 0, "from": 0, "total": 0}


def save(directory: DirectoryStore, target: CheckpointId, world_size: int, total: int) -> None:
    """Write one checkpoint. On rank 0, while all ranks wait."""
    temporary = directory.begin(target)
    (temporary / STATE).write_text(json.dumps({"total": total}))
    with (temporary / STATE).open("rb") as file:
        record = measure_stream(file)
    directory.commit(temporary, Manifest(target, world_size, {STATE: record}, {}))
    directory.prune(target.generation, keep=2)


def train(options: argparse.Namespace, ranks: Ranks) -> None:
    worker = local_worker()
    assert worker is not None, "started by hyperpodrun"
    directory = DirectoryStore(options.folder / "checkpoints")
    plan = ElasticBatches(options.steps * GLOBAL_BATCH, GLOBAL_BATCH, seed=1)
    start = ranks.meet({}, lambda _: load(directory))
    generation, step, total = start["generation"], start["step"], start["total"]
    resume = cast(Any, SimpleNamespace(step=step, generation=start["from"]))
    if ranks.rank == 0:
        print(
            f"generation {generation}: {ranks.world_size} workers continue after step {step} of {options.steps}",
            flush=True,
        )

    def after(said: list[Said]) -> Said:
        """Add up the step and save where that is due; all ranks leave together when one of them is asked to."""
        is_drained = any(one["drain"] for one in said)
        new = total + sum(one["sum"] for one in said)
        if is_drained or step % CHECKPOINT_EVERY == 0 or step == plan.total_steps:
            save(directory, CheckpointId(step, generation), ranks.world_size, new)
        return {"total": new, "drain": is_drained, "hurry": options.hurry.exists()}

    pace = options.pace
    with SampleLog(
        options.folder / "samples",
        plan,
        generation=generation,
        rank=ranks.rank,
        world_size=ranks.world_size,
        resume=resume if step else None,
    ) as log:
        for batch in plan.iterate(ranks.rank, ranks.world_size, start_step=step):
            time.sleep(pace)
            step = batch.step
            log.step(batch)
            is_asked = worker.file.event().level != EventLevel.NONE
            told = ranks.meet({"sum": sum(batch.indices), "drain": is_asked}, after)
            total, pace = told["total"], 0.0 if told["hurry"] else options.pace
            report(step, batch.samples_seen, float(total))
            if told["drain"]:
                worker.file.acknowledge(worker.local_rank)
                log.end(step, "drained")
                return
        expected = sum(range(plan.dataset_size))
        if total != expected:
            raise SystemExit(f"the sum of all samples is {total}, it must be {expected}")
        log.end(step, "completed")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--pace", type=float, required=True, help="seconds that a step takes, until --hurry is there")
    parser.add_argument("--hurry", type=Path, required=True)
    train(parser.parse_args(), Ranks(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])))


if __name__ == "__main__":
    main()
