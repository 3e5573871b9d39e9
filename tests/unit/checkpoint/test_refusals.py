"""Saves and loads that are refused: the directories of others, replaced generations, other models, bad values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.unit.checkpoint.trainer import Trainer, entries

from elastipod.checkpoint import CheckpointManager
from elastipod.checkpoint.directory_store import DirectoryStore
from elastipod.checkpoint.manifest import CheckpointId, Manifest
from elastipod.errors import CheckpointError, FencedError


@pytest.mark.parametrize("name", [".metadata", "elastipod.json"])
def test_somebody_elses_checkpoint_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match="is itself one checkpoint, not a directory of checkpoints"):
        Trainer().load(CheckpointManager(tmp_path))


def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="is not a directory"):
        Trainer().load(CheckpointManager(tmp_path / "file"))


def test_an_optimizer_whose_state_no_resume_could_create_is_refused_before_hours_are_lost(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.LBFGS(model.parameters())
    checkpoints = CheckpointManager(tmp_path)
    with pytest.raises(CheckpointError, match="the optimizer is a LBFGS, whose step needs a closure, so no resume"):
        checkpoints.save(1, model=model, optimizer=optimizer)
    others = torch.optim.AdamW(model.parameters())
    model(torch.ones(1)).backward()
    others.step()
    checkpoints.save(1, model=model, optimizer=others)
    with pytest.raises(CheckpointError, match="the optimizer is a LBFGS, whose step needs a closure, so no resume"):
        checkpoints.load_latest(model=model, optimizer=optimizer)
    checkpoints.close()


def test_a_replaced_generation_can_neither_commit_nor_delete(tmp_path: Path) -> None:
    trainer, old = Trainer(), CheckpointManager(tmp_path, keep=1, generation=1)
    trainer.save(old, 1)
    assert Trainer().load(CheckpointManager(tmp_path, generation=2)) == 1
    with pytest.raises(FencedError, match=r"generation 2 has taken over .* generation 1 and must stop"):
        trainer.save(old, 2)
    assert DirectoryStore(tmp_path).list_complete() == [CheckpointId(1, 1)]
    with pytest.raises(FencedError):
        DirectoryStore(tmp_path).prune(1, keep=1)


def test_a_claim_in_the_middle_of_a_save_stops_the_commit(tmp_path: Path) -> None:
    directory = DirectoryStore(tmp_path)
    directory.claim(1)
    target = CheckpointId(5, 1)
    temporary = directory.begin(target)
    directory.claim(2)
    with pytest.raises(FencedError):
        directory.commit(temporary, Manifest(target, 1, {}, {}))
    assert directory.list_complete() == []


def test_an_older_generation_cannot_claim(tmp_path: Path) -> None:
    directory = DirectoryStore(tmp_path)
    directory.claim(4)
    with pytest.raises(FencedError, match="generation 4 has taken over"):
        directory.claim(3)


def test_the_freshest_is_the_highest_step_then_generation(tmp_path: Path) -> None:
    for step, generation in ((10, 1), (12, 1), (12, 3), (11, 4)):
        (tmp_path / CheckpointId(step, generation).name).mkdir()
    assert DirectoryStore(tmp_path).list_complete() == [
        CheckpointId(12, 3),
        CheckpointId(12, 1),
        CheckpointId(11, 4),
        CheckpointId(10, 1),
    ]


def test_another_model_is_refused_in_one_sentence(tmp_path: Path) -> None:
    Trainer().save(CheckpointManager(tmp_path), 1)
    other = torch.nn.Linear(4, 9)
    with pytest.raises(CheckpointError, match="does not fit this model and optimizer"):
        CheckpointManager(tmp_path).load_latest(model=other, optimizer=torch.optim.AdamW(other.parameters()))


def test_the_optimizer_of_another_model_is_refused_in_one_sentence(tmp_path: Path) -> None:
    mine, other = Trainer(), Trainer()
    manager = CheckpointManager(tmp_path)
    with pytest.raises(
        CheckpointError, match="4 parameters of the optimizer are not the model's; make the optimizer from"
    ):
        manager.save(1, model=mine.model, optimizer=other.optimizer)
    mine.save(manager, 1)
    with pytest.raises(CheckpointError, match="4 parameters of the optimizer are not the model's"):
        manager.load_latest(model=mine.model, optimizer=other.optimizer)


@pytest.mark.parametrize("step", ["9", -1, 1.0, True, torch.tensor(3)])
def test_a_step_that_is_none_is_refused_before_anything_is_copied(tmp_path: Path, step: int) -> None:
    with pytest.raises(ValueError, match="it is the number of completed optimizer steps"):
        Trainer().save(CheckpointManager(tmp_path), step)
    assert entries(tmp_path) == []


def test_a_run_that_begins_anew_below_an_older_one_is_warned_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, before = Trainer(), CheckpointManager(tmp_path)
    trainer.save(before, 8)
    trainer.save(before, 9)
    assert caplog.messages == []
    anew = CheckpointManager(tmp_path)
    trainer.save(anew, 3)
    trainer.save(anew, 4)
    (told,) = caplog.messages
    assert told.startswith(
        f"{tmp_path} holds the checkpoint of step 9, which this run did not resume from: until 2 saves"
    )
    caplog.clear()
    after = CheckpointManager(tmp_path)
    assert trainer.load(after) == 4
    trainer.save(after, 4)
    assert caplog.messages == []


def test_a_schedule_that_was_not_saved_is_missed(tmp_path: Path) -> None:
    trainer = Trainer()
    CheckpointManager(tmp_path).save(1, model=trainer.model, optimizer=trainer.optimizer)
    with pytest.raises(CheckpointError, match="was saved without a scheduler"):
        trainer.load(CheckpointManager(tmp_path))


def test_extra_values_must_be_plain(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="extra must hold JSON values only"):
        Trainer().save(CheckpointManager(tmp_path), 1, weights=torch.zeros(1))


def test_a_manifest_that_points_outside_is_not_believed(tmp_path: Path) -> None:
    path = Trainer().save(CheckpointManager(tmp_path), 1)
    manifest = json.loads((path / "elastipod.json").read_text())
    manifest["files"]["../../etc/passwd"] = {"size": 1, "crc32": "00000000"}
    (path / "elastipod.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="outside its own directory"):
        DirectoryStore(tmp_path).manifest(CheckpointId(1, 1))


def test_keeping_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep is 0"):
        CheckpointManager(tmp_path, keep=0)
