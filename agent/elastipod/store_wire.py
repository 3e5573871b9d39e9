"""How a worker and the agent that serves the store of its generation speak (docs/design/contracts.md, 13). Standard library only.

One TCP connection to the agent's port, opened by an upgrade of HTTP. The first headers carry a challenge of each side. A key for this
connection follows from both, the generation, the rank and the key that workers of a job share, so a peer that sends a valid frame has
the latter. Every frame has a MAC over its content and its number, so none can be made up, repeated, left out or moved. Nothing is
pickled.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

PATH: Final = "/store"
UPGRADE: Final = "elastipod-store"
HEADER: Final = "Elastipod-Store"
NEWCOMER: Final = -1  # the rank of a worker that is of no generation yet and asks whom it can follow

MAX_VALUE_BYTES: Final = 64 * 1024
MAX_KEY_BYTES: Final = 1024
MAX_PARTS: Final = 1024  # of one frame
MAX_REQUEST_BYTES: Final = 1024 * 1024
MAX_ANSWER_BYTES: Final = 64 * 1024 * 1024
MAX_GREETING_BYTES: Final = 256  # of a frame from somebody who has proven nothing yet
MAX_WAIT_S: Final = 60.0  # of one call; who waits longer calls again
HANDSHAKE_S: Final = 5.0

_LENGTH = struct.Struct("!I")
_COUNTER = struct.Struct("!Q")
_MAC_BYTES = 32
_FIELD = re.compile(r"([a-z]+)=(-?[0-9a-f]{1,64})")


class AnswerKind(bytes, Enum):
    """The first part of an answer."""

    OK = b"ok"
    LATE = b"late"  # what was waited for has not come in the time of this call
    REFUSED = b"refused"  # a sentence follows; the connection stays
    OVER = b"over"  # a sentence follows; the connection ends. Not an answer to a call


class WireError(Exception):
    """The peer does not keep to the protocol, or does not have the key; the connection ends. The text is one sentence."""


@dataclass(frozen=True, slots=True)
class Greeting:
    """What a worker says first. generation: that it belongs to. rank: global, or NEWCOMER."""

    generation: int
    rank: int
    challenge: str = field(default_factory=lambda: secrets.token_hex(16))

    def header(self) -> str:
        """Give the value of the header."""
        return f"generation={self.generation:x}, rank={self.rank}, challenge={self.challenge}"

    @classmethod
    def parse(cls, text: str) -> Greeting:
        """Read the value of the header. Raises WireError."""
        told = fields_of(text)
        try:
            greeting = cls(int(told["generation"], 16), int(told["rank"]), told["challenge"])
        except (KeyError, ValueError) as error:
            raise WireError(f"the header {HEADER} must name generation, rank and challenge") from error
        if len(greeting.challenge) < 32 or greeting.rank < NEWCOMER:
            raise WireError(f"the header {HEADER} has a challenge of less than 16 bytes, or a rank that nobody has")
        return greeting


def fields_of(text: str) -> Mapping[str, str]:
    """Parse `name=hex` pairs; anything else is ignored."""
    found = (_FIELD.fullmatch(part.strip()) for part in text.split(","))
    return {match[1]: match[2] for match in found if match}


class SealedSession:
    """What both sides of one connection compute from their greetings, and the seals of each direction."""

    def __init__(self, key: str, greeting: Greeting, challenge: str, *, is_agent: bool) -> None:
        """challenge: the agent's."""
        told = f"elastipod-store-v1\n{greeting.generation}\n{greeting.rank}\n{greeting.challenge}\n{challenge}"
        self._key = hmac.digest(key.encode(), told.encode(), "sha256")
        self.agent_proof = hmac.new(self._key, b"agent", hashlib.sha256).hexdigest()
        own, other = (b"a", b"w") if is_agent else (b"w", b"a")
        self._out, self._in = _Seal(self._key, own), _Seal(self._key, other)

    def seal(self, parts: Sequence[bytes]) -> bytes:
        """Give the next frame to send. From one thread at a time, and to be sent in this order."""
        content = pack(parts)
        return _LENGTH.pack(len(content)) + content + self._out.next(content)

    def open(self, content: bytes, mac: bytes) -> list[bytes]:
        """Give the parts of the next frame that came. Raises WireError."""
        if not hmac.compare_digest(mac, self._in.next(content)):
            raise WireError("a frame does not have the MAC of the key of this job, or is not the next one")
        return unpack(content)


class _Seal:
    def __init__(self, key: bytes, direction: bytes) -> None:
        self._key, self._direction, self._number = key, direction, 0

    def next(self, content: bytes) -> bytes:
        number, self._number = self._number, self._number + 1
        return hmac.digest(self._key, self._direction + _COUNTER.pack(number) + content, "sha256")


HEAD_BYTES: Final = _LENGTH.size


def rest_of_frame(head: bytes, limit: int) -> int:
    """Give how many bytes follow the first HEAD_BYTES of a frame. Raises WireError when its content is larger than the limit."""
    (size,) = _LENGTH.unpack(head)
    if size > limit:
        raise WireError(f"a frame has {size} bytes; at most {limit} are taken")
    return int(size) + _MAC_BYTES


def content_and_mac(rest: bytes) -> tuple[bytes, bytes]:
    """Divide what follows the head of a frame."""
    return rest[:-_MAC_BYTES], rest[-_MAC_BYTES:]


def pack(parts: Sequence[bytes]) -> bytes:
    """Give byte strings as one."""
    return b"".join(piece for part in parts for piece in (_LENGTH.pack(len(part)), part))


def unpack(content: bytes) -> list[bytes]:
    """Give the byte strings. Raises WireError."""
    parts: list[bytes] = []
    at = 0
    while at < len(content):
        if at + _LENGTH.size > len(content) or len(parts) >= MAX_PARTS:
            raise WireError("a frame ends within a part, or has too many")
        (size,) = _LENGTH.unpack_from(content, at)
        at += _LENGTH.size
        if at + size > len(content):
            raise WireError("a frame ends within a part")
        parts.append(content[at : at + size])
        at += size
    return parts


def number(value: int | float) -> bytes:
    """Give a number as it stands in a frame."""
    return repr(value).encode()
