"""kopf looks at no object to compare it, and keeps nothing in any."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import kopf

from elastipod_operator.kopf_handlers import settings


class Untouchable(Mapping[str, Any]):
    """An object of which nobody may read anything."""

    def __getitem__(self, key: str) -> Any:
        raise AssertionError(f"{key} was read")

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("it was gone through")

    def __len__(self) -> int:
        raise AssertionError("it was measured")


def test_objects_are_neither_copied_nor_compared() -> None:
    kept: Any = settings().persistence
    body = Untouchable()
    essence = kept.diffbase_storage.build(body=body, extra_fields=())
    assert kept.diffbase_storage.fetch(body=body) is None
    assert kept.progress_storage.clear(essence=essence) is essence
    assert kept.progress_storage.fetch(key="handler", body=body) is None


def test_nothing_is_written_into_objects() -> None:
    kept: Any = settings().persistence
    body, patch = Untouchable(), kopf.Patch()
    kept.diffbase_storage.store(body=body, patch=patch, essence={})
    kept.progress_storage.store(key="handler", record={}, body=body, patch=patch)
    kept.progress_storage.purge(key="handler", body=body, patch=patch)
    kept.progress_storage.touch(body=body, patch=patch, value="now")
    assert not patch
