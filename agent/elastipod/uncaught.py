"""What ends this process."""

from __future__ import annotations

import sys


def uncaught_exception() -> BaseException | None:
    """Give the exception that ends this process, at its exit; None if there was none, and in an interactive session."""
    return None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
