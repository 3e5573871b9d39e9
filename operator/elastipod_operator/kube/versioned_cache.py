"""A cache of objects of one kind that belong to one job, fed by watches and by the operator's own calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

T = TypeVar("T")


class VersionedCache(Generic[T]):
    """Objects by UID. Reads may be stale: an older version never replaces a newer one and never restores a deleted object."""

    def __init__(self) -> None:
        self.is_listed = False
        """All objects were listed. Before that an absent object proves nothing."""
        self._items: dict[str, T] = {}
        self._versions: dict[str, int] = {}
        self._list_version = -1

    @property
    def items(self) -> tuple[T, ...]:
        return tuple(self._items.values())

    def get(self, uid: str) -> T | None:
        """Give an object by its UID; None if unknown."""
        return self._items.get(uid)

    def put(self, uid: str, version: int, item: T) -> bool:
        """Take an object; False if nothing is new."""
        if version <= self._versions.get(uid, self._list_version):
            return False
        self._versions[uid] = version
        before = self._items.get(uid)
        self._items[uid] = item
        return item != before

    def drop(self, uid: str, version: int = -1) -> bool:
        """Forget a deleted object; False if it was unknown."""
        self._versions[uid] = max(version, self._versions.get(uid, -1))
        return self._items.pop(uid, None) is not None

    def replace(self, found: Mapping[str, tuple[int, T]], version: int) -> bool:
        """Take a full list. Objects that are neither in it nor newer are gone. False if nothing changed."""
        before = dict(self._items)
        for uid in list(self._items):
            if uid not in found and self._versions[uid] <= version:
                self.drop(uid, version)
        for uid, (its_version, item) in found.items():
            self.put(uid, its_version, item)
        self.is_listed, self._list_version = True, max(version, self._list_version)
        # Deleted objects older than the list need no entry: the version of the list keeps them out.
        self._versions = {u: v for u, v in self._versions.items() if u in self._items or v > self._list_version}
        return self._items != before

    def clear(self) -> bool:
        """Forget all objects because their kind is gone; False if there were none."""
        had_some = bool(self._items)
        self._items.clear()
        # Objects that return unchanged with their kind are accepted again.
        self._versions.clear()
        self._list_version = -1
        return had_some
