"""What passes between a worker and the agent that serves its store: proofs of the key, and frames that cannot be made up or moved."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastipod.store_wire import (
    HEAD_BYTES,
    MAX_PARTS,
    Greeting,
    SealedSession,
    WireError,
    content_and_mac,
    fields_of,
    pack,
    rest_of_frame,
    unpack,
)

GREETING = Greeting(7, 1, "ab" * 16)


def sides(key: str = "k", agents_key: str = "k", told: Greeting = GREETING) -> tuple[SealedSession, SealedSession]:
    """Give both sides of a connection: the worker's, and that of an agent which was told something."""
    return (
        SealedSession(key, GREETING, "cd" * 16, is_agent=False),
        SealedSession(agents_key, told, "cd" * 16, is_agent=True),
    )


def opened(side: SealedSession, frame: bytes) -> list[bytes]:
    assert len(frame) == HEAD_BYTES + rest_of_frame(frame[:HEAD_BYTES], 1000)
    return side.open(*content_and_mac(frame[HEAD_BYTES:]))


def test_frames_are_opened_in_their_order_in_both_directions() -> None:
    worker, agent = sides()
    assert worker.agent_proof == agent.agent_proof
    for parts in ([], [b"1", b"set", b"key", b""], [b""]):
        assert opened(agent, worker.seal(parts)) == parts
        assert opened(worker, agent.seal(parts)) == parts


@pytest.mark.parametrize(
    ("key", "told"),
    [
        pytest.param("other", GREETING, id="another key"),
        pytest.param("k", Greeting(8, 1, "ab" * 16), id="another generation"),
        pytest.param("k", Greeting(7, 2, "ab" * 16), id="another rank"),
        pytest.param("k", Greeting(7, 1, "ac" * 16), id="another connection"),
    ],
)
def test_sides_that_do_not_mean_the_same_do_not_understand_each_other(key: str, told: Greeting) -> None:
    worker, agent = sides(agents_key=key, told=told)
    assert worker.agent_proof != agent.agent_proof
    with pytest.raises(WireError, match="does not have the MAC of the key"):
        opened(agent, worker.seal([b"1"]))
    with pytest.raises(WireError, match="does not have the MAC of the key"):
        opened(worker, agent.seal([b"1"]))


def flipped(frame: bytes, at: int) -> bytes:
    return frame[:at] + bytes([frame[at] ^ 1]) + frame[at + 1 :]


@pytest.mark.parametrize(
    "forge",
    [
        pytest.param(lambda first, second, own: flipped(first, HEAD_BYTES), id="changed"),
        pytest.param(lambda first, second, own: flipped(first, len(first) - 1), id="with another MAC"),
        pytest.param(lambda first, second, own: second, id="too early"),
        pytest.param(lambda first, second, own: own, id="sent back to who has sent it"),
    ],
)
def test_a_frame_is_refused(forge: Callable[[bytes, bytes, bytes], bytes]) -> None:
    worker, agent = sides()
    frame = forge(worker.seal([b"a"]), worker.seal([b"a"]), agent.seal([b"a"]))
    with pytest.raises(WireError, match="does not have the MAC of the key"):
        opened(agent, frame)


def test_a_frame_is_taken_once() -> None:
    worker, agent = sides()
    frame = worker.seal([b"a"])
    opened(agent, frame)
    with pytest.raises(WireError, match="or is not the next one"):
        opened(agent, frame)


def test_a_frame_of_more_than_the_limit_is_refused_by_its_head_alone() -> None:
    worker, _ = sides()
    frame = worker.seal([b"x" * 100])
    assert rest_of_frame(frame[:HEAD_BYTES], 104) == len(frame) - HEAD_BYTES
    with pytest.raises(WireError, match=r"^a frame has 104 bytes; at most 103 are taken$"):
        rest_of_frame(frame[:HEAD_BYTES], 103)


@given(st.lists(st.binary(max_size=20), max_size=10))
def test_parts_are_what_they_were(parts: list[bytes]) -> None:
    assert unpack(pack(parts)) == parts


@given(st.binary(max_size=30))
def test_any_bytes_are_parts_or_refused(content: bytes) -> None:
    try:
        assert pack(unpack(content)) == content
    except WireError:
        return


def test_a_frame_has_a_limited_number_of_parts() -> None:
    assert len(unpack(pack([b""] * MAX_PARTS))) == MAX_PARTS
    with pytest.raises(WireError, match="too many"):
        unpack(pack([b""] * (MAX_PARTS + 1)))


@pytest.mark.parametrize("greeting", [GREETING, Greeting(255, -1)], ids=["a rank", "a newcomer"])
def test_a_greeting_is_read_as_it_was_written(greeting: Greeting) -> None:
    assert Greeting.parse(greeting.header()) == greeting


def test_each_greeting_has_a_challenge_of_its_own() -> None:
    assert Greeting(1, 0).challenge != Greeting(1, 0).challenge
    assert len(bytes.fromhex(Greeting(1, 0).challenge)) == 16


@pytest.mark.parametrize(
    "text",
    [
        *("", "generation=1, rank=0", "generation=x, rank=0, challenge=" + "ab" * 16),
        *("generation=1, rank=a, challenge=" + "ab" * 16, "generation=1, rank=0, challenge=ab"),
        "generation=1, rank=-2, challenge=" + "ab" * 16,
    ],
)
def test_a_greeting_that_cannot_be_used_is_refused(text: str) -> None:
    with pytest.raises(WireError, match="Elastipod-Store"):
        Greeting.parse(text)


def test_other_fields_of_a_header_are_ignored() -> None:
    assert fields_of("a=1, b=zz, c, d=-2,e=f") == {"a": "1", "d": "-2", "e": "f"}
