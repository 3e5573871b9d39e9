"""A made-up job that is resized, drained and killed at random, without processes: what is trained goes into real sample logs.

Every rank fetches ahead through its sampler, as a loader does, and what was fetched is lost with its generation. The place is
carried on as JSON, through the state that a random rank has given.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from elastipod.audit.log_reader import read_logs
from elastipod.audit.report import AuditReport, audit
from elastipod.audit.sample_log import SampleLog
from elastipod.checkpoint import Resume
from elastipod.data import Batch, ElasticBatches
from elastipod.data.loader import ElasticBatchSampler, PassIterator
from elastipod.data.mixture import Mixture
from elastipod.data.shards import Shards
from elastipod.data.sources import MapSource, Source


@dataclass(slots=True)
class Schedule:
    """One job with its seeded fate."""

    directory: Path
    seed: int
    generations: int = 0
    kills: int = 0
    resizes: int = 0
    discarded: int = 0  # samples that were fetched and never trained by who fetched them
    _saved: list[tuple[int, int, str]] = field(default_factory=list)  # (step, generation, state)

    def run(self) -> AuditReport:
        """Play the job to its end and audit its logs."""
        chance = random.Random(self.seed)
        source, epochs, batch = draw_data(chance)
        plan = ElasticBatches.over(source, batch, epochs=epochs)
        grows = chance.random() < 0.3
        worlds: list[int] = []
        while not self._generation(chance, plan, grows, worlds):
            assert self.generations < 200, "the job gets nowhere"
        self.resizes = sum(one != other for one, other in pairwise(worlds))
        return audit(read_logs(self.directory))

    def _generation(self, chance: random.Random, plan: ElasticBatches, grows: bool, worlds: list[int]) -> bool:
        """Play one generation; True when the job has completed."""
        self.generations += 1
        world_size = chance.randint(1, 6)
        worlds.append(world_size)
        resume, step = None, 0
        if self._saved:
            step, generation, state = self._saved[-1]
            resume = Resume(step, generation, 1, self.directory)
            plan = plan.resumed(json.loads(state))
        if grows:
            plan = plan.with_batch(world_size * 3, after_step=step)
        sizes = draw_sizes(chance, plan.global_batch, world_size)
        micro_batch = chance.randint(1, 8)
        ranks = [
            _Rank(self, plan, rank, world_size, step, resume, sizes, micro_batch, chance.randint(0, 12))
            for rank in range(world_size)
        ]
        leaves_after = step + chance.choice([1, 2, 5, 12, 40])
        is_killed = chance.random() < 0.4 and self.kills < 20
        save_every = chance.randint(1, 6)
        while step < min(plan.total_steps, leaves_after):
            step += 1
            done = chance.randint(0, world_size) if is_killed and step == leaves_after else world_size
            for rank in ranks[:done]:
                rank.train(step)
            if done == world_size and step % save_every == 0:
                self._save(chance, ranks, step)
        is_complete = step == plan.total_steps and not (is_killed and step == leaves_after)
        if is_killed and not is_complete:
            self.kills += 1
        else:
            self._save(chance, ranks, step)
        for rank in ranks:
            self.discarded += rank.fetched_ahead
            if not is_killed or is_complete:
                rank.log.end(step, "completed" if is_complete else "drained")
            rank.log.close()
        return is_complete

    def _save(self, chance: random.Random, ranks: list[_Rank], step: int) -> None:
        states = [json.dumps(rank.sampler.state_dict(step), sort_keys=True) for rank in ranks]
        assert len(set(states)) == 1, "the position is global: every rank gives the same"
        for rank in ranks:
            rank.log.saved(step)
        self._saved.append((step, self.generations, chance.choice(states)))


class _Rank:
    """One rank of one generation: its sampler, which is some passes ahead, and its log."""

    def __init__(
        self,
        job: Schedule,
        plan: ElasticBatches,
        rank: int,
        world_size: int,
        step: int,
        resume: Resume | None,
        sizes: tuple[int, ...],
        micro_batch: int,
        ahead: int,
    ) -> None:
        place: dict[str, Any] = {"rank": rank, "world_size": world_size, "local_sizes": sizes}
        self.sampler = ElasticBatchSampler(plan, micro_batch=micro_batch, start_step=step, **place)
        self._batches = plan.iterate(start_step=step, **place)
        self._passes: PassIterator = iter(self.sampler)
        self._micro_batch, self._ahead = micro_batch, ahead
        self._fetched: list[list[int]] = []
        self.log = SampleLog(
            job.directory, plan, generation=job.generations, rank=rank, world_size=world_size, resume=resume
        )

    @property
    def fetched_ahead(self) -> int:
        return sum(map(len, self._fetched))

    def train(self, step: int) -> None:
        batch: Batch = next(self._batches)
        assert batch.step == step
        for part in batch.micro_batches(self._micro_batch):
            while len(self._fetched) <= self._ahead:
                try:
                    self._fetched.append(next(self._passes))
                except StopIteration:
                    break
            assert self._fetched.pop(0) == list(part.indices)
        self.log.step(batch)


def draw_data(chance: random.Random) -> tuple[Source, int, int]:
    """Give a source of any kind, epochs and a global batch."""
    kind = chance.choice(["map", "shards", "mixture"])
    batch, seed = chance.randint(1, 24), chance.randint(0, 999)
    if kind == "map":
        return MapSource(chance.randint(1, 400), seed, chance.random() < 0.8), chance.randint(1, 3), batch
    lengths = [chance.randint(0, 30) for _ in range(chance.randint(0, 8))] + [chance.randint(1, 9)]
    shards = Shards(lengths, lanes=chance.choice([1, 3, batch]), seed=seed)
    if kind == "shards":
        return shards, chance.randint(1, 3), batch
    weights = {"one": chance.randint(1, 9), "two": chance.randint(1, 9), "three": 1}
    sources: dict[str, int | Source] = {"one": chance.randint(1, 60), "two": shards, "three": 5}
    samples = sum(weights.values()) * chance.randint(1, 9)
    return Mixture(sources, weights, samples=samples, seed=seed), chance.randint(1, 2), batch


def draw_sizes(chance: random.Random, global_batch: int, world_size: int) -> tuple[int, ...]:
    """Give uneven local sizes, sometimes with a rank that has none, or nothing for an even split."""
    if chance.random() < 0.6:
        return ()
    cuts = sorted(chance.randint(0, global_batch) for _ in range(world_size - 1))
    return tuple(end - first for first, end in zip([0, *cuts], [*cuts, global_batch], strict=True))
