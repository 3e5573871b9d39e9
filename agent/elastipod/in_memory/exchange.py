"""Collectives of a regroup: small texts of all ranks, and one text of one rank. Bounded, never pickled."""

from __future__ import annotations

import torch.distributed as dist

from elastipod.collectives import all_gather_texts, broadcast_text
from elastipod.errors import ElastipodError

MAX_TEXT_BYTES = 64 * 1024
MAX_MANIFEST_BYTES = 256 << 20


class TextTooLong(ElastipodError):
    """A rank would send, or announces, more than the others take."""


def all_texts(text: str, limit: int = MAX_TEXT_BYTES) -> list[str]:
    """Give every rank's text, by rank. Collective. Raises TextTooLong, and RuntimeError when a peer is gone."""
    if not dist.is_initialized():
        return [text]
    _checked(len(text.encode()), limit)
    return all_gather_texts(text, check_size=lambda size: _checked(size, limit))


def text_of(source: int, text: str | None) -> str:
    """Give the text of one rank on every rank; only there it must not be None. Collective. Raises as `all_texts`."""
    if not dist.is_initialized():
        assert text is not None, "a single process is the source"
        return text
    if text is not None:
        _checked(len(text.encode()), MAX_MANIFEST_BYTES)
    return broadcast_text(source, text, lambda size: _checked(size, MAX_MANIFEST_BYTES))


def _checked(length: int, limit: int) -> int:
    if not 0 < length <= limit:
        raise TextTooLong(f"a rank sends {length} bytes where 1 to {limit} are taken")
    return length
