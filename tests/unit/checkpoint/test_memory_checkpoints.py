"""Checkpoints in the memory of a node: which one wins, what is passed over, held and deleted."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.free_ports import free_port
from tests.nonempty import every, some
from tests.unit.checkpoint.memory_places import Regression, save_async
from tests.unit.checkpoint.trainer import Trainer
from tests.unit.in_memory.forked_ranks import run_ranks, world

from elastipod import load_checkpoint, save_checkpoint
from elastipod.checkpoint import CheckpointManager
from elastipod.checkpoint.directory_store import DirectoryStore
from elastipod.checkpoint.image_header import ImageHeader
from elastipod.checkpoint.manifest import CheckpointId
from elastipod.checkpoint.memory_directory import MemoryDirectory
from elastipod.errors import CheckpointError, FencedError


def places_in(folder: Path) -> dict[str, Any]:
    """Give the arguments of a manager that saves to a directory and to memory."""
    return {"directory": folder / "disk", "memory": folder / "memory"}


# -- memory ----------------------------------------------------------------------------------------------------------


def test_the_freshest_tier_wins(tmp_path: Path) -> None:
    trainer = Trainer()
    with CheckpointManager(tmp_path / "disk", memory=tmp_path / "memory") as manager:
        trainer.step(1)
        trainer.save(manager, 1)
        trainer.step(2)
        save_async(trainer, manager, 2, durable=False)
        assert manager.wait() is None
    again = Trainer(seed=3)
    with CheckpointManager(tmp_path / "disk", memory=tmp_path / "memory") as manager:
        resume = manager.load_latest(model=again.model, optimizer=again.optimizer, scheduler=again.scheduler)
        assert resume is not None
        assert (resume.tier, resume.step, resume.generation) == ("memory", 2, 1)
        assert every(torch.equal(mine, saved) for mine, saved in zip(again.weights(), trainer.weights(), strict=True))
        again.step(3)
        again.save(manager, 3)
    with CheckpointManager(tmp_path / "disk", memory=False) as manager:
        assert again.load(manager) == 3


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        ("flipped byte", "is damaged (rank 0's part); "),
        ("no header", ""),
        ("cut short", "is not complete; "),
        ("no plan", "is not complete; "),  # and the plan is that of step 1 too
    ],
)
def test_a_damaged_image_is_passed_over(
    tmp_path: Path, harm: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer()
    trainer.step(1)  # from here on the state has the same form, and both slots are of one plan
    with CheckpointManager(tmp_path / "disk", memory=tmp_path / "memory") as manager:
        trainer.save(manager, 1)
        wanted = trainer.weights()
        trainer.step(2)
        save_async(trainer, manager, 2, durable=False)
        manager.wait()
        (job,) = (tmp_path / "memory").iterdir()
        image = job / "image-gen-000001-rank-00000-slot-1"
    match harm:
        case "flipped byte":
            data = bytearray(image.with_suffix(".bin").read_bytes())
            data[3] ^= 1
            image.with_suffix(".bin").write_bytes(data)
        case "no header":
            image.with_suffix(".json").unlink()
        case "cut short":
            os.truncate(image.with_suffix(".bin"), 10)
        case "no plan":
            next(job.glob("plan-*.json")).unlink()
    trainer.step(3)
    with CheckpointManager(tmp_path / "disk", memory=tmp_path / "memory") as manager:
        assert trainer.load(manager) == 1
    said = f"the checkpoint of step 2 in memory {words}resuming from that of step 1 there"
    if harm == "no plan":
        said = said.replace("that of step 1 there", "the durable one of step 1")
    assert [text for text in caplog.messages if "resuming" in text] == ([said] if words else [])
    assert every(torch.equal(mine, saved) for mine, saved in zip(trainer.weights(), wanted, strict=True))


def test_a_damaged_image_without_another_checkpoint_is_refused(tmp_path: Path) -> None:
    trainer, places = Trainer(), places_in(tmp_path)
    with CheckpointManager(**places) as manager:
        save_async(trainer, manager, 1, durable=False)
    (image,) = (tmp_path / "memory").rglob("*-slot-0.bin")
    image.write_bytes(bytes([image.read_bytes()[0] ^ 1]) + image.read_bytes()[1:])
    again = Trainer(seed=2)
    words = r"step 1 in memory is damaged \(rank 0's part\), and there is no other; pass memory=False to start"
    with CheckpointManager(**places) as manager, pytest.raises(CheckpointError, match=words):
        again.load(manager)  # its weights are half overwritten by now
    assert not again.optimizer.state


def test_memory_does_not_override_a_roll_back_by_hand(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer, places = Trainer(), places_in(tmp_path)
    with CheckpointManager(**places, keep=9) as manager:
        trainer.save(manager, 1)
        deleted = trainer.save(manager, 2)
        save_async(trainer, manager, 3, durable=False)
    with CheckpointManager(**places, keep=9) as manager:
        assert trainer.load(manager) == 3
        save_async(trainer, manager, 4, durable=False)  # goes back to step 2 too, by way of memory
    with CheckpointManager(**places, keep=9) as manager:
        assert trainer.load(manager) == 4
    shutil.rmtree(deleted)
    with CheckpointManager(**places, keep=9) as manager:
        assert trainer.load(manager) == 1
        said = "the checkpoint of step 4 in memory is not used, because that of step 2 was deleted from"
        assert [text for text in caplog.messages if "deleted" in text] == [
            f"{said} {tmp_path / 'disk'}; resuming from the durable one of step 1"
        ]
        deleted = trainer.save(manager, 2)  # is in memory too
    for path, left in ((deleted, 1), (tmp_path / "disk" / CheckpointId(1, 1).name, None)):
        shutil.rmtree(path)
        with CheckpointManager(**places, keep=9) as manager:
            assert trainer.load(manager) == left
            save_async(trainer, manager, 7, durable=False)
    assert caplog.messages[-1].endswith("; there is no durable one, and training starts from the beginning")


def test_a_checkpoint_that_a_save_deleted_was_not_rolled_back(tmp_path: Path) -> None:
    trainer, places = Trainer(), places_in(tmp_path)
    with CheckpointManager(**places, keep=1) as manager:
        trainer.save(manager, 1)
        save_async(trainer, manager, 2, durable=False)
        newest = trainer.save(manager, 3)
    (Path(newest) / "elastipod.json").write_text("torn")
    (job,) = (tmp_path / "memory").iterdir()
    (job / "image-gen-000001-rank-00000-slot-0.json").unlink()  # that of step 3
    with CheckpointManager(**places, keep=1) as manager:
        assert trainer.load(manager) == 2


def test_memory_is_forgotten_with_its_directory(tmp_path: Path) -> None:
    trainer = Trainer()
    with CheckpointManager(tmp_path / "old", memory=tmp_path / "memory") as manager:
        save_async(trainer, manager, 2, durable=False)
    with CheckpointManager(tmp_path / "new", memory=tmp_path / "memory") as manager:
        assert trainer.load(manager) is None


def test_images_that_nobody_has_written_for_days_are_deleted(tmp_path: Path) -> None:
    old = time.time() - 4 * 86_400
    for name in ("elastipod-images-0123", "elastipod-agent", "something"):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (old, old))
    (tmp_path / "elastipod-images-4567").mkdir()
    with CheckpointManager(tmp_path / "disk", memory=tmp_path) as manager:
        assert manager.claim() == 1
    left = {path.name for path in tmp_path.iterdir()}
    assert {"elastipod-agent", "something", "elastipod-images-4567"} < left
    assert "elastipod-images-0123" not in left


def test_only_two_images_are_held(tmp_path: Path) -> None:
    trainer = Trainer()
    for generation in (1, 2, 3):
        with CheckpointManager(tmp_path / "disk", memory=tmp_path / "memory") as manager:
            trainer.load(manager)
            for step in range(1, 4):
                save_async(trainer, manager, 10 * generation + step, durable=False)
    (job,) = (tmp_path / "memory").iterdir()
    assert sorted(path.name for path in job.glob("*.bin")) == [
        f"image-gen-000003-rank-00000-slot-{n}.bin" for n in (0, 1)
    ]


def test_a_replaced_generation_adds_nothing_to_memory(tmp_path: Path) -> None:
    trainer, places = Trainer(), places_in(tmp_path)
    with CheckpointManager(**places) as old, CheckpointManager(**places) as new:
        trainer.save(old, 1)
        assert trainer.load(new) == 1
        save_async(trainer, old, 2, durable=False)
        with pytest.raises(FencedError):
            old.wait()
        with pytest.raises(FencedError):
            trainer.save(old, 3)
        with CheckpointManager(**places) as last:
            assert trainer.load(last) == 1


def test_a_claim_while_an_image_appears_takes_it_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, places = Trainer(), places_in(tmp_path)
    publish = MemoryDirectory.publish
    claims: list[int] = []

    def claimed_meanwhile(self: MemoryDirectory, header: ImageHeader) -> None:
        publish(self, header)
        if header.id.step == 2:
            claims.append(DirectoryStore(tmp_path / "disk").claim(None))

    with CheckpointManager(**places) as manager:
        trainer.save(manager, 1)
        monkeypatch.setattr(MemoryDirectory, "publish", claimed_meanwhile)
        save_async(trainer, manager, 2, durable=False)
        with pytest.raises(FencedError):
            manager.wait()
    assert claims == [2]
    (job,) = (tmp_path / "memory").iterdir()
    assert [path.name for path in job.glob("*.json") if path.name.startswith("image")] == [
        "image-gen-000001-rank-00000-slot-0.json"
    ]


def test_memory_that_refuses_takes_no_durable_checkpoint_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, places = Trainer(), places_in(tmp_path)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with CheckpointManager(**places) as manager:
        save_async(trainer, manager, 1, durable=False)
        manager.wait()
        monkeypatch.setattr(MemoryDirectory, "_write", full)
        assert trainer.save(manager, 2) == tmp_path / "disk" / CheckpointId(2, 1).name
        assert caplog.text.count("step 2 goes to durable storage only, because it cannot be kept in memory: ") == 1
        save_async(trainer, manager, 3, durable=False)
        with pytest.raises(CheckpointError, match=r"it cannot be kept in memory: rank 0: .*No space left"):
            manager.wait()
    with CheckpointManager(**places) as manager:
        assert trainer.load(manager) == 2


def test_a_copy_of_a_directory_has_no_part_in_the_originals_memory(tmp_path: Path) -> None:
    trainer = Trainer()
    with CheckpointManager(tmp_path / "disk", memory=tmp_path / "memory") as manager:
        trainer.save(manager, 1)
        save_async(trainer, manager, 2, durable=False)
    shutil.copytree(tmp_path / "disk", tmp_path / "copy")
    (tmp_path / "link").symlink_to("disk")
    for name, step in (("copy", 1), ("link", 2)):
        with CheckpointManager(tmp_path / name, memory=tmp_path / "memory") as manager:
            assert trainer.load(manager) == step


def test_drafts_that_a_crash_left_in_memory_are_deleted(tmp_path: Path) -> None:
    trainer = Trainer()
    with CheckpointManager(tmp_path / "disk", memory=tmp_path / "memory") as manager:
        trainer.save(manager, 1)
        (job,) = (tmp_path / "memory").iterdir()
        (job / ".plan-0123.json-89abcdef").touch()
        os.utime(job / ".plan-0123.json-89abcdef", (1, 1))
        (job / ".image-gen-000000-rank-00000-slot-0.json-89abcdef").touch()
        trainer.save(manager, 2)
        assert [path.name for path in some(job.iterdir()) if path.name.startswith(".")] == []


def test_a_new_generation_lets_the_memory_of_the_last_one_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTIPOD_MEMORY_DIR", str(tmp_path / "memory"))
    run = Regression(0)
    mapped: list[int] = []
    for generation in (1, 2, 3):
        monkeypatch.setenv("ELASTIPOD_GENERATION", str(generation))
        load_checkpoint(run.model, run.optimizer, run.scheduler, tmp_path / "disk")
        save_checkpoint(run.model, run.optimizer, run.scheduler, {"step": generation}, tmp_path / "disk")
        gc.collect()
        mapped.append(Path("/proc/self/maps").read_text().count(str(tmp_path / "memory")))
    assert mapped[0] > 0
    assert mapped == mapped[:1] * 3


@pytest.mark.parametrize("loads", [True, False], ids=["that loads", "that saves"])
def test_a_job_uses_memory_only_where_every_rank_has_some(tmp_path: Path, loads: bool) -> None:
    ports = [free_port(), free_port()]

    def body(rank: int) -> Any:
        found: list[Any] = []
        for port, memory in zip(ports, (tmp_path / f"memory of rank {rank}", False if rank else tmp_path), strict=True):
            trainer = Trainer()
            with world(rank, 2, port), CheckpointManager(tmp_path / f"disk {port}", memory=memory) as manager:
                if loads:
                    assert trainer.load(manager) is None
                save_async(trainer, manager, 1, durable=False)
                found += [manager._run().has_memory, manager.wait()]
        return found

    assert run_ranks(2, body) == [[True, None, False, None]] * 2
    images = [len(list(folder.rglob("image-*.json"))) for folder in sorted(tmp_path.iterdir())]
    assert sorted(images) == [0, 0, 0, 1, 1], "of two disks, an empty folder of rank 0, and the memory of two ranks"
