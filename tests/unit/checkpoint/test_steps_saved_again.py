"""Memory holds two images of one rank. A step may be saved again, and the form of the state may change: a reader finds one state."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.free_ports import free_port
from tests.unit.checkpoint.memory_places import Regression
from tests.unit.checkpoint.trainer import Trainer
from tests.unit.in_memory.forked_ranks import run_ranks, world

from elastipod.checkpoint import CheckpointManager
from elastipod.checkpoint.image import MappedImage
from elastipod.checkpoint.image_slots import ImageSlots
from elastipod.checkpoint.memory_directory import MemoryDirectory
from elastipod.checkpoint.resume import Resume
from elastipod.checkpoint.staging import Staging
from elastipod.errors import CheckpointError


def manager_in(folder: Path, **more: Any) -> CheckpointManager:
    return CheckpointManager(folder / "disk", memory=folder / "memory", keep=9, **more)


def keep(manager: CheckpointManager, run: Trainer | Regression, step: int, **extra: object) -> None:
    """Save a step to memory only."""
    manager.save_async(
        step, model=run.model, optimizer=run.optimizer, scheduler=run.scheduler, extra=extra, durable=False
    )
    manager.wait()


def resumed(folder: Path) -> tuple[Resume | None, list[torch.Tensor]]:
    """What the next run gets: the process of the last one has died."""
    run = Trainer(seed=3)
    with manager_in(folder) as manager:
        found = manager.load_latest(model=run.model, optimizer=run.optimizer, scheduler=run.scheduler)
    return found, run.weights()


def are_equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def headers(folder: Path, memory: str = "memory") -> list[tuple[int, int, int]]:
    """Step, slot and save of each complete image."""
    (job,) = (folder / memory).iterdir()
    directory = object.__new__(MemoryDirectory)
    directory.path = job
    return sorted((header.id.step, header.slot, header.save) for header in directory.headers())


def leave_former_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Die, as it were, between the newest image and the end of the one before it."""
    monkeypatch.setattr(Staging, "_withdraw_where", lambda *_: None)


@pytest.mark.parametrize("dies", [False, True])
def test_a_step_that_is_saved_to_memory_and_then_for_good_keeps_what_came_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    if dies:
        leave_former_images(monkeypatch)
    run, manager = Trainer(), manager_in(tmp_path)
    for step in (1, 2):
        run.step(step)
        keep(manager, run, step, data=step)
    run.save(manager, 2, data=2)
    assert headers(tmp_path) == ([(2, 0, 3), (2, 1, 2)] if dies else [(2, 0, 3)])
    found, weights = resumed(tmp_path)
    assert found is not None
    assert (found.step, found.tier, found.extra) == (2, "memory", {"note": 2, "data": 2})
    assert are_equal(weights, run.weights())


def test_ranks_that_save_a_step_twice_resume_it_whole(tmp_path: Path) -> None:
    ports = free_port(), free_port()

    def body(rank: int) -> Any:
        memory = tmp_path / f"memory of rank {rank}"
        with world(rank, 2, ports[0]), CheckpointManager(tmp_path / "disk", memory=memory) as manager:
            run = Trainer()
            run.step(1)
            keep(manager, run, 1, data=256)
            run.save(manager, 1, data=256)
        with world(rank, 2, ports[1]), CheckpointManager(tmp_path / "disk", memory=memory) as manager:
            found = manager.load_latest(model=run.model, optimizer=run.optimizer, scheduler=run.scheduler)
            assert found is not None
            return [found.step, found.tier, found.extra]

    assert run_ranks(2, body) == [[1, "memory", {"note": 1, "data": 256}]] * 2
    images = [[step, save] for rank in (0, 1) for step, _, save in headers(tmp_path, f"memory of rank {rank}")]
    assert images == [[1, 2]] * 2, "each node holds the image of its rank, and of one save"


@pytest.mark.parametrize("is_whole", [True, False])
def test_the_newest_save_of_a_step_wins_where_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_whole: bool
) -> None:
    leave_former_images(monkeypatch)
    run, manager = Trainer(), manager_in(tmp_path)
    run.step(1)
    keep(manager, run, 1, save="first")
    first = run.weights()
    run.step(2)
    keep(manager, run, 1, save="second")
    if not is_whole:
        (image,) = (tmp_path / "memory").rglob("*-slot-1.bin")
        image.unlink()
    found, weights = resumed(tmp_path)
    assert found is not None
    assert found.extra == {"save": "second" if is_whole else "first"}
    assert are_equal(weights, run.weights() if is_whole else first)


