"""The arguments of managers and saves, the functions of the documents, and the random states that are kept."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.checkpoint.trainer import Trainer

from elastipod.checkpoint import CheckpointManager, rng
from elastipod.checkpoint.directory_store import DirectoryStore
from elastipod.checkpoint.hyperpod_functions import load_checkpoint, save_checkpoint
from elastipod.checkpoint.manifest import CheckpointId
from elastipod.checkpoint.other_runs import warn_if_other_run_is_ahead
from elastipod.checkpoint.resume import Resume
from elastipod.checkpoint.save_arguments import check_logs, open_store, plain_values
from elastipod.errors import CheckpointError

# -- arguments ---------------------------------------------------------------------------------------------------------


def test_what_a_directory_of_checkpoints_may_be(tmp_path: Path) -> None:
    for given in (tmp_path, str(tmp_path), f"file://{tmp_path}"):
        found = open_store(given, {})
        assert isinstance(found, DirectoryStore)
        assert found.path == tmp_path
    assert not isinstance(open_store(f"file://{tmp_path}", {"auto_mkdir": True}), DirectoryStore)
    assert not isinstance(open_store("memory://bucket", {}), DirectoryStore)


def test_a_log_is_passed_everywhere_or_nowhere() -> None:
    for have in ([True, True], [False, False], [True], []):
        check_logs(have)
    with pytest.raises(CheckpointError) as raised:
        check_logs([False, True, True, False])
    assert str(raised.value) == (
        "sample_log was passed on ranks 1-2 and not on ranks 0,3; pass one on every rank (SampleLog(..., writes=False) where "
        "another rank logs the samples), or on none"
    )


def test_extra_is_copied_as_json() -> None:
    given: Any = {"a": (1, 2), 3: [None]}
    assert plain_values(given) == {"a": [1, 2], "3": [None]}
    with pytest.raises(CheckpointError) as raised:
        plain_values({"a": {1}})
    assert str(raised.value) == (
        "extra must hold JSON values only (numbers, texts, lists, dictionaries): Object of type set is not JSON serializable"
    )


@pytest.mark.parametrize(("step", "is_told"), [(4, True), (5, True), (6, False)])
def test_a_run_behind_another_is_warned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, step: int, is_told: bool
) -> None:
    (tmp_path / CheckpointId(5, 1).name).mkdir()
    warn_if_other_run_is_ahead(DirectoryStore(tmp_path), step, 2)
    assert (
        caplog.messages
        == [
            f"{tmp_path} holds the checkpoint of step 5, which this run did not resume from: until 2 saves of this run have replaced "
            "it, a resume would return to it; call load_latest first, or name another directory"
        ]
        * is_told
    )


def test_a_save_in_memory_needs_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer()
    with CheckpointManager(tmp_path, memory=False) as manager:
        with pytest.raises(CheckpointError) as raised:
            _ = manager.generation
        assert str(raised.value) == (
            "the directory is not claimed yet; call claim() or load_latest() on all ranks first"
        )
        manager.save_async(3, model=trainer.model, optimizer=trainer.optimizer, durable=False)
        assert manager.wait() is None
        assert manager.generation == 1
    assert caplog.messages == ["step 3 is not saved: durable=False, and there is no memory for checkpoints"]


def test_the_documents_functions_say_what_they_need(tmp_path: Path) -> None:
    run = Trainer()
    save: Any = partial(save_checkpoint, run.model, run.optimizer, run.scheduler)
    load: Any = partial(load_checkpoint, run.model, run.optimizer, run.scheduler)
    need = "save_checkpoint needs the number of completed steps: pass step=, or user_content with 'step'"
    for content in ({}, None, {"epoch": 3}, {"step": 2.5}):
        with pytest.raises(TypeError) as wrong:
            save(content, tmp_path)
        assert str(wrong.value) == need
    with pytest.raises(TypeError) as wrong:
        load()
    assert str(wrong.value) == "name the directory of checkpoints: checkpoint_path or checkpoint_dir"
    with pytest.raises(CheckpointError) as two:
        load(tmp_path / "a", checkpoint_dir=tmp_path / "b")
    assert (
        str(two.value)
        == f"checkpoint_path is {tmp_path / 'a'} and checkpoint_dir is {tmp_path / 'b'}; name one directory"
    )
    found = load(tmp_path, checkpoint_dir=str(tmp_path))
    assert (found.step, found.user_content, found.resume) == (0, {}, None)
    content = {"step": 3, "global_step": 9}
    assert save(content, tmp_path) == tmp_path / CheckpointId(3, 1).name
    assert save(content, tmp_path, step=4) == tmp_path / CheckpointId(4, 1).name
    found = load(checkpoint_dir=tmp_path)
    assert (found.step, found.user_content) == (4, content)
    assert found.resume is not None


# -- random states -----------------------------------------------------------------------------------------------------


def test_a_new_rank_has_a_seed_of_its_step_and_rank() -> None:
    assert [rng.rank_seed(*each) for each in ((0, 0), (0, 1), (1, 0), (3, 2))] == [
        1, 0xC2B2AE3D27D4EB4F % (1 << 63) + 1, 0x9E3779B97F4A7C15 % (1 << 63) + 1,
        (3 * 0x9E3779B97F4A7C15 + 2 * 0xC2B2AE3D27D4EB4F + 1) % (1 << 63),
    ]  # fmt: skip
    import numpy

    rng.seed_new_rank(3, 2)
    found = random.random(), torch.rand(1), numpy.random.random()
    seed = rng.rank_seed(3, 2)
    assert found[0] == random.Random(seed).random()
    assert torch.equal(found[1], torch.rand(1, generator=torch.Generator().manual_seed(seed)))
    assert found[2] == numpy.random.RandomState(seed % (1 << 32)).random()


def test_the_state_of_an_accelerator_is_kept_where_it_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    before = rng.random_state()
    given: list[list[int]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: torch.tensor([1, 2, 255], dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state: given.append(state.tolist()))
    assert '"cuda"' not in rng.random_state()
    rng.restore_random_state(before)
    assert given == []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with_cuda = rng.random_state()
    assert '"cuda":"AQL/"' in with_cuda
    rng.restore_random_state(with_cuda)
    assert given == [[1, 2, 255]]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rng.restore_random_state(with_cuda)
    assert len(given) == 1


# -- resumes -----------------------------------------------------------------------------------------------------------


def test_a_resume_says_which_checkpoint_it_is_of_and_where_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, memory = tmp_path / "disk", tmp_path / "memory"
    run = Trainer()
    with CheckpointManager(disk, memory=memory) as manager:
        run.save(manager, 3)
        in_memory = manager._run().memory_path()
    objects: Any = {"model": run.model, "optimizer": run.optimizer, "scheduler": run.scheduler}
    of, extra, reported = CheckpointId(3, 1), {"note": 3}, []
    monkeypatch.setattr("elastipod.checkpoint.resumer.report_checkpoint", lambda *told: reported.append(told))
    with CheckpointManager(disk, memory=memory) as manager:
        assert manager.load_latest(**objects) == Resume(3, 1, 1, in_memory, extra, "memory")
        assert manager._run().staging.durable == of
        assert reported == []
    durable = Resume(3, 1, 1, disk / of.name, extra, "durable")
    with CheckpointManager(disk, memory=False) as manager:
        assert manager.load_latest(**objects) == durable
        assert manager._run().staging.durable == of
        assert reported == [(3, str(disk / of.name))]
        assert manager.load(3, **objects) == durable
        assert manager.load_weights(model=run.model) == durable
        assert manager.load_weights(model=run.model, step=3) == durable
    assert len(reported) == 2, "weights alone are no resume of the job"
