"""Reads the output of a worker beside the code that shows it."""

from __future__ import annotations

from collections.abc import Callable


class OutputTap:
    """Forwards output to `target`, which changes with the generation; None reads nothing. Called in the output thread."""

    def __init__(self, target: Callable[[bytes], None] | None = None) -> None:
        self.target = target

    def __call__(self, data: bytes) -> None:
        target = self.target
        if target is not None:
            target(data)
