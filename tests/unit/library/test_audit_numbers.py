"""The numbers and sentences of the audit, counted by hand on logs that are written by hand."""

from __future__ import annotations

import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from elastipod.audit.command import main
from elastipod.audit.log_reader import LoggedStep, read_logs
from elastipod.audit.report import audit
from elastipod.audit.sample_counts import EpochCounter, MixtureCounter, SampleCounts
from elastipod.errors import UnusableLogsError


def steps(*ranges: tuple[int, int], epoch: int = 0) -> list[LoggedStep]:
    return [LoggedStep(epoch, ranges)]


def test_epochs_are_counted_by_sample() -> None:
    counter = EpochCounter(5, 2)
    counter.add(steps((0, 2), (1, 4)))  # 1 twice, 4 never
    counter.add(steps((-2, 1), (3, 8), epoch=1))  # five of them do not exist
    counter.add(steps((3, 5), (3, 4), epoch=1))  # 3 twice more, 4 once more
    counter.add([*steps((0, 3), epoch=2), *steps((4, 5), epoch=-1)])
    assert counter.counts() == SampleCounts(unique=7, expected=10, duplicates=4, missing=3, foreign=9)
    assert counter.first_missing(10) == [[0, 4], [1, 1], [1, 2]]
    assert counter.first_missing(2) == [[0, 4], [1, 1]]
    assert counter.first_missing(0) == []


def test_only_epochs_in_progress_take_memory() -> None:
    """A plan may have a million epochs, such as one for each step of a stream."""
    counter = EpochCounter(1000, 10**6)
    for epoch in range(50):
        counter.add(steps((0, 600), epoch=epoch))
        assert len(counter._seen) == 1
        counter.add(steps((600, 1000), epoch=epoch))
        assert not counter._seen
    counter.add(steps((0, 10), epoch=7))
    assert counter.counts() == SampleCounts(
        unique=50_000, expected=10**9, duplicates=10, missing=10**9 - 50_000, foreign=0
    )
    assert counter.first_missing(2) == [[50, 0], [50, 1]]


def test_an_epoch_that_lacks_its_first_samples_names_them() -> None:
    counter = EpochCounter(4, 1)
    counter.add(steps((2, 3)))
    assert counter.first_missing(9) == [[0, 0], [0, 1], [0, 3]]


def test_mixtures_are_counted_by_source() -> None:
    """Two passes and a half over three samples, and one pass over two: up to three times each, and once each."""
    counter = MixtureCounter([("web", 3, 7), ("code", 2, 2)])
    counter.add(steps((0, 3), (0, 3), (0, 1), (3, 5)))
    assert counter.counts() == SampleCounts(unique=9, expected=9, duplicates=0, missing=0, foreign=0)
    assert counter.first_missing(9) == []
    counter.add([*steps((-1, 0), epoch=3), *steps((5, 7)), *steps((4, 6), (4, 5))])
    assert counter.counts() == SampleCounts(unique=9, expected=9, duplicates=2, missing=0, foreign=4)


def test_a_mixture_that_lacks_draws_names_the_samples() -> None:
    counter = MixtureCounter([("web", 3, 7), ("code", 2, 4)])
    counter.add(steps((0, 3), (0, 2), (0, 2), (0, 1), (0, 1), (3, 4)))  # web: 5, 3, 1; code: 1, 0
    assert counter.counts() == SampleCounts(unique=8, expected=11, duplicates=2, missing=4, foreign=0)
    assert counter.first_missing(9) == [[1, 2], [1, 3], [0, 4]]
    assert counter.first_missing(1) == [[1, 2]]


HEADER: dict[str, Any] = {"resumed_step": 0, "resumed_generation": 0, "dataset_size": 6, "epochs": 1, "global_batch": 2}


