"""The worker file: its layout byte by byte, and that readers and writers never disturb each other."""

from __future__ import annotations

import math
import struct
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.nonempty import every

from elastipod.worker_file import EventLevel, Progress, WorkerFile, WorkerFileError

HEADER = struct.Struct("<4sIIIdI")
SLOT = struct.Struct("<IIQQddIIdI")


def test_the_layout_is_the_documented_one(tmp_path: Path) -> None:
    path = tmp_path / "page"
    with WorkerFile.create(path, 2) as page:
        page.set_event(EventLevel.DRAIN, 123.5, leaves=True, steady_deadline=67.25)
        page.acknowledge(1)
        page.set_in_checkpoint(1, True)
        page.report(1, step=3, samples=96, loss=0.25, samples_per_s=8.0, world_size=4, time=1000.0, total_steps=500)
    data = path.read_bytes()
    assert len(data) == 64 * 3
    assert HEADER.unpack_from(data) == (b"ELPW", 1, 2, 1, 123.5, 2)
    assert struct.unpack_from("<Qd", data, 32) == (500, 67.25)
    assert SLOT.unpack_from(data, 64) == (0,) * 10
    assert SLOT.unpack_from(data, 128) == (1, 2, 3, 96, 0.25, 8.0, 4, 0, 1000.0, 1)
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_one_side_writes_the_other_reads(tmp_path: Path) -> None:
    with WorkerFile.create(tmp_path / "page", 2) as agent, WorkerFile.open(tmp_path / "page") as worker:
        assert worker.local_ranks == 2
        assert worker.event() == (EventLevel.NONE, 0.0)
        assert agent.progress(0) is None
        assert worker.leaves() is None
        agent.set_event(EventLevel.DRAIN, 5.0, leaves=False, steady_deadline=3.0)
        assert (worker.leaves(), worker.steady_deadline()) == (False, 3.0)
        worker.set_in_checkpoint(1, True)
        assert (agent.is_in_checkpoint(0), agent.is_in_checkpoint(1)) == (False, True)
        worker.set_in_checkpoint(1, False)
        assert not agent.is_in_checkpoint(1)
        assert worker.event() == (EventLevel.DRAIN, 5.0)
        worker.acknowledge(0)
        assert (agent.acknowledged(0), agent.acknowledged(1)) == (True, False)
        worker.report(0, step=1)
        seen = agent.progress(0)
        assert seen is not None
        assert (seen.step, seen.loss, seen.samples_per_s, seen.total_steps) == (1, None, None, None)
        assert seen.time > 0
        worker.report(1, step=1, total_steps=7)
        worker.report(0, step=2)
        assert (seen := agent.progress(0)) is not None
        assert (seen.step, seen.total_steps) == (2, 7), "it is the job's, whichever worker said it, and stays"
        with pytest.raises(ValueError, match="format"):
            worker.report(0, step=3, total_steps=-1)
        assert (seen := agent.progress(0)) is not None
        assert seen.step == 2, "a report that cannot be made hides none"


numbers = st.floats(allow_nan=False, width=64)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rank=st.integers(0, 7),
    step=st.integers(0, 2**64 - 1),
    samples=st.integers(0, 2**64 - 1),
    loss=st.none() | numbers,
    rate=st.none() | numbers,
    world=st.integers(0, 2**32 - 1),
    time=numbers,
)
def test_every_report_comes_back_as_it_was_given(
    tmp_path: Path, rank: int, step: int, samples: int, loss: float | None, rate: float | None, world: int, time: float
) -> None:
    (tmp_path / "page").unlink(missing_ok=True)
    with WorkerFile.create(tmp_path / "page", 8) as page:
        page.report(rank, step=step, samples=samples, loss=loss, samples_per_s=rate, world_size=world, time=time)
        assert page.progress(rank) == Progress(step, samples, loss, rate, world, time)
        assert all(page.progress(other) is None for other in range(8) if other != rank)


def test_who_asks_for_events_is_known_until_its_process_is_another_one(tmp_path: Path) -> None:
    with WorkerFile.create(tmp_path / "file", 2) as page, WorkerFile.open(tmp_path / "file") as worker:
        assert not page.checks_events(1)
        worker.set_checks_events(1)
        assert (page.checks_events(0), page.checks_events(1)) == (False, True)
        page.reset_run()
        assert page.checks_events(1), "the same process asks in its next run, too"
        page.set_checks_events(1, checks=False)
        assert not worker.checks_events(1)


def test_no_loss_and_a_loss_that_is_no_number_are_the_same(tmp_path: Path) -> None:
    with WorkerFile.create(tmp_path / "page", 1) as page:
        page.report(0, step=1, loss=math.nan)
        seen = page.progress(0)
    assert seen is not None
    assert seen.loss is None


def test_a_reader_never_mixes_two_reports(tmp_path: Path) -> None:
    with WorkerFile.create(tmp_path / "page", 1) as page:
        stop = threading.Event()

        def write() -> None:
            step = 0
            while not stop.is_set():
                step += 1
                page.report(0, step=step, samples=step * 2, time=float(step))

        writer = threading.Thread(target=write)
        writer.start()
        try:
            seen = [found for _ in range(3000) if (found := page.progress(0)) is not None]
        finally:
            stop.set()
            writer.join()
    assert seen
    assert every(one.samples == 2 * one.step == 2 * one.time for one in seen)


def test_a_writer_that_died_half_way_hides_its_report_until_the_next(tmp_path: Path) -> None:
    with WorkerFile.create(tmp_path / "page", 1) as page:
        page.report(0, step=1)
        with open(tmp_path / "page", "r+b") as file:
            file.seek(64 + 4)
            file.write((3).to_bytes(4, "little"))
        assert (page.progress(0), page.num_reports(0)) == (None, 1), "only whole ones count"
        page.report(0, step=2)
        assert page.num_reports(0) == 2
        seen = page.progress(0)
    assert seen is not None
    assert seen.step == 2


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    with pytest.raises(WorkerFileError, match="cannot open worker file"):
        WorkerFile.open(bad)
    for content, words in (
        (b"x", "is not a worker file: 1 bytes"),
        (bytes(128), "does not begin with ELPW"),
        (HEADER.pack(b"ELPW", 2, 1, 0, 0.0, 0).ljust(128, b"\0"), "has layout 2, this library reads layout 1"),
        (HEADER.pack(b"ELPW", 1, 5, 0, 0.0, 0).ljust(128, b"\0"), "says 5 local ranks but holds 128 bytes"),
    ):
        bad.write_bytes(content)
        with pytest.raises(WorkerFileError, match=words):
            WorkerFile.open(bad)


def test_ranks_and_counts_outside_the_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkerFileError, match="local_ranks is 0"):
        WorkerFile.create(tmp_path / "none", 0)
    with WorkerFile.create(tmp_path / "page", 2) as page:
        for rank in (-1, 2):
            with pytest.raises(WorkerFileError, match=f"local rank {rank} is outside"):
                page.acknowledge(rank)
    with pytest.raises(FileExistsError):
        WorkerFile.create(tmp_path / "page", 2)
