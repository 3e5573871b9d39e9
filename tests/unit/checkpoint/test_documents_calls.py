"""The calls of HyperPod's documents: what they lose, and what is taken of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.checkpoint.memory_places import ONE_PROCESS, Regression
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from elastipod import load_checkpoint, save_checkpoint
from elastipod.checkpoint.directory_store import DirectoryStore


def documents_save(
    model: Any, optimizer: Any, lr_scheduler: Any, user_content: dict[str, Any], checkpoint_path: str
) -> None:
    """What the documents' sample does (003)."""
    state_dict = {"model": model, "optimizer": optimizer, "lr_scheduler": lr_scheduler, **user_content}
    save_dcp(state_dict=state_dict, storage_writer=FileSystemWriter(checkpoint_path))


def documents_load(model: Any, optimizer: Any, lr_scheduler: Any, checkpoint_path: str) -> tuple[Any, Any, Any]:
    state_dict = {"model": model, "optimizer": optimizer, "lr_scheduler": lr_scheduler}
    load_dcp(state_dict=state_dict, storage_reader=FileSystemReader(checkpoint_path))
    return model, optimizer, lr_scheduler


@ONE_PROCESS
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # by torch 2.4's own writer
def test_the_documents_sample_loses_the_moments_and_ours_keeps_them(tmp_path: Path) -> None:
    run = Regression(0)
    run.train(300)
    documents_save(run.model, run.optimizer, run.scheduler, {"step": 300}, str(tmp_path / "theirs"))
    save_checkpoint(run.model, run.optimizer, run.scheduler, {"step": 300}, tmp_path / "ours")
    undisturbed = run.train(10)

    theirs = Regression(1)
    documents_load(theirs.model, theirs.optimizer, theirs.scheduler, str(tmp_path / "theirs"))
    assert not theirs.optimizer.state, "no moments were loaded"
    assert max(theirs.train(10)) > 10 * max(undisturbed), "the loss jumps"

    ours = Regression(2)
    loaded = load_checkpoint(ours.model, ours.optimizer, ours.scheduler, tmp_path / "ours")
    assert tuple(loaded) == (ours.model, ours.optimizer, ours.scheduler)
    assert (loaded.step, loaded.user_content) == (300, {"step": 300})
    assert ours.train(10) == undisturbed


def test_the_documents_two_call_shapes_are_taken(tmp_path: Path) -> None:
    run = Regression(0)
    run.train(1)
    assert load_checkpoint(run.model, run.optimizer, run.scheduler, str(tmp_path)).step == 0
    save_checkpoint(run.model, run.optimizer, run.scheduler, checkpoint_dir=str(tmp_path), step=1)
    save_checkpoint(run.model, run.optimizer, run.scheduler, {"global_step": 2, "epoch": 0}, str(tmp_path))
    assert [each.step for each in DirectoryStore(tmp_path).list_complete()] == [2, 1]
    with pytest.raises(TypeError, match="needs the number of completed steps"):
        save_checkpoint(run.model, run.optimizer, run.scheduler, {}, str(tmp_path))
    with pytest.raises(TypeError, match="name the directory of checkpoints"):
        load_checkpoint(run.model, run.optimizer, run.scheduler)
