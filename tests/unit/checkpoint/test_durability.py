"""A power loss at any moment: what is visible is whole, and what a call said is durable is still there."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.checkpoint.recorded_disk import RecordedDisk, recorded_disk
from tests.unit.checkpoint.trainer import Trainer
from tests.unit.library.sample_logs import PLAN

from elastipod.audit.sample_log import SampleLog
from elastipod.checkpoint import CheckpointManager
from elastipod.checkpoint.directory_store import DirectoryStore
from elastipod.checkpoint.manifest import CheckpointId

RUN = "0a1b"


def violations(disk: RecordedDisk) -> list[str]:
    """Say what a power loss could leave half done."""
    found = [f"{show.path.name}: {what} may be lost" for show in disk.shown() for what in disk.lost_at(show)]
    return found + [
        f"{show.path.name}: its name may be lost" for show in disk.shown() if not disk.is_kept_at_the_end(show)
    ]


def test_a_checkpoint_is_whole_on_disk_before_it_appears_and_there_once_save_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, manager = Trainer(), CheckpointManager(tmp_path / "disk", memory=False)
    manager.claim()
    with recorded_disk(tmp_path / "disk", monkeypatch) as disk:
        trainer.save(manager, 1)
    (show,) = disk.shown()
    assert show.path.name == CheckpointId(1, 1).name
    assert len({call.path for call in disk.calls if call.what == "change"}) >= 3, "data, metadata and manifest"
    assert violations(disk) == []


def test_the_sample_log_is_on_disk_before_the_checkpoint_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a power loss would leave a checkpoint whose samples nobody knows."""
    trainer, manager = Trainer(), CheckpointManager(tmp_path / "disk", memory=False)
    generation = manager.claim()
    with (
        recorded_disk(tmp_path, monkeypatch) as disk,
        SampleLog(tmp_path / "samples", PLAN, generation=generation, rank=0, world_size=1) as log,
    ):
        log.step(next(iter(PLAN.iterate(0, 1))))
        manager.save(1, model=trainer.model, optimizer=trainer.optimizer, sample_log=log)
    (show,) = disk.shown()
    assert disk.is_synced(log.path, before=show)
    created = next(call for call in disk.calls if call.path == log.path)
    assert disk.is_synced_after(log.path.parent, created, before=show), "its name"
    assert violations(disk) == []


@pytest.mark.parametrize("links", [True, False], ids=["with hard links", "without hard links"])
def test_a_claim_is_on_disk_with_its_content_before_it_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    """An empty marker of a run, or of the job that owns the directory, would refuse the job for ever."""
    if not links:

        def refuse(*_: object, **__: object) -> None:
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr("os.link", refuse)
    store = DirectoryStore(tmp_path)
    with recorded_disk(tmp_path, monkeypatch) as disk:
        assert store.claim(1, RUN, job="team/llm") == 1
    assert violations(disk) == []
    named = [call for call in disk.calls if call.what == "change" and not call.path.name.startswith(".")]
    assert bool(named) is not links
    assert [call.path.name for call in named if not disk.is_synced(call.path)] == []
    assert [call.path.name for call in named if not disk.is_synced_after(call.path.parent, call)] == []
    assert DirectoryStore(tmp_path).claim(2, RUN, job="team/llm") == 2