def write(
    folder: Path, generation: int, *records: dict[str, Any], rank: int = 0, world_size: int = 1, **header: Any
) -> Path:
    path = folder / f"gen-{generation:06d}-rank-{rank:05d}.jsonl"
    start = {"kind": "start", "generation": generation, "rank": rank, "world_size": world_size, **HEADER, **header}
    path.write_text("".join(f"{json.dumps(each)}\n" for each in (start, *records)))
    return path


def step(number: int, *ids: int) -> dict[str, Any]:
    return {"kind": "step", "step": number, "epoch": 0, "samples": list(ids)}


def end(number: int, why: str) -> dict[str, Any]:
    return {"kind": "end", "step": number, "why": why}


def test_a_report_tells_people_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = {"kind": "saved", "step": 1, "optimizer_norm": 1.0}
    write(tmp_path, 1, step(1, 0, 1), saved, step(2, 2, 3))
    loaded = {"kind": "loaded", "step": 1, "optimizer_norm": 1.1}
    lines = (loaded, step(2, 0, 3), step(3, 7, 5), end(3, "completed"))
    write(tmp_path, 2, *lines, resumed_step=1, resumed_generation=1)
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().out == (
        "NOT exactly once: of 6 samples, 1 trained more than once, 2 never trained, 1 outside the dataset\n"
        "  generation 1: steps 1 to 1\n"
        "  generation 2: steps 2 to 3\n"
        "  samples: 8 trained in all, 4 unique, 6 expected\n"
        "  steps repeated: 0 by generation 1, 1 by generation 2\n"
        "  missing, first ones: 2 in epoch 0, 4 in epoch 0\n"
        "  generation 2 loaded optimizer moments that differ from the saved ones\n"
    )
    assert main([str(tmp_path), "--json"]) == 1
    shown = capsys.readouterr().out
    assert json.loads(shown) == {
        "exact": False, "completed": True, "final_step": 3, "lineage": [[1, 1, 1], [2, 2, 3]], "samples_total": 8,
        "samples_unique": 4, "samples_expected": 6, "duplicates": 1, "missing": 2, "foreign": 1,
        "missing_first": [[0, 2], [0, 4]], "steps_repeated": {"1": 0, "2": 1}, "optimizer_norms_differ": [2],
        "incomplete": [],
    }  # fmt: skip
    assert shown.startswith('{\n "exact": false,\n')


def test_a_report_on_an_exact_job_is_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 1, step(1, 0, 1), step(2, 2, 3), step(3, 4, 5), end(3, "completed"))
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == (
        "every one of 6 samples was trained exactly once over 3 steps\n"
        "  generation 1: steps 1 to 3\n"
        "  samples: 6 trained in all, 6 unique, 6 expected\n"
        "  steps repeated: 0 by generation 1\n"
    )


def test_a_job_that_goes_on_lacks_samples_only_so_far(tmp_path: Path) -> None:
    write(tmp_path, 1, step(1, 0, 1), end(1, "drained"))
    report = audit(read_logs(tmp_path))
    assert report.sentence == "NOT exactly once: of 6 samples, 4 not trained (yet): the job has not completed"
    assert report.missing_first == [[0, 2], [0, 3], [0, 4], [0, 5]]


@pytest.mark.parametrize(
    ("before", "after", "differs"), [(1.0, 1.0 + 5e-7, False), (1.0, 1.0 + 5e-6, True), (None, 2.0, False), (1.0, None, False)]
)  # fmt: skip
def test_moments_may_differ_by_rounding(
    tmp_path: Path, before: float | None, after: float | None, differs: bool
) -> None:
    write(tmp_path, 1, step(1, 0, 1), {"kind": "saved", "step": 1, "optimizer_norm": before}, end(1, "drained"))
    loaded = {"kind": "loaded", "step": 1, "optimizer_norm": after}
    write(tmp_path, 2, loaded, step(2, 2, 3), end(2, "drained"), resumed_step=1, resumed_generation=1)
    assert audit(read_logs(tmp_path)).optimizer_norms_differ == ([2] if differs else [])


