"""Checkpoints of one process: what is kept, what is believed, who may write."""

from __future__ import annotations

import errno
import io
import json
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from tests.nonempty import every
from tests.unit.checkpoint.trainer import Trainer, entries, flip_a_byte, measure_file, shard
from tests.unit.torch_processes import TorchProcesses

from elastipod.audit.moments import optimizer_norm
from elastipod.checkpoint import CheckpointManager
from elastipod.checkpoint.dcp_format import write_rank_file
from elastipod.checkpoint.directory_store import DirectoryStore
from elastipod.checkpoint.manifest import Manifest
from elastipod.errors import CheckpointError, FencedError

WANTS = "its format is 3, this library reads 2; use the version that wrote it, or another directory"


def test_a_script_that_changes_its_working_directory_saves_where_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    trainer, checkpoints = Trainer(), CheckpointManager("run", keep=1)
    trainer.save(checkpoints, 1)
    monkeypatch.chdir(tmp_path / "elsewhere")
    trainer.save(checkpoints, 2)
    assert Trainer().load(CheckpointManager(tmp_path / "run")) == 2
    assert not entries(tmp_path / "elsewhere")


def test_a_resumed_run_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    whole, first, second = Trainer(), Trainer(), Trainer(seed=9)
    for number in range(6):
        whole.step(number)
    for number in range(3):
        first.step(number)
    first.save(CheckpointManager(tmp_path), 3, epoch=1)

    resume = CheckpointManager(tmp_path).load_latest(
        model=second.model, optimizer=second.optimizer, scheduler=second.scheduler
    )
    assert resume is not None
    assert (resume.step, resume.generation, resume.world_size) == (3, 1, 1)
    assert dict(resume.extra) == {"note": 3, "epoch": 1}
    assert optimizer_norm(second.optimizer) == optimizer_norm(first.optimizer) > 0
    for number in range(3, 6):
        second.step(number)
    for mine, wanted in zip(second.weights(), whole.weights(), strict=True):
        assert torch.equal(mine, wanted)
    assert second.scheduler.get_last_lr() == whole.scheduler.get_last_lr()


def test_an_empty_directory_starts_from_nothing(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "new")
    assert Trainer().load(manager) is None
    assert manager.generation == 1


