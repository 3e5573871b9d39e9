"""`elastipod audit DIRECTORY`: prints whether every sample was trained exactly once."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from elastipod.audit.log_reader import read_logs
from elastipod.audit.report import AuditReport, audit
from elastipod.errors import UnusableLogsError

EXACT, NOT_EXACT, UNUSABLE = 0, 1, 2


def main(argv: Sequence[str]) -> int:
    """Audit a directory of sample logs and give the exit status: 0 exactly once, 1 not, 2 no verdict possible."""
    parser = argparse.ArgumentParser(
        prog="elastipod audit",
        description="Check from the sample logs of a job alone that the final weights contain every sample exactly once per epoch.",
        epilog="exit status: 0 exactly once, 1 not exactly once, 2 the logs do not allow a verdict",
    )
    parser.add_argument("directory", help="the directory that the training script gave to SampleLog")
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
    """Give a report as text for people, several lines."""
    lines = [report.sentence]
    lines += [f"  generation {number}: steps {first} to {last}" for number, first, last in report.lineage]
    lines.append(
        f"  samples: {report.samples_total} trained in all, {report.samples_unique} unique, {report.samples_expected} expected"
    )
    repeated = ", ".join(f"{count} by generation {number}" for number, count in sorted(report.steps_repeated.items()))
    lines.append(f"  steps repeated: {repeated}")
    lines += [
        f"  logs of generation {number} are missing, which left nothing in the final weights: at least so many steps were repeated"
        for number in report.incomplete
    ]
    if report.missing_first:
        named = ", ".join(f"{index} in epoch {epoch}" for epoch, index in report.missing_first)
        lines.append(f"  missing, first ones: {named}")
    lines += [
        f"  generation {number} loaded optimizer moments that differ from the saved ones"
        for number in report.optimizer_norms_differ
    ]
    return "\n".join(lines)
