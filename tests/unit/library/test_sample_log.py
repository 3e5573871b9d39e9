"""The sample log as a file: its lines, and what it refuses."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
import torch
from tests.patience import PATIENCE_S
from tests.unit.checkpoint.recorded_disk import recorded_disk
from tests.unit.library.sample_logs import PLAN

from elastipod.audit.sample_log import SampleLog
from elastipod.errors import SampleLogError


def open_log(directory: Path, generation: int = 3, after: SampleLog | None = None) -> SampleLog:
    return SampleLog(directory, PLAN, generation=generation, rank=1, world_size=2, after=after)


def test_the_lines_are_those_of_the_contract(tmp_path: Path) -> None:
    with open_log(tmp_path / "made" / "on the way") as log:
        log.step(PLAN.batch(1, 1, 2), loss=2.5)
        log.done(1, 2.25)
        log.saved(1, 0.5)
        log.end(1, "drained")
    assert log.path.name == "gen-000003-rank-00001.jsonl"
    lines = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["start", "step", "done", "saved", "end"]
    assert {**lines[0], "t": 0} == {
        "kind": "start",
        **{"generation": 3, "rank": 1, "world_size": 2, "resumed_step": 0, "resumed_generation": 0},
        **{"dataset_size": 50, "epochs": 2, "global_batch": 8, "t": 0},
    }
    assert (lines[1]["step"], lines[1]["epoch"], lines[1]["loss"]) == (1, 0, 2.5)
    assert (lines[2]["step"], lines[2]["loss"]) == (1, 2.25)
    assert lines[1]["samples"] == list(PLAN.batch(1, 1, 2).indices)


def test_lines_are_in_the_file_at_once(tmp_path: Path) -> None:
    with open_log(tmp_path) as log:
        log.step(PLAN.batch(1, 1, 2))
        assert len(log.path.read_text().splitlines()) == 2


def test_a_script_that_changes_its_working_directory_can_still_end_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with open_log(Path("log")) as log:
        monkeypatch.chdir(tmp_path / "elsewhere")
        log.end(0, "drained")
    assert log.path.is_relative_to(tmp_path / "log")


def test_a_log_is_never_written_over(tmp_path: Path) -> None:
    open_log(tmp_path).close()
    with pytest.raises(SampleLogError, match="another run logged there"):
        open_log(tmp_path)


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SampleLogError, match="cannot create the sample log's folder"):
        open_log(tmp_path / "file")


def test_a_full_disk_is_said_with_the_name_of_the_log(tmp_path: Path) -> None:
    with open_log(tmp_path) as log:
        assert log._descriptor is not None
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, log._descriptor)
        os.close(full)
        with pytest.raises(SampleLogError, match=f"cannot write the sample log {log.path}: No space left on device"):
            log.step(PLAN.batch(1, 1, 2))


def test_a_closed_log_takes_no_lines(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.close()
    log.close()
    with pytest.raises(SampleLogError, match="is closed"):
        log.step(PLAN.batch(1, 1, 2))


def test_a_log_makes_durable_what_this_process_logged_in_earlier_generations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that lives through several generations saves the last one, and the audit needs the samples of all."""
    with recorded_disk(tmp_path, monkeypatch) as disk:
        logs: list[SampleLog] = []
        for generation in (3, 4, 5, 6):
            logs.append(open_log(tmp_path, generation, logs[-1] if logs else None))
            logs[-1].step(PLAN.batch(1, 1, 2))
            logs[-1].close() if generation < 6 else None
        logs[1].path.unlink()
        logs[3].sync()
        assert [disk.is_synced(log.path) for log in logs] == [True, False, True, True]
        synced = len(disk.calls)
        logs[3].sync()
        assert {call.path for call in disk.calls[synced:]} == {logs[3].path, tmp_path}, "the others were synced once"
        logs[3].close()


def test_a_save_that_ends_late_never_writes_into_a_file_that_has_taken_the_place_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread of a save that nobody awaits runs on while training closes the log, and descriptors are used again."""
    log, other = open_log(tmp_path), tmp_path / "other"
    is_writing, may_write, write = threading.Event(), threading.Event(), os.write

    def late_write(descriptor: int, data: bytes) -> int:
        is_writing.set()
        may_write.wait(0.3)
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", late_write)
    save = threading.Thread(target=log.saved, args=(1,))
    save.start()
    is_writing.wait(PATIENCE_S)
    log.close()
    with other.open("wb"):
        may_write.set()
        save.join()
    assert other.read_bytes() == b""
    assert log.path.read_text().splitlines()[-1].startswith('{"kind":"saved"')


def test_a_log_is_synced_by_a_descriptor_that_nobody_closes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, fsync, synced = open_log(tmp_path), os.fsync, list[str]()

    def slow_fsync(descriptor: int) -> None:
        log.close()
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", slow_fsync)
    log.sync()
    assert synced == [str(log.path), str(tmp_path)]


def test_a_loss_may_be_a_tensor_and_is_refused_where_it_is_no_number(tmp_path: Path) -> None:
    with open_log(tmp_path) as log:
        log.step(PLAN.batch(1, 1, 2), torch.tensor([2.5]))  # type: ignore[arg-type]  # as scripts do
        with pytest.raises(TypeError, match=r"^loss is a Tensor; give a number, such as loss\.mean\(\)\.item\(\)$"):
            log.done(1, torch.ones(2))  # type: ignore[arg-type]
        log.done(1, torch.tensor(2.25, requires_grad=True).detach().numpy()[()])  # type: ignore[arg-type]
    lines = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert [(line["kind"], line.get("loss")) for line in lines] == [("start", None), ("step", 2.5), ("done", 2.25)]
