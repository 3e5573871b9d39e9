"""Lines on their way to the console: prefixes, files, tails, and a console that nobody reads."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastipod_agent.workers.output import TAIL_BYTES, OutputPump, Stream


@pytest.fixture
def pump() -> Iterator[OutputPump]:
    pump = OutputPump()
    pump.start()
    yield pump
    pump.close()


@given(st.lists(st.binary(max_size=20)))
def test_whatever_the_chunks_every_line_comes_once_behind_its_prefix(chunks: list[bytes]) -> None:
    stream = Stream(source=-1, prefix=b"[default0]:", console=1)
    shown = b"".join([*(stream.take(chunk) for chunk in chunks), stream.finish()])
    whole = b"".join(chunks)
    lines = whole.split(b"\n")
    expected = lines if lines[-1] else lines[:-1]
    if expected and whole.endswith(b"\r"):
        expected[-1] = expected[-1][:-1]  # the carriage return of an unfinished last line is its end
    assert shown == b"".join(b"[default0]:" + line + b"\n" for line in expected)
    assert stream.tail == whole[-TAIL_BYTES:]


def test_a_progress_bar_that_never_ends_its_line_is_shown_in_pieces() -> None:
    stream = Stream(source=-1, prefix=b">", console=1)
    shown = stream.take(b"".join(b"\r%5d%%" % n for n in range(3000)))
    assert shown.endswith(b" 2998%\n")


def test_a_stream_goes_to_the_console_and_to_a_file(pump: OutputPump, tmp_path: Path) -> None:
    source, sink = os.pipe()
    shown_r, shown_w = os.pipe()
    stream = Stream(source, b"[a0]:", shown_w, open(tmp_path / "log", "wb", buffering=0))  # noqa: SIM115 the stream closes it
    pump.add(stream)
    os.write(sink, b"one\ntwo\nthr")
    pump.catch_up([stream]).result(5)
    assert os.read(shown_r, 100) == b"[a0]:one\n[a0]:two\n"
    os.write(sink, b"ee")
    os.close(sink)
    assert os.read(shown_r, 100) == b"[a0]:three\n"
    pump.catch_up([stream]).result(5)
    assert (tmp_path / "log").read_bytes() == b"one\ntwo\nthree"
    os.close(shown_r)
    os.close(shown_w)


def test_catching_up_after_the_end_is_quick_and_the_tail_is_whole(pump: OutputPump) -> None:
    source, sink = os.pipe()
    stream = Stream(source, b"", None)
    pump.add(stream)
    for number in range(2000):
        os.write(sink, b"line %d\n" % number)
    os.close(sink)
    pump.catch_up([stream]).result(5)
    pump.catch_up([stream]).result(5)
    assert stream.tail.endswith(b"line 1999\n")
    assert len(stream.tail) <= TAIL_BYTES


def test_a_console_that_is_gone_stops_nothing(pump: OutputPump) -> None:
    shown_r, shown_w = os.pipe()
    os.close(shown_r)
    source, sink = os.pipe()
    stream = Stream(source, b"", shown_w)
    pump.add(stream)
    for _ in range(3):
        os.write(sink, b"nobody reads this\n")
        pump.catch_up([stream]).result(5)
    os.close(sink)
    pump.catch_up([stream]).result(5)
    os.close(shown_w)
    assert stream.tail.count(b"nobody") == 3


def test_closing_carries_what_is_there_although_writers_live() -> None:
    pump = OutputPump()
    pump.start()
    source, sink = os.pipe()
    file = io.FileIO(os.dup(sink), "wb")
    stream = Stream(source, b"", None)
    pump.add(stream)
    os.write(sink, b"last words")
    pump.close()
    assert stream.tail == b"last words"
    file.close()
    os.close(sink)
