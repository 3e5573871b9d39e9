"""What a checkpoint manager of one process promises: copies, tiers, whose directory it is, and what it says when it cannot."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.nonempty import every
from tests.patience import PATIENCE_S
from tests.unit.checkpoint.test_save_and_load import Trainer, entries
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from elastipod import load_checkpoint, save_checkpoint
from elastipod.checkpoint import CheckpointManager
from elastipod.checkpoint.directory_store import DirectoryStore
from elastipod.checkpoint.image_header import ImageHeader
from elastipod.checkpoint.manifest import CheckpointId
from elastipod.checkpoint.memory_directory import MemoryDirectory
from elastipod.checkpoint.optimizer_state import initial_state
from elastipod.errors import CheckpointError, FencedError

ONE_PROCESS = pytest.mark.filterwarnings("ignore:torch.distributed is .*unavailable or uninitialized")


def places_in(folder: Path) -> dict[str, Any]:
    """Give the arguments of a manager that saves to a directory and to memory."""
    return {"directory": folder / "disk", "memory": folder / "memory"}


def save_async(trainer: Trainer, manager: CheckpointManager, step: int, *, durable: bool = True) -> None:
    manager.save_async(
        step, model=trainer.model, optimizer=trainer.optimizer, scheduler=trainer.scheduler, durable=durable
    )


def test_training_goes_on_while_its_copy_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, manager, may_write = Trainer(), CheckpointManager(tmp_path), threading.Event()
    create_file = DirectoryStore.create_file

    def held_back(self: DirectoryStore, *arguments: object) -> object:
        assert may_write.wait(PATIENCE_S)
        return create_file(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(DirectoryStore, "create_file", held_back)
    trainer.step(1)
    wanted = trainer.weights()
    save_async(trainer, manager, 1)
    trainer.step(2)  # while nothing has been written yet
    assert manager._store.list_complete() == []
    may_write.set()
    assert manager.wait() == tmp_path / CheckpointId(1, 1).name
    again = Trainer(seed=4)
    assert again.load(CheckpointManager(tmp_path)) == 1
    assert every(torch.equal(mine, saved) for mine, saved in zip(again.weights(), wanted, strict=True))


def test_the_newest_and_every_so_many_are_kept(tmp_path: Path) -> None:
    trainer, manager = Trainer(), CheckpointManager(tmp_path, keep=2, keep_every=3)
    for step in range(1, 9):
        trainer.save(manager, step)
    assert [each.step for each in manager._store.list_complete()] == [8, 7, 6, 3]


def test_a_random_number_drawn_after_a_resume_is_the_one_that_was_next(tmp_path: Path) -> None:
    trainer, manager = Trainer(), CheckpointManager(tmp_path)
    torch.manual_seed(5)
    trainer.save(manager, 1)
    wanted = torch.rand(3)
    trainer.load(CheckpointManager(tmp_path))
    assert torch.equal(torch.rand(3), wanted)


@ONE_PROCESS
def test_torchs_own_reader_can_load_it(tmp_path: Path) -> None:
    trainer = Trainer()
    trainer.step(1)
    path = trainer.save(CheckpointManager(tmp_path), 1)
    state = {"model": {name: torch.zeros_like(value) for name, value in trainer.model.state_dict().items()}}
    load_dcp(state, storage_reader=FileSystemReader(path))
    assert every(torch.equal(value, state["model"][name]) for name, value in trainer.model.state_dict().items())


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


def test_what_is_being_written_is_awaited_before_a_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, manager, is_loading = Trainer(), CheckpointManager(tmp_path), threading.Event()
    trainer.save(manager, 1)
    create_file = DirectoryStore.create_file

    def slow(self: DirectoryStore, *arguments: object) -> object:
        assert is_loading.wait(PATIENCE_S)
        time.sleep(0.2)  # a load that does not wait is through by then, with step 1
        return create_file(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(DirectoryStore, "create_file", slow)
    save_async(trainer, manager, 2)
    is_loading.set()
    assert trainer.load(manager) == 2


def test_drafts_that_a_crash_left_in_memory_are_deleted(tmp_path: Path) -> None:
    trainer = Trainer()
    with CheckpointManager(tmp_path / "disk", memory=tmp_path / "memory") as manager:
        trainer.save(manager, 1)
        (job,) = (tmp_path / "memory").iterdir()
        (job / ".plan-0123.json-89abcdef").touch()
        (job / ".image-gen-000000-rank-00000-slot-0.json-89abcdef").touch()
        trainer.save(manager, 2)
        assert [path.name for path in job.iterdir() if path.name.startswith(".")] == []


# -- whose directory it is -------------------------------------------------------------------------------------------


def test_another_job_is_refused_unless_it_takes_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTIPOD_GENERATION", "1")
    monkeypatch.setenv("ELASTIPOD_RUN_ID", "uid-a")
    monkeypatch.setenv("ELASTIPOD_JOB", "team/a")
    first = CheckpointManager(tmp_path, memory=False)
    Trainer().save(first, 1)
    monkeypatch.setenv("ELASTIPOD_RUN_ID", "uid-b")
    monkeypatch.setenv("ELASTIPOD_JOB", "team/b")
    with pytest.raises(
        CheckpointError, match=r"holds the checkpoints of job team/a; give team/b a directory of its own"
    ):
        Trainer().load(CheckpointManager(tmp_path, memory=False))
    Trainer().save(first, 2)
    assert Trainer().load(CheckpointManager(tmp_path, memory=False, adopt=True)) == 2
    with pytest.raises(FencedError):
        Trainer().save(first, 3)


# -- what it says when it cannot -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "words"),
    [
        pytest.param(
            torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.Tanh(), torch.nn.Linear(9, 2)),
            r"its model\.0\.weight has the shape \[8, 4\], here it is \[9, 4\]",
            id="another shape",
        ),
        pytest.param(
            torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2), torch.nn.Linear(2, 2)),
            r"it has no model\.3\.bias, .*model\.3\.weight",
            id="a missing key",
        ),
        pytest.param(
            torch.nn.Sequential(torch.nn.Linear(4, 8)),
            r"it also has model\.2\.bias, model\.2\.weight, .* which this model and optimizer have not",
            id="keys too many",
        ),
    ],
)
def test_another_model_is_refused_and_nothing_is_overwritten(
    tmp_path: Path, other: torch.nn.Module, words: str
) -> None:
    trainer = Trainer()
    trainer.step(1)
    trainer.save(CheckpointManager(tmp_path), 1)
    before = [parameter.detach().clone() for parameter in other.parameters()]
    optimizer = torch.optim.AdamW(other.parameters())
    with pytest.raises(CheckpointError, match=words):
        CheckpointManager(tmp_path).load_latest(model=other, optimizer=optimizer)
    assert every(torch.equal(mine, old) for mine, old in zip(other.parameters(), before, strict=True))
    assert entries(tmp_path)[-1] == CheckpointId(1, 1).name


Optimizers = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]


@ONE_PROCESS
@pytest.mark.parametrize(
    ("make", "has_state"),
    [
        pytest.param(lambda parameters: torch.optim.Adam(parameters, amsgrad=True), True, id="Adam"),
        pytest.param(lambda parameters: torch.optim.AdamW(parameters, fused=True), True, id="AdamW"),
        pytest.param(lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), True, id="momentum"),
        pytest.param(lambda parameters: torch.optim.SGD(parameters, lr=0.1), False, id="SGD"),
        pytest.param(torch.optim.RMSprop, True, id="another"),
    ],
)
def test_a_new_optimizer_has_room_for_moments_as_torch_makes_it(make: Optimizers, has_state: bool) -> None:
    def described(states: Mapping[Any, Mapping[str, torch.Tensor]]) -> list[dict[str, object]]:
        return [
            {
                name: (value.shape, value.stride(), value.dtype, value.device, value.requires_grad)
                for name, value in sorted(states[parameter].items())
            }
            for parameter in trained
        ]

    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last))
    model[0].bias.requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    weights = [parameter.detach().clone() for parameter in trained]
    ours, theirs = make(model.parameters()), make(model.parameters())
    made = initial_state(ours, trained)
    assert not ours.state, "the optimizer itself is as it was"
    get_state_dict(model, theirs)  # makes them with a step of zeros
    if has_state:
        assert described(made) == described(theirs.state)
    assert len(made) == len(theirs.state) == (3 if has_state else 0)
    assert every(torch.equal(mine, before) for mine, before in zip(trained, weights, strict=True))
    assert every(parameter.grad is None for parameter in trained)


def test_a_refused_checkpoint_leaves_a_new_optimizer_new(tmp_path: Path) -> None:
    run = Regression(0)
    run.train(2)
    save_checkpoint(run.model, run.optimizer, run.scheduler, {"step": 2}, tmp_path)
    other = torch.nn.Linear(9, 1)
    optimizer = torch.optim.Adam(other.parameters())
    with pytest.raises(CheckpointError, match="has the shape"):
        CheckpointManager(tmp_path).load_latest(model=other, optimizer=optimizer)
    assert not optimizer.state


def test_values_that_cannot_be_kept_are_named(tmp_path: Path) -> None:
    trainer = Trainer()
    trainer.optimizer.param_groups[0]["hook"] = object()
    with pytest.raises(CheckpointError, match=r"hook is a builtins\.object, which a checkpoint cannot hold"):
        trainer.save(CheckpointManager(tmp_path), 1)


# -- the documents' calls --------------------------------------------------------------------------------------------


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


class Regression:
    """A badly scaled problem, on which Adam's moments matter: without them its first step is as large in each direction."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Linear(8, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1, betas=(0.9, 0.99))
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1000)
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(64, 8, generator=generator)
        self.wanted = self.inputs @ torch.arange(8.0)[:, None]

    def train(self, steps: int) -> list[float]:
        losses: list[float] = []
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = (self.model(self.inputs) - self.wanted).square().mean()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            losses.append(loss.item())
        return losses


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
