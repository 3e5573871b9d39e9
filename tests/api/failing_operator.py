"""An operator with a planted mistake: each of its decisions fails. Run as a script."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from elastipod_operator import app, reconcile_pass


def fail(*_: Any, **__: Any) -> NoReturn:
    """Fail as a forgotten case does."""
    raise KeyError("planted by a test")


if __name__ == "__main__":
    reconcile_pass.plan = fail  # type: ignore[attr-defined]  # it is looked up there
    sys.exit(app.main([]))