@pytest.mark.parametrize("is_durable", [True, False])
def test_a_run_that_has_gone_back_resumes_what_it_has_made_since(tmp_path: Path, is_durable: bool) -> None:
    run, manager = Trainer(), manager_in(tmp_path)
    parts: dict[str, Any] = {"model": run.model, "optimizer": run.optimizer, "scheduler": run.scheduler}
    run.step(1)
    run.save(manager, 1)
    run.step(2)
    if is_durable:
        left = run.save(manager, 2, which="first")
    else:
        keep(manager, run, 2, which="first")
    assert manager.load(1, **parts).step == 1
    if is_durable:
        shutil.rmtree(left)
    run.step(77)
    if is_durable:
        run.save(manager, 2, which="second")
    else:
        keep(manager, run, 2, which="second")
    found, weights = resumed(tmp_path)
    assert found is not None
    assert (found.step, found.tier, found.extra["which"]) == (2, "memory", "second")
    assert are_equal(weights, run.weights())


def test_a_run_that_dies_after_it_has_gone_back_starts_from_there(tmp_path: Path) -> None:
    run, manager = Trainer(), manager_in(tmp_path)
    run.step(1)
    run.save(manager, 1)
    wanted = run.weights()
    run.step(2)
    keep(manager, run, 2)
    manager.load(1, model=run.model, optimizer=run.optimizer, scheduler=run.scheduler)
    assert [step for step, _, _ in headers(tmp_path)] == [1]
    found, weights = resumed(tmp_path)
    assert found is not None
    assert found.step == 1
    assert are_equal(weights, wanted)


def test_managers_of_one_generation_number_their_saves_on(tmp_path: Path) -> None:
    run = Trainer()
    run.step(1)
    for step in (1, 2, 3):
        with manager_in(tmp_path, generation=4) as manager:
            keep(manager, run, step)
    assert headers(tmp_path) == [(3, 0, 3)]


# -- another form of the state ---------------------------------------------------------------------------------------


def changed(run: Trainer) -> None:
    """Give the state another form: one more parameter, with moments."""
    parameter = torch.nn.Parameter(torch.ones(1000))
    run.model.register_parameter("head", parameter)
    run.optimizer.add_param_group({"params": [parameter]})
    parameter.grad = torch.ones(1000)
    run.optimizer.step()


@pytest.mark.parametrize("harm", ["killed", "not published", "no room"])
def test_the_newest_image_stays_until_one_of_another_form_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    run, manager = Trainer(), manager_in(tmp_path)
    run.step(1)
    run.save(manager, 1)
    for step in (2, 3):
        run.step(step)
        keep(manager, run, step)
    wanted = run.weights()

    def fail(*_: object) -> Any:
        raise KeyboardInterrupt if harm == "killed" else OSError(errno.ENOSPC, "No space left on device")

    place: tuple[Any, str] = {
        "killed": (ImageSlots, "fill"), "not published": (MemoryDirectory, "publish"), "no room": (MappedImage, "create"),
    }[harm]  # fmt: skip
    with monkeypatch.context() as patched:
        patched.setattr(*place, fail)
        changed(run)
        with pytest.raises((KeyboardInterrupt, CheckpointError)):
            keep(manager, run, 4)
    found, weights = resumed(tmp_path)
    assert found is not None
    assert (found.step, found.tier) == (3, "memory")
    assert are_equal(weights, wanted)


def test_a_state_of_another_form_uses_both_places_again(tmp_path: Path) -> None:
    run, manager = Trainer(), manager_in(tmp_path)
    run.step(1)
    for step in (1, 2, 3):
        keep(manager, run, step)
    (job,) = (tmp_path / "memory").iterdir()

    def sizes() -> list[int]:
        return [path.stat().st_size for path in sorted(job.glob("*.bin"))]

    small = sizes()
    assert headers(tmp_path) == [(2, 1, 2), (3, 0, 3)]
    changed(run)
    keep(manager, run, 4)
    assert (headers(tmp_path), sizes()[0]) == ([(3, 0, 3), (4, 1, 4)], small[0])
    keep(manager, run, 5)
    assert headers(tmp_path) == [(4, 1, 4), (5, 0, 5)]
    assert min(sizes()) > max(small)
    keep(manager, run, 6)
    assert headers(tmp_path) == [(5, 0, 5), (6, 1, 6)]


def test_no_room_for_the_second_image_of_another_form_turns_memory_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, manager = Trainer(), manager_in(tmp_path)
    run.step(1)
    for step in (1, 2, 3):
        keep(manager, run, step)
    changed(run)
    keep(manager, run, 4)
    create: Callable[..., MappedImage] = MappedImage.create

    def full(path: Path | None, size: int) -> MappedImage:
        if path is not None:
            raise OSError(errno.ENOSPC, "No space left on device")
        return create(path, size)

    monkeypatch.setattr(MappedImage, "create", full)
    path = manager.save(5, model=run.model, optimizer=run.optimizer, scheduler=run.scheduler)
    assert path == tmp_path / "disk" / "step-0000000005-gen-000001"
    told = [text for text in caplog.messages if "no checkpoints are kept in memory" in text]
    assert len(told) == 1
    assert "No space left on device" in told[0]
