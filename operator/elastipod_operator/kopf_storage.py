"""Storage for kopf that stores nothing, because this operator has no change handlers.

By default kopf copies every object of every event several times, to compare it with the last one: half of the load of an
operator with many pods.
"""

from __future__ import annotations

from typing import Any

import kopf


class NoComparison(kopf.DiffBaseStorage):
    """Finds no two states of an object different, and looks at neither."""

    def build(self, *, body: Any, extra_fields: Any = None) -> Any:
        """Give what is compared."""
        return {}

    def fetch(self, *, body: Any) -> Any:
        """Give what was kept."""
        return None

    def store(self, *, body: Any, patch: Any, essence: Any) -> None:
        """Keep something in the object."""


class NoProgress(kopf.ProgressStorage):
    """Keeps no progress of handlers."""

    def fetch(self, *, key: Any, body: Any) -> Any:
        """Give what was kept of a handler."""
        return None

    def store(self, *, key: Any, record: Any, body: Any, patch: Any) -> None:
        """Keep something of a handler in the object."""

    def purge(self, *, key: Any, body: Any, patch: Any) -> None:
        """Remove what was kept of a handler."""

    def touch(self, *, body: Any, patch: Any, value: Any) -> None:
        """Change the object, to get an event of it."""

    def clear(self, *, essence: Any) -> Any:
        """Take what is kept out of what is compared."""
        return essence