def test_the_generation_is_known_once_the_directory_is_claimed(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    with pytest.raises(CheckpointError, match=r"call claim\(\) or load_latest\(\) on all ranks first"):
        _ = manager.generation
    assert manager.claim() == manager.generation == 1


def test_outside_a_pod_each_run_is_the_next_generation(tmp_path: Path) -> None:
    assert [CheckpointManager(tmp_path).claim() for _ in range(3)] == [1, 2, 3]


def test_in_a_pod_the_generation_is_the_agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTIPOD_GENERATION", "7")
    assert CheckpointManager(tmp_path).claim() == CheckpointManager(tmp_path).claim() == 7
    monkeypatch.delenv("ELASTIPOD_GENERATION")
    monkeypatch.setenv("JOB_RESTART_COUNT", "8")
    assert CheckpointManager(tmp_path).claim() == 9


def test_the_newest_are_kept_and_nothing_else_is_left(tmp_path: Path) -> None:
    trainer, manager = Trainer(), CheckpointManager(tmp_path, keep=2)
    (tmp_path / ".tmp-step-0000000001-gen-000001-0abc").mkdir()
    for number in range(1, 5):
        trainer.step(number)
        trainer.save(manager, number)
    assert entries(tmp_path) == [".claims", "step-0000000003-gen-000001", "step-0000000004-gen-000001"]


def test_the_manifest_names_every_file(tmp_path: Path) -> None:
    path = Trainer().save(CheckpointManager(tmp_path), 1)
    manifest = Manifest.from_json((path / "elastipod.json").read_text())
    assert set(manifest.files) == {each.name for each in path.iterdir()} - {"elastipod.json"}
    assert every(measure_file(path / name) == record for name, record in manifest.files.items())


def test_a_part_of_memory_is_written_alone_and_summed_on_the_way(tmp_path: Path) -> None:
    """Pieces of an image are views of one memory, of any type and size, also of none."""
    memory = torch.randint(0, 256, (12 << 20,), dtype=torch.uint8)
    tensors = [
        memory[64 : 64 + (9 << 20)].view(torch.float32),
        memory[128:130].view(torch.bfloat16)[0],
        memory[256 : 256 + 24].view(torch.int64).view(3, 1),
        memory[512:515].view(torch.bool),
        memory[1024:1024].view(torch.float64),
    ]
    with open(tmp_path / "part", "xb") as file:
        record, chunks, _ = write_rank_file(file, enumerate(tensors), {})
    assert record == measure_file(tmp_path / "part")
    content = (tmp_path / "part").read_bytes()
    assert len(content) < (9 << 20) + 20_000
    for number, (start, length) in chunks.items():
        read = torch.load(io.BytesIO(content[start : start + length]), weights_only=True)
        wanted = tensors[int(number)]
        assert (read.dtype, read.shape) == (wanted.dtype, wanted.shape)
        assert torch.equal(read.flatten().view(torch.uint8), wanted.flatten().view(torch.uint8))


def test_a_store_is_told_before_about_how_large_a_file_gets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At least that much, and not much more where tensors are large: it divides the file into a limited number of parts."""
    create_file, told = DirectoryStore.create_file, {}

    def noted(self: DirectoryStore, draft: str | Path, name: str, size: int = 0) -> Any:
        told[name] = size
        return create_file(self, draft, name, size)

    monkeypatch.setattr(DirectoryStore, "create_file", noted)
    for model, most in ((Trainer().model, 9.0), (torch.nn.Linear(512, 512), 1.1)):
        with CheckpointManager(tmp_path, memory=False) as manager:
            optimizer = torch.optim.AdamW(model.parameters())
            model(torch.ones(1, next(model.parameters()).shape[1])).sum().backward()
            optimizer.step()
            path = manager.save(1, model=model, optimizer=optimizer)
        size = shard(Path(path)).stat().st_size
        assert size <= told[shard(Path(path)).name] <= most * size


@pytest.mark.slow
def test_a_process_that_ends_without_waiting_finishes_its_save(torch_processes: TorchProcesses, tmp_path: Path) -> None:
    """Large enough that the end comes in the middle of it."""
    done = torch_processes.run(LEAVES, str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    directory = DirectoryStore(tmp_path)
    (only,) = directory.list_complete()
    manifest = directory.manifest(only)
    assert directory.find_problems(manifest, manifest.files) == []


LEAVES = """
import sys, torch
from elastipod.checkpoint import CheckpointManager
model = torch.nn.Linear(3000, 3000)
optimizer = torch.optim.AdamW(model.parameters())
CheckpointManager(sys.argv[1]).save_async(1, model=model, optimizer=optimizer)
"""


def test_a_step_is_saved_once(tmp_path: Path) -> None:
    trainer, manager = Trainer(), CheckpointManager(tmp_path)
    path = trainer.save(manager, 1)
    before = (path / "elastipod.json").stat().st_mtime_ns
    assert trainer.save(manager, 1) == path
    assert (path / "elastipod.json").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    "harm", ["flipped byte", "cut short", "missing file", "torn manifest", "no manifest", "renamed"]
)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, manager = Trainer(), CheckpointManager(tmp_path)
    trainer.step(1)
    trainer.save(manager, 1)
    trainer.step(2)
    newest = trainer.save(manager, 2)
    match harm:
        case "flipped byte":
            flip_a_byte(shard(newest))
        case "cut short":
            shard(newest).write_bytes(shard(newest).read_bytes()[:-1])
        case "missing file":
            (newest / ".metadata").unlink()
        case "torn manifest":
            (newest / "elastipod.json").write_text('{"format": 1, "st')
        case "no manifest":
            (newest / "elastipod.json").unlink()
        case "renamed":
            newest.rename(tmp_path / "step-0000000003-gen-000001")
    assert Trainer(seed=5).load(CheckpointManager(tmp_path)) == 1
    assert caplog.text.count("skipping a damaged checkpoint") == 1


def test_a_damaged_checkpoint_makes_room_for_the_next(tmp_path: Path) -> None:
    trainer, manager = Trainer(), CheckpointManager(tmp_path, keep=2)
    for number in (1, 2):
        trainer.step(number)
        trainer.save(manager, number)
    flip_a_byte(shard(tmp_path / "step-0000000002-gen-000001"))
    again, next_manager = Trainer(), CheckpointManager(tmp_path, keep=2)
    again.load(next_manager)
    again.step(2)
    again.save(next_manager, 2)
    assert entries(tmp_path) == [".claims", "step-0000000001-gen-000001", "step-0000000002-gen-000002"]


def test_a_checkpoint_that_cannot_be_read_at_the_moment_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, manager = Trainer(), CheckpointManager(tmp_path)
    for number in (1, 2):
        trainer.save(manager, number)
    open_file, read = DirectoryStore.open_file, DirectoryStore._read

    def throttled(*_: object) -> NoReturn:
        raise OSError(errno.EIO, "Input/output error")

    def throttled_manifest(self: DirectoryStore, name: str) -> str:
        return read(self, name) if name.startswith(".claims") else throttled()

    again, resumed = Trainer(seed=3), CheckpointManager(tmp_path)
    for name, broken, whole in (("open_file", throttled, open_file), ("_read", throttled_manifest, read)):
        monkeypatch.setattr(DirectoryStore, name, broken)
        with pytest.raises(CheckpointError, match="cannot be read at the moment: Input/output error; start again"):
            again.load(resumed)
        monkeypatch.setattr(DirectoryStore, name, whole)
    assert again.load(resumed) == 2
    again.save(resumed, 3)
    assert entries(tmp_path)[1:] == ["step-0000000002-gen-000001", "step-0000000003-gen-000002"]


def test_another_versions_checkpoint_is_no_damage(tmp_path: Path) -> None:
    trainer, manager = Trainer(), CheckpointManager(tmp_path)
    trainer.save(manager, 1)
    manifest = trainer.save(manager, 2) / "elastipod.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 3}))
    with pytest.raises(CheckpointError, match="its format is 3, this library reads 2; use the version that wrote it"):
        trainer.load(CheckpointManager(tmp_path))
    assert [each.step for each in DirectoryStore(tmp_path).list_complete()] == [2, 1]


def test_what_another_version_wrote_is_not_deleted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer()
    foreign = [trainer.save(CheckpointManager(tmp_path, generation=1), step) / "elastipod.json" for step in (1, 2)]
    for manifest in foreign:
        manifest.write_text(json.dumps({"format": 3, "all": "else"}))
    DirectoryStore(tmp_path).prune(1, keep=1)
    manager = CheckpointManager(tmp_path, generation=2, keep=1)
    for number in (3, 4, 5):
        trainer.save(manager, number)
    left = [f"step-000000000{step}-gen-00000{generation}" for step, generation in ((1, 1), (2, 1), (5, 2))]
    assert entries(tmp_path)[1:] == left
    said = [record.message for record in caplog.records if "not deleted, however old" in record.message]
    assert sorted(said) == sorted(2 * [f"not deleted, however old: {path} cannot be used: {WANTS}" for path in foreign])


def test_starting_over_in_silence_is_refused(tmp_path: Path) -> None:
    flip_a_byte(shard(Trainer().save(CheckpointManager(tmp_path), 1)))
    with pytest.raises(
        CheckpointError, match=r"none of the 1 checkpoints in .* is intact \(of the newest, .*__0_0\.distcp.*\)"
    ):
        Trainer().load(CheckpointManager(tmp_path))


def test_an_unfinished_checkpoint_does_not_exist(tmp_path: Path) -> None:
    path = Trainer().save(CheckpointManager(tmp_path), 1)
    path.rename(tmp_path / ".tmp-step-0000000001-gen-000001-0abc")
    assert Trainer().load(CheckpointManager(tmp_path)) is None


def test_a_job_applied_again_goes_on_after_its_former_self(tmp_path: Path) -> None:
    directory = DirectoryStore(tmp_path)
    assert [directory.claim(1, "first"), directory.claim(2, "first")] == [1, 2]
    assert [directory.claim(1, "second"), directory.claim(1, "second"), directory.claim(2, "second")] == [3, 3, 4]
    with pytest.raises(FencedError, match="another job has taken over"):
        directory.claim(9, "first")
