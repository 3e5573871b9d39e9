"""What the usual sampler loses and repeats, counted."""

from __future__ import annotations

from bench import data
from bench.common.samples import Samples
from bench.data_load.once import USUAL, with_usual_sampler
from tests.e2e.data_run import EPOCHS, SAMPLES, STEPS, Stay


def test_one_process_without_changes_trains_each_sample_once() -> None:
    assert with_usual_sampler([Stay(1, STEPS)], seed=1) == 0


def test_ranks_that_do_not_divide_the_data_repeat_some_in_each_epoch() -> None:
    assert SAMPLES % 2 == 1
    assert with_usual_sampler([Stay(2, STEPS)], seed=1) == EPOCHS


def test_a_crash_alone_goes_back_to_the_same_batches() -> None:
    assert with_usual_sampler([Stay(1, 7, dies=0), Stay(1, STEPS)], seed=1) == 0
    assert with_usual_sampler([Stay(1, 3, dies=0), Stay(1, STEPS)], seed=1) == 0, "before the first checkpoint"


def test_a_change_of_size_loses_samples_and_repeats_others() -> None:
    assert with_usual_sampler([Stay(1, 30), Stay(3, STEPS)], seed=1) > 2 * EPOCHS, "more than what pads each epoch"


def test_one_sample_too_many_is_a_missed_row() -> None:
    samples = Samples()
    samples.add(USUAL, "wrong", 120)
    for side, count in (("fixed order", 0), ("DDP", 1)):
        samples.add(side, "wrong", count)
    verdicts = {row.metric: row.met for row in data._rows(samples) if "lost or repeated" in row.metric}
    assert verdicts == {"samples lost or repeated, fixed order": True, "samples lost or repeated, DDP": False}
