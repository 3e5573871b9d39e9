"""Lines on their way to the console: prefixes, files, tails, and a console that nobody reads."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.agent_client import until
from tests.nonempty import every
from tests.patience import PATIENCE_S

from elastipod_agent.log_settings import parse_filters
from elastipod_agent.workers.log_file import FilteredCopy, LogFile
from elastipod_agent.workers.output_pump import TAIL_BYTES, OutputPump, OutputStream, pipe_bytes
from elastipod_agent.workers.worker_output import LineSplitter


@pytest.fixture
def pump() -> Iterator[OutputPump]:
    pump = OutputPump()
    pump.start()
    yield pump
    pump.close()


@given(st.lists(st.binary(max_size=20)))
def test_whatever_the_chunks_every_line_comes_once_behind_its_prefix(chunks: list[bytes]) -> None:
    stream = OutputStream(source=-1, prefix=b"[default0]:", console=1)
    shown = b"".join([*(stream.take(chunk) for chunk in chunks), stream.finish()])
    whole = b"".join(chunks)
    lines = whole.split(b"\n")
    expected = lines if lines[-1] else lines[:-1]
    if expected and whole.endswith(b"\r"):
        expected[-1] = expected[-1][:-1]  # the carriage return of an unfinished last line is its end
    assert shown == b"".join(b"[default0]:" + line + b"\n" for line in expected)
    assert stream.tail == whole[-TAIL_BYTES:]


def test_a_progress_bar_that_never_ends_its_line_is_shown_in_pieces() -> None:
    stream = OutputStream(source=-1, prefix=b">", console=1)
    shown = stream.take(b"".join(b"\r%5d%%" % n for n in range(3000)))
    assert shown.endswith(b" 2998%\n")


def test_a_stream_goes_to_the_console_and_to_a_file(pump: OutputPump, tmp_path: Path) -> None:
    source, sink = os.pipe()
    shown_r, shown_w = os.pipe()
    stream = OutputStream(source, b"[a0]:", shown_w, LogFile(tmp_path / "log"))
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
    stream = OutputStream(source, b"", None)
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
    stream = OutputStream(source, b"", shown_w)
    pump.add(stream)
    for _ in range(3):
        os.write(sink, b"nobody reads this\n")
        pump.catch_up([stream]).result(5)
    os.close(sink)
    pump.catch_up([stream]).result(5)
    os.close(shown_w)
    assert stream.tail.count(b"nobody") == 3


def test_a_console_that_refuses_lines_for_a_moment_gets_the_later_ones_and_is_told(pump: OutputPump) -> None:
    """As a file on a disk that was full."""
    shown_r, shown_w = os.pipe()
    console = os.open("/dev/full", os.O_WRONLY)
    source, sink = os.pipe()
    stream = OutputStream(source, b">", console)
    pump.add(stream)
    for text in (b"lost\n", b"lost too\n"):
        os.write(sink, text)
        pump.catch_up([stream]).result(PATIENCE_S)
    os.dup2(shown_w, console)
    for text in (b"one\n", b"two\n"):
        os.write(sink, text)
        pump.catch_up([stream]).result(PATIENCE_S)
    os.close(sink)
    pump.catch_up([stream]).result(PATIENCE_S)
    told = b"\nhyperpodrun: lines are missing here: No space left on device\n"
    assert os.read(shown_r, 1000) == told + b">one\n>two\n"
    for each in (shown_r, shown_w, console):
        os.close(each)


def test_closing_carries_what_is_there_although_writers_live() -> None:
    pump = OutputPump()
    pump.start()
    source, sink = os.pipe()
    file = io.FileIO(os.dup(sink), "wb")
    stream = OutputStream(source, b"", None)
    pump.add(stream)
    os.write(sink, b"last words")
    pump.close()
    assert stream.tail == b"last words"
    file.close()
    os.close(sink)


@given(st.lists(st.binary(max_size=20)))
def test_taps_get_whole_lines_whatever_the_chunks(chunks: list[bytes]) -> None:
    given_lines: list[bytes] = []
    lines = LineSplitter(given_lines.append)
    for chunk in [*chunks, b"\n"]:
        lines.take(chunk)
    assert b"".join(given_lines) == b"".join(chunks) + b"\n"
    assert every(part.endswith((b"\n", b"\r")) for part in given_lines)


def test_taps_get_a_line_without_end_in_pieces() -> None:
    given_lines: list[bytes] = []
    lines = LineSplitter(given_lines.append)
    for _ in range(100):
        lines.take(b"x" * 1000)
    assert sum(map(len, given_lines)) > 90_000


def test_a_tap_hears_the_unfinished_last_line_too() -> None:
    given_lines: list[bytes] = []
    stream = OutputStream(-1, b"", None, tap=LineSplitter(given_lines.append).take)
    stream.take(b"one\ntwo")
    stream.finish()
    assert given_lines == [b"one\n", b"two\n"]


def test_a_full_disk_is_told_once_and_costs_the_console_nothing() -> None:
    stream = OutputStream(-1, b">", 1, LogFile(Path("/dev/full")))
    assert stream.take(b"one\n") + stream.take(b"two\n") + stream.finish() == b">one\n>two\n"
    assert stream.errors == ["/dev/full lacks lines from now on: No space left on device"]


def _of_a_stream(pump: OutputPump, text: bytes, **parts: Any) -> OutputStream:
    """Give a stream with these parts that carries a text and is not shown."""
    source, sink = os.pipe()
    stream = OutputStream(source, b"", None, **parts)
    pump.add(stream)
    os.write(sink, text)
    os.close(sink)
    pump.catch_up([stream]).result(PATIENCE_S)
    return stream


def test_a_file_that_cannot_be_closed_is_told_and_stops_nothing(
    pump: OutputPump, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """NFS tells of a full disk when the file is closed."""
    file = LogFile(tmp_path / "log")
    close = os.close

    def refuse(number: int) -> None:
        close(number)
        if number == file._fd:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(os, "close", refuse)
    _of_a_stream(pump, b"text", file=file)
    assert _of_a_stream(pump, b"of the next worker").tail == b"of the next worker"
    pump.catch_up().result(PATIENCE_S)
    assert f"{tmp_path / 'log'} lacks lines: Disk quota exceeded" in capfd.readouterr().err


def test_an_error_in_one_stream_costs_its_copies_and_no_other_stream(
    pump: OutputPump, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(_: bytes) -> None:
        raise ValueError("of the tap")

    source, sink = os.pipe()
    stream = OutputStream(source, b"", None, LogFile(tmp_path / "log"), tap=fail)
    pump.add(stream)
    for text in (b"one ", b"two"):
        os.write(sink, text)
        pump.catch_up([stream]).result(PATIENCE_S)
    assert stream.tail == b"one two"
    os.close(sink)
    assert _of_a_stream(pump, b"of another").tail == b"of another"
    pump.catch_up().result(PATIENCE_S)
    assert capfd.readouterr().err.count("of the tap") == 1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(source)


def test_a_stream_that_cannot_be_read_is_given_up(capfd: pytest.CaptureFixture[str]) -> None:
    pump = OutputPump()
    source = os.eventfd(0)  # its size cannot be asked
    pump.add(OutputStream(source, b"", None))
    pump._handle_requests()
    (stream,) = pump._carried()
    pump._read_all(stream)
    assert pump._carried() == [stream]
    pump._read_all(stream)
    assert pump._carried() == []
    assert "an output stream of a process is not read any more: OSError" in capfd.readouterr().err


def test_tails_are_read_before_a_slow_console_gets_anything() -> None:
    pump = OutputPump()
    shown_r, shown_w = os.pipe()
    os.set_blocking(shown_w, False)
    with suppress(BlockingIOError):
        while True:
            os.write(shown_w, bytes(4096))  # nobody reads it
    streams = []
    for text in (b"first\n", b"Traceback\n"):
        source, sink = os.pipe()
        streams.append(OutputStream(source, b"", shown_w))
        pump.add(streams[-1])
        os.write(sink, text)
        os.close(sink)
    done = pump.catch_up(streams)
    pump.start()
    until(lambda: streams[-1].tail == b"Traceback\n", "the tail")
    assert not done.done(), "the console has not taken anything"
    os.close(shown_r)
    done.result(PATIENCE_S)
    pump.close()
    os.close(shown_w)


@pytest.mark.parametrize(
    ("num_workers", "kib"), [(1, 1024), (4, 1024), (5, 512), (8, 512), (16, 256), (64, 64), (1000, 64)]
)
def test_the_pipes_of_many_workers_are_smaller(num_workers: int, kib: int) -> None:
    """A user without privileges may have 64 MiB of pipes on a node, over all of its pods."""
    assert pipe_bytes(num_workers) == kib * 1024


def test_filtered_copies_of_several_streams_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "filtered_stdout.log"
    copies = [FilteredCopy(LogFile(path, is_new=False), ["loss", "größe"]) for _ in range(2)]
    first, second = (OutputStream(-1, b"[%d]:" % rank, 1, filtered=copies[rank]) for rank in range(2))
    first.take(b"loss 1\nnoise\nlo")
    second.take("größe 2\n".encode())
    first.take(b"ss 3\nrest of loss")
    first.finish()
    second.finish()
    assert path.read_text("utf-8") == "[0]:loss 1\n[1]:größe 2\n[0]:loss 3\n[0]:rest of loss\n"


def test_a_line_of_the_agents_own_comes_after_what_was_printed_before_it(capfd: pytest.CaptureFixture[str]) -> None:
    pump = OutputPump()
    pump.start()
    source, sink = os.pipe()
    pump.add(OutputStream(source, b">", 2))
    for number in range(50):
        os.write(sink, b"worker %d\n" % number)
        pump.print_line(f"agent {number}")
    os.close(sink)
    pump.close()
    expected = [line for number in range(50) for line in (f">worker {number}", f"agent {number}")]
    said = capfd.readouterr().err.splitlines()
    assert sorted(said) == sorted(expected)
    assert all(said.index(f">worker {n}") < said.index(f"agent {n}") for n in range(50))


def test_every_byte_of_a_writer_at_full_speed_is_read(pump: OutputPump) -> None:
    source, sink = os.pipe()
    stream = OutputStream(source, b"", None)
    pump.add(stream)
    data = b"x" * 99 + b"\n"
    for _ in range(300):
        os.write(sink, data * 1000)
    os.close(sink)
    pump.catch_up([stream]).result(5)
    assert pump.bytes_read == 30_000_000


@pytest.mark.parametrize(
    ("text", "filters"),
    [("", ()), ("apple", ("apple",)), ("apple,orange", ("apple", "orange")), ("a,,b,c", ("a,b", "c")), (",x,", ("x",))],
)
def test_filters_are_written_as_torchrun_has_them(text: str, filters: tuple[str, ...]) -> None:
    assert parse_filters(text) == filters
