"""Options that several benchmarks have."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection


def some_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """Give what reads an option: some of these names, by commas, in the order of these. It raises ArgumentTypeError for another name."""

    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        if unknown := set(chosen) - set(known):
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}; known are {', '.join(known)}")
        return [one for one in known if one in chosen]

    return parse
