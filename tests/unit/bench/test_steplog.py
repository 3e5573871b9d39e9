"""What is read from the logs of training processes."""

from __future__ import annotations

import math
from pathlib import Path

from bench.launchers import steplog, train, train_in_memory
from bench.launchers.steplog import Restart, Step, Worker


def worker(rank: int, world_size: int, began: float, *steps: tuple[float, int], name: str = "0") -> Worker:
    made = [Step(at, number) for at, number in steps]
    return Worker(name, began=began, rank=rank, world_size=world_size, steps=made)


def test_a_log_is_read_up_to_its_last_whole_line(tmp_path: Path) -> None:
    text = "begin 10.5 1\nimported 11.0\ngrouped 11.5 3 4\nstep 12.0 21 3 4\nstep 12.1 22 3 4\nstep 12.2 2"
    (tmp_path / "77.log").write_text(text)
    (tmp_path / "node-0.log").write_text("not a worker's")
    (read,) = steplog.read(tmp_path)
    assert (read.pid, read.began, read.imported, read.grouped) == (77, 10.5, 11.0, 11.5)
    assert (read.is_warm, read.rank, read.world_size) == (True, 3, 4)
    assert read.steps == [Step(12.0, 21), Step(12.1, 22)]


def test_past_processes_are_left_out(tmp_path: Path) -> None:
    for name in ("1", "2", "3"):
        (tmp_path / f"{name}.log").write_text("begin 1.0 0\n")
    assert [one.pid for one in steplog.read(tmp_path, but={"2"})] == [1, 3]


def test_a_process_that_outlives_a_world_has_a_log_for_each(tmp_path: Path) -> None:
    for name in ("7-1", "7-2"):
        (tmp_path / f"{name}.log").write_text("begin 1.0 1\n")
    (left,) = steplog.read(tmp_path, but={"7-1"})
    assert (left.name, left.pid) == ("7-2", 7)


def test_a_world_is_complete_once_every_rank_has_made_a_step() -> None:
    half = [worker(0, 2, 5.0, (6.0, 1)), worker(1, 2, 5.0)]
    assert steplog.complete_world(half, 2, since=4.0) is None
    whole = [*half, worker(1, 2, 5.5, (6.5, 1))]
    found = steplog.complete_world(whole, 2, since=4.0)
    assert found is not None
    assert [(one.rank, one.began) for one in found] == [(0, 5.0), (1, 5.5)]


def test_other_sizes_and_what_began_before_do_not_count() -> None:
    workers = [worker(0, 2, 3.0, (3.5, 1)), worker(1, 2, 5.0, (6.0, 1)), worker(0, 3, 5.0, (6.0, 1))]
    assert steplog.complete_world(workers, 2, since=4.0) is None


def test_a_second_try_of_a_rank_replaces_its_first() -> None:
    workers = [worker(0, 1, 6.0, (7.0, 2)), worker(0, 1, 5.0, (5.5, 1))]
    assert steplog.complete_world(workers, 1, since=4.0) == [workers[0]]


def test_a_gap_runs_from_the_last_rank_of_the_old_to_the_slowest_of_the_new() -> None:
    old = [worker(0, 2, 0.0, (9.0, 40), (10.0, 41)), worker(1, 2, 0.0, (9.1, 40), (10.2, 41))]
    new = [worker(0, 2, 11.0, (12.0, 42), (12.1, 43)), worker(1, 2, 11.0, (12.5, 42))]
    assert steplog.restart(old, new) == Restart(last_old=10.2, first_new=12.5, repeated=0)
    assert round(steplog.restart(old, new).gap_s, 6) == 2.3


def test_steps_that_are_made_again_are_counted() -> None:
    old = [worker(0, 2, 0.0, (10.0, 47)), worker(1, 2, 0.0, (10.0, 46))]
    assert steplog.restart(old, [worker(0, 1, 11.0, (12.0, 41))]).repeated == 7


def test_a_usual_step_is_not_the_first_one_of_a_world() -> None:
    world = [
        worker(0, 2, 0.0, (1.0, 1), (9.0, 2), (10.0, 3), (11.0, 4)),
        worker(1, 2, 0.0, (1.0, 1), (9.0, 2), (12.0, 3)),
    ]
    assert steplog.usual_step(world) == 1.0
    assert steplog.usual_step(world, since=9.5) == 1.0
    assert math.isnan(steplog.usual_step(world, since=10.5)), "no whole step"


def test_both_scripts_train_alike() -> None:
    for name in ("STEP_S", "CHECKPOINT_EVERY", "LAST_STEP"):
        assert getattr(train, name) == getattr(train_in_memory, name)
