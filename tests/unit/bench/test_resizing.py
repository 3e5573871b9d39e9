"""What has to travel in a resize, and the rows of bytes."""

from __future__ import annotations

import pytest
from bench import resize
from bench.common.processes import Failed
from bench.common.report import Reach
from bench.common.samples import Samples
from bench.launchers.resizing import GROW, SHRINK, least_bytes, moved

HALVES = {7: {"w": (0, 50), "step": (0, 4)}, 8: {"w": (50, 100), "step": (0, 4)}}
QUARTERS = {pid: {"w": (25 * at, 25 * at + 25), "step": (0, 4)} for at, pid in enumerate((7, 8, 9, 10))}


def test_in_growth_newcomers_lack_all_of_their_part_and_others_what_lies_elsewhere() -> None:
    assert least_bytes(HALVES, QUARTERS) == 25 + 2 * (25 + 4), "process 7 has its quarter, and 8 has another one"


def test_in_a_shrink_what_only_leavers_have_must_travel() -> None:
    assert least_bytes(QUARTERS, HALVES) == 25 + 50, "process 7 has its first quarter, and 8 nothing of its half"


def test_nothing_travels_where_nothing_changes() -> None:
    assert least_bytes(HALVES, HALVES) == 0


def test_a_tensor_that_is_new_is_lacking() -> None:
    assert least_bytes({7: {}}, {7: {"w": (10, 20)}}) == 10


def test_less_than_what_was_lacking_is_a_failure() -> None:
    assert moved(120, 100) == 1.2
    with pytest.raises(Failed, match="99 bytes were sent where 100 were lacking"):
        moved(99, 100)


def test_bytes_of_shards_are_judged_by_the_worst_run() -> None:
    samples = Samples(repeat=2)
    for share in (1.0, 1.3):
        samples.add(resize.MOVED, f"{GROW}, moved", share)
        samples.add(resize.MOVED, f"{SHRINK}, moved", 1.0)
    rows = {row.metric: row for row in resize._rows(samples, [resize.MOVED], resize.SIZES)}
    assert {metric: row.met for metric, row in rows.items()} == {
        "bytes moved, FSDP2, grow 2->4": False, "bytes moved, FSDP2, shrink 4->2": True
    }  # fmt: skip
    assert {row.reach for row in rows.values()} == {Reach.worst(1.2)}


def test_bytes_of_following_are_told_without_a_target() -> None:
    samples = Samples(repeat=1)
    samples.add("10 MB", f"{GROW}, sent", 2e3)
    samples.add("10 MB", f"{GROW}, followed", 3e7)
    rows = {row.metric: row for row in resize._rows(samples, [resize.BY_SIZE], [10.0])}
    following, in_pause = rows["bytes moved by following, 10 MB"], rows["bytes moved in the pause, 10 MB"]
    assert following.ours is not None
    assert in_pause.ours is not None
    assert (following.ours.median, following.reach) == (1.5, None)
    assert (in_pause.ours.median, in_pause.met) == (1e-4, True)


@pytest.mark.parametrize("part", resize.PARTS)
def test_each_part_has_rows_of_its_own(part: str) -> None:
    own = {(row.metric, row.peer) for row in resize._rows(Samples(), [part], resize.SIZES)}
    every = [(row.metric, row.peer) for row in resize._rows(Samples(), list(resize.PARTS), resize.SIZES)]
    assert own
    assert own < set(every)
    assert len(every) == len(set(every))
