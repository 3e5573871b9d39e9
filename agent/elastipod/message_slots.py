"""Messages of any length in collectives of equal sizes: a slot of fixed size first, which most fit into, then the rest of longer ones."""

from __future__ import annotations

SLOT_BYTES = 1024
_HEAD = 8  # bytes of a slot with the length of the message
BODY_BYTES = SLOT_BYTES - _HEAD


def slot_of(message: bytes) -> bytearray:
    """Give the slot of a message: its length, and as much of it as there is room for."""
    return bytearray((len(message).to_bytes(_HEAD, "little") + message[:BODY_BYTES]).ljust(SLOT_BYTES, b"\0"))


def parse_slot(slot: bytes | bytearray) -> tuple[bytes, int]:
    """Give the beginning of a message, and the number of bytes that follow it, at most 0 where none do."""
    length = int.from_bytes(slot[:_HEAD], "little")
    return bytes(slot[_HEAD : _HEAD + length]), length - BODY_BYTES
