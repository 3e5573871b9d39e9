"""The gates of `make lint` that are this repository's own: a line for each finding, exit 1 when there is any.

Usage: python -m tests.lint
"""

from __future__ import annotations

import gc
import sys

from tests.lint import bounds, code, glossary, phrases, references, vacuous
from tests.lint.sources import read_repository

GATES = (bounds, code, glossary, phrases, references, vacuous)


def main() -> int:
    """Run every gate on the repository; give the exit status."""
    gc.disable()  # millions of syntax nodes live to the end: looking for garbage among them took a third of the time
    repository = read_repository()
    findings = sorted({finding for gate in GATES for finding in gate.check(repository)})
    for finding in findings:
        print(finding)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
