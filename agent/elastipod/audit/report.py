"""The audit: was every sample trained exactly once? Computed from the sample logs and nothing else.

It follows the lineage of the final weights backwards: the steps of the last generation after the step it resumed from, then
the steps of the generation that saved that checkpoint, and so on. Over the lineage every index must occur once per epoch. In a
weighted mixture every source must be drawn as often as its weight says, and its samples must occur equally often, give or take
one. Steps that a crashed generation made after its last checkpoint are not in the lineage; they count as repeated. Logs that
were lost with a node are missed only in the lineage.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from elastipod.audit.log_reader import LoggedGeneration
from elastipod.audit.sample_counts import EpochCounter, MixtureCounter, SampleCounter
from elastipod.errors import UnusableLogsError

MAX_NAMED = 10  # missing indices that a report names; it counts the others
NORM_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The verdict and the numbers behind it. Samples are counted over the job, steps by generation.

    exact: every sample occurs exactly as often as expected. completed: the job logged its end. lineage: [generation, first
    step, last step], oldest first.
    samples_total: in all lines, including lost work. samples_unique: occurrences in the lineage that were expected.
    samples_expected: dataset size x epochs, or the draws of a mixture. duplicates: occurrences in the lineage beyond the
    expected ones. missing: expected occurrences that the lineage lacks. foreign: occurrences of indices or epochs that do not
    exist. missing_first: the first missing samples as [epoch, index]; for a mixture [pass over the source, index].
    steps_repeated: for each generation, its steps that an earlier generation had made already.
    optimizer_norms_differ: generations that loaded other optimizer moments than were saved.
    incomplete: generations outside the lineage that lack the logs of some ranks. samples_total and steps_repeated count what is
    there, so they are lower bounds if there are any.
    """

    exact: bool
    completed: bool
    final_step: int
    lineage: list[list[int]]
    samples_total: int
    samples_unique: int
    samples_expected: int
    duplicates: int
    missing: int
    foreign: int
    missing_first: list[list[int]]
    steps_repeated: dict[int, int]
    optimizer_norms_differ: list[int]
    incomplete: list[int]

    @property
    def sentence(self) -> str:
        """The verdict in one sentence."""
        if self.exact:
            return f"every one of {self.samples_expected} samples was trained exactly once over {self.final_step} steps"
        faults = [
            f"{count} {text}"
            for count, text in (
                (self.duplicates, "trained more than once"),
                (self.missing, "never trained" if self.completed else "not trained (yet): the job has not completed"),
                (self.foreign, "outside the dataset"),
            )
            if count
        ]
        return f"NOT exactly once: of {self.samples_expected} samples, {', '.join(faults)}"


@dataclass(frozen=True, slots=True)
class LineageSegment:
    """Steps of one generation, ``first`` to ``last`` inclusive, that the final weights contain."""

    generation: LoggedGeneration
    first: int
    last: int


def audit(generations: dict[int, LoggedGeneration]) -> AuditReport:
    """Give the report on the logs of one job. generations: from `read_logs`.

    Raises UnusableLogsError when the lineage cannot be followed, or when it contains a generation of which logs are missing.
    """
    newest = generations[max(generations)]
    lineage = trace_lineage(generations)
    for segment in lineage:
        _check_complete(segment.generation)
    counter: SampleCounter = (
        MixtureCounter(newest.start.sources)
        if newest.start.sources
        else EpochCounter(newest.start.dataset_size, newest.start.epochs)
    )
    for segment in lineage:
        for step in range(segment.first, segment.last + 1):
            counter.add(segment.generation.steps.get(step, ()))
    counted = counter.counts()
    return AuditReport(
        exact=not (counted.duplicates or counted.foreign or counted.missing),
        completed="completed" in newest.ends,
        final_step=lineage[-1].last if lineage else 0,
        lineage=[[segment.generation.number, segment.first, segment.last] for segment in lineage],
        samples_total=sum(
            line.count for each in generations.values() for lines in each.steps.values() for line in lines
        ),
        samples_unique=counted.unique,
        samples_expected=counted.expected,
        duplicates=counted.duplicates,
        missing=counted.missing,
        foreign=counted.foreign,
        missing_first=counter.first_missing(MAX_NAMED),
        steps_repeated=repeated_steps(generations),
        optimizer_norms_differ=_generations_with_changed_norm(generations),
        incomplete=[each.number for each in generations.values() if each.steps and each.missing_ranks],
    )


def trace_lineage(generations: dict[int, LoggedGeneration]) -> list[LineageSegment]:
    """Give the segments of steps that the final weights contain, oldest first. Raises UnusableLogsError on a broken chain."""
    generation = generations[max(generations)]
    last = _final_step(generation)
    lineage: list[LineageSegment] = []
    while True:
        first = generation.start.resumed_step + 1
        if last >= first:
            lineage.append(LineageSegment(generation, first, last))
        # An image in memory may be older than the generation that offered it: then none of that one's steps count.
        last = min(last, generation.start.resumed_step)
        parent = generation.start.resumed_generation
        if not parent or not last:
            return lineage[::-1]
        if parent >= generation.number or parent not in generations:
            raise UnusableLogsError(
                f"generation {generation.number} resumed from generation {parent} at step {last}, whose logs are not here"
            )
        generation = generations[parent]


def repeated_steps(generations: dict[int, LoggedGeneration]) -> dict[int, int]:
    """Give, for each generation, the number of its steps that an earlier generation had made already."""
    repeated: dict[int, int] = {}
    reached = 0
    for number in sorted(generations):
        steps = generations[number].steps
        repeated[number] = sum(1 for step in steps if step <= reached)
        reached = max([reached, *steps])
    return repeated


def _check_complete(generation: LoggedGeneration) -> None:
    missing = generation.missing_ranks
    if missing:
        raise UnusableLogsError(
            f"generation {generation.number} ran on {generation.start.world_size} ranks, but the logs of "
            f"{len(missing)} are missing, the first of rank {missing[0]}"
        )


def _final_step(newest: LoggedGeneration) -> int:
    """Give the step of the final weights: the step at which the job ended, else its newest checkpoint."""
    if newest.ends:
        return max(newest.ends.values())
    return max(newest.saved, default=newest.start.resumed_step)


def _generations_with_changed_norm(generations: dict[int, LoggedGeneration]) -> list[int]:
    changed = []
    for generation in generations.values():
        parent = generations.get(generation.start.resumed_generation)
        before = parent.saved.get(generation.start.resumed_step) if parent else None
        after = generation.loaded.get(generation.start.resumed_step)
        if before is not None and after is not None and not math.isclose(before, after, rel_tol=NORM_TOLERANCE):
            changed.append(generation.number)
    return changed