def test_a_log_whose_first_line_was_cut_off_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, 1, step(1, 0, 1), end(1, "drained"))
    for rank, text in enumerate(("", '{"kind":"start","gen')):
        (tmp_path / f"gen-000002-rank-{rank:05d}.jsonl").write_text(text)
    (tmp_path / "gen-2-rank-1.jsonl").write_text("of another program")
    assert list(read_logs(tmp_path)) == [1]


def test_shuffled_samples_take_little_memory(tmp_path: Path) -> None:
    """A job of 10^8 samples must fit into a small container."""
    num_lines, line = 100, [random.Random(7).randrange(10**9) for _ in range(1000)]
    write(tmp_path, 1, *(step(number, *line) for number in range(1, num_lines + 1)))
    tracemalloc.start()
    try:
        logs = read_logs(tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sum(one.count for lines in logs[1].steps.values() for one in lines) == num_lines * len(line)
    assert peak < 20 * num_lines * len(line)


@pytest.mark.parametrize(
    ("header", "record", "told"),
    [
        ({"rank": 1}, step(1, 0), "does not begin with the start line of its own generation and rank"),
        ({"generation": 2}, step(1, 0), "does not begin with the start line of its own generation and rank"),
        ({"kind": "step"}, step(1, 0), "does not begin with the start line of its own generation and rank"),
        ({}, {"kind": "stop"}, "has a line that this audit cannot read: ValueError(\"kind 'stop'\")"),
        ({}, {"step": 1}, "has a line that this audit cannot read: KeyError('kind')"),
        ({}, {"kind": "step", "step": 1, "epoch": 0}, "has a line that this audit cannot read: KeyError('samples')"),
        ({}, step(1, 2**64), "has a line that this audit cannot read: OverflowError("),
        ({}, {"kind": "end", "why": "drained"}, "has a line that this audit cannot read: KeyError('step')"),
        ({"epochs": None}, step(1, 0), "has a line that this audit cannot read: TypeError("),
        ({}, [], "line 2 is not a record"),
    ],
)
def test_a_log_that_another_program_wrote_is_refused(
    tmp_path: Path, header: dict[str, Any], record: dict[str, Any], told: str
) -> None:
    path = tmp_path / "gen-000001-rank-00000.jsonl"
    start = {"kind": "start", "generation": 1, "rank": 0, "world_size": 1, **HEADER, **header}
    path.write_text(f"{json.dumps(start)}\n{json.dumps(record)}\n")
    with pytest.raises(UnusableLogsError) as refused:
        read_logs(tmp_path)
    assert str(refused.value).startswith(f"{path} {told}")


def test_data_of_generations_is_compared_with_sources(tmp_path: Path) -> None:
    write(tmp_path, 1, step(1, 0, 1), end(1, "drained"), epochs=2, sources=[["web", 4, 8], ["code", 2, 4]])
    header: dict[str, Any] = {"resumed_step": 1, "resumed_generation": 1, "epochs": 3}
    write(tmp_path, 2, step(2, 2, 3), end(2, "drained"), sources=[["web", 4, 12], ["code", 2, 6]], **header)
    assert set(read_logs(tmp_path)) == {1, 2}, "more epochs"
    write(tmp_path, 2, step(2, 2, 3), end(2, "drained"), sources=[["web", 4, 15], ["code", 2, 3]], **header)
    with pytest.raises(UnusableLogsError) as refused:
        read_logs(tmp_path)
    assert str(refused.value) == (
        "the generations do not train on the same data: generation 1 on 6 samples an epoch, 4 of the 4 of web, 2 of the 2 of code, "
        "generation 2 on 6 samples an epoch, 5 of the 4 of web, 1 of the 2 of code"
    )


def test_an_empty_folder_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, told in (
        (tmp_path, "holds no sample logs (gen-*-rank-*.jsonl)"),
        (tmp_path / "none", "is not a directory"),
    ):
        assert main([str(folder)]) == 2
        assert capsys.readouterr() == ("", f"elastipod audit: {folder} {told}\n")
