"""`elastipod audit`: was every sample trained exactly once? Recomputed from the sample logs and from nothing else.

It follows the lineage of the final weights backwards: the last generation's steps from the one after it resumed, then the
steps of the generation whose checkpoint it resumed from, and so on. Over that lineage every index must occur once per
epoch; in a weighted mixture every source must be drawn from as often as its weight says, and all its samples equally often but for
one time. Steps that a crashed generation made after its last checkpoint are not part of it; they are counted as repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from elastipod.audit.log_reader import LoggedGeneration, read_logs
from elastipod.audit.sample_counts import EpochCounter, MixtureCounter, SampleCounter
from elastipod.errors import UnusableLogsError

EXACT, NOT_EXACT, UNUSABLE = 0, 1, 2
MAX_NAMED = 10  # indices that a report names before it only counts
NORM_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The verdict and the numbers behind it. Samples are counted over the job, steps per generation.

    samples_total: of all lines, lost work included; samples_unique: in the lineage, as often as expected;
    samples_expected: dataset size x epochs, or the draws of a mixture; duplicates: occurrences in the lineage beyond those;
    missing: expected ones that the lineage lacks; foreign: occurrences of indices or epochs that do not exist.
    steps_repeated: by generation, steps that it made although an earlier one had made them.
    """

    exact: bool
    completed: bool
    final_step: int
    lineage: list[list[int]]  # [generation, first step, last step], oldest first
    samples_total: int
    samples_unique: int
    samples_expected: int
    duplicates: int
    missing: int
    foreign: int
    missing_first: list[list[int]]  # [epoch, index]; of a mixture [pass over the source, index]
    steps_repeated: dict[int, int]
    optimizer_norms_differ: list[int]  # generations that loaded other moments than were saved

    @property
    def sentence(self) -> str:
        """Say the verdict in one sentence."""
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
    """Steps first..last of one generation that the final weights contain."""

    generation: LoggedGeneration
    first: int
    last: int


def audit(generations: dict[int, LoggedGeneration]) -> AuditReport:
    """Judge the logs of one job, as `read_logs` gives them. Raises UnusableLogsError when the lineage cannot be followed."""
    newest = generations[max(generations)]
    lineage = trace_lineage(generations)
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
    )


def trace_lineage(generations: dict[int, LoggedGeneration]) -> list[LineageSegment]:
    """Give the stretches of steps that the final weights contain, oldest first. Raises UnusableLogsError on a broken chain."""
    generation = generations[max(generations)]
    last = _final_step(generation)
    lineage: list[LineageSegment] = []
    while True:
        first = generation.start.resumed_step + 1
        if last >= first:
            lineage.append(LineageSegment(generation, first, last))
        last = generation.start.resumed_step
        parent = generation.start.resumed_generation
        if not parent or not last:
            return lineage[::-1]
        if parent >= generation.number or parent not in generations:
            raise UnusableLogsError(
                f"generation {generation.number} resumed from generation {parent} at step {last}, whose logs are not here"
            )
        generation = generations[parent]


def repeated_steps(generations: dict[int, LoggedGeneration]) -> dict[int, int]:
    """Count, by generation, the steps that it made although an earlier generation had made them."""
    repeated: dict[int, int] = {}
    reached = 0
    for number in sorted(generations):
        steps = generations[number].steps
        repeated[number] = sum(1 for step in steps if step <= reached)
        reached = max([reached, *steps])
    return repeated


def _final_step(newest: LoggedGeneration) -> int:
    """Give the step of the final weights: where the job ended, else its newest checkpoint."""
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


def main(argv: Sequence[str]) -> int:
    """Audit a directory of sample logs and give the exit status: 0 exactly once, 1 not, 2 no verdict possible."""
    parser = argparse.ArgumentParser(
        prog="elastipod audit",
        description="Check, from the sample logs of a run alone, that the final weights saw every sample exactly once per epoch.",
        epilog="exit status: 0 exactly once, 1 not, 2 the logs do not allow a verdict",
    )
    parser.add_argument("directory", help="the directory that the training script's SampleLog wrote")
    parser.add_argument("--json", action="store_true", help="print the whole report as JSON")
    options = parser.parse_args(argv)
    try:
        report = audit(read_logs(options.directory))
    except (UnusableLogsError, OSError) as error:
        print(f"elastipod audit: {error}", file=sys.stderr)
        return UNUSABLE
    print(json.dumps(asdict(report), indent=1) if options.json else describe(report))
    return EXACT if report.exact else NOT_EXACT


def describe(report: AuditReport) -> str:
    """Write a report for people."""
    lines = [report.sentence]
    lines += [f"  generation {number}: steps {first} to {last}" for number, first, last in report.lineage]
    lines.append(
        f"  samples: {report.samples_total} trained in all, {report.samples_unique} unique, {report.samples_expected} expected"
    )
    repeated = ", ".join(f"{count} by generation {number}" for number, count in sorted(report.steps_repeated.items()))
    lines.append(f"  steps repeated: {repeated}")
    if report.missing_first:
        named = ", ".join(f"{index} in epoch {epoch}" for epoch, index in report.missing_first)
        lines.append(f"  missing, first ones: {named}")
    lines += [
        f"  generation {number} loaded optimizer moments that differ from the saved ones"
        for number in report.optimizer_norms_differ
    ]
    return "\n".join(lines)
