"""Durable checkpoints are verified while they are read, and read once."""

from __future__ import annotations

import io
import random
import shutil
import struct
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.nonempty import every
from tests.patience import PATIENCE_S
from tests.unit.checkpoint.trainer import Trainer

from elastipod.checkpoint import CheckpointManager
from elastipod.checkpoint.directory_store import DirectoryStore
from elastipod.checkpoint.file_source import FileSource, _payload_start
from elastipod.checkpoint.load_plan import LoadTarget
from elastipod.checkpoint.manifest import CheckpointId, DamagedCheckpoint


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    trainer = Trainer()
    with CheckpointManager(folder / "disk", memory=False) as manager:
        for step in (1, 2):
            trainer.step(step)
            trainer.save(manager, step)
    return folder / "disk"


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_no_changed_byte_gives_another_state(two_checkpoints: Path, data: st.DataObject) -> None:
    """A byte of the newest checkpoint's files changes: what is loaded is that state, or the one before, and nothing else."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "disk"
        shutil.copytree(two_checkpoints, folder)
        name = data.draw(st.sampled_from(["__0_0.distcp", "__0_0.distcp", ".metadata"]))
        path = folder / CheckpointId(2, 1).name / name
        content = bytearray(path.read_bytes())
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
        path.write_bytes(content)
        run, wanted = Trainer(seed=3), Trainer()
        with CheckpointManager(folder, memory=False) as manager:
            step = run.load(manager)
        assert step in (1, 2)
        for number in range(1, step + 1):
            wanted.step(number)
        run.step(3)
        wanted.step(3)
        assert every(torch.equal(mine, other) for mine, other in zip(run.weights(), wanted.weights(), strict=True))


@pytest.mark.parametrize("number", range(4))
def test_a_changed_number_is_damage(two_checkpoints: Path, tmp_path: Path, number: int) -> None:
    """Most bytes of so small a checkpoint are no numbers, so that the bytes drawn above hardly ever are."""
    folder = tmp_path / "disk"
    shutil.copytree(two_checkpoints, folder)
    path, trained = folder / CheckpointId(2, 1).name / "__0_0.distcp", Trainer()
    for step in (1, 2):
        trained.step(step)
    content = bytearray(path.read_bytes())
    content[content.index(trained.weights()[number].numpy().tobytes()) + 1] ^= 1
    path.write_bytes(content)
    with CheckpointManager(folder, memory=False) as manager:
        assert Trainer(seed=3).load(manager) == 1


def test_several_chunks_are_fetched_at_once_from_a_store_in_which_seeks_are_dear(
    two_checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(two_checkpoints, tmp_path / "disk")
    both_wait, read_range = threading.Barrier(2), DirectoryStore.read_range
    waited: list[str] = []

    def slow(self: DirectoryStore, of: CheckpointId, name: str, start: int, length: int) -> bytes:
        if threading.current_thread().name.startswith("elastipod-checkpoint-read") and len(waited) < 2:
            waited.append(name)
            both_wait.wait(PATIENCE_S)
        return read_range(self, of, name, start, length)

    monkeypatch.setattr(DirectoryStore, "has_cheap_seeks", False)
    monkeypatch.setattr(DirectoryStore, "read_range", slow)
    with CheckpointManager(tmp_path / "disk", memory=False) as manager:
        assert Trainer(seed=3).load(manager) == 2
    assert len(waited) == 2


class Counting:
    """A file that counts what is read of it."""

    def __init__(self, file: Any) -> None:
        self._file, self.count = file, 0

    def read(self, size: int = -1) -> bytes:
        content: bytes = self._file.read(size)
        self.count += len(content)
        return content

    def readinto(self, room: Any) -> int:
        count: int = self._file.readinto(room)
        self.count += count
        return count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def test_each_byte_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(512, 512)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 512, generator=torch.Generator().manual_seed(random.randrange(9)))).sum().backward()
    optimizer.step()
    with CheckpointManager(tmp_path, memory=False) as manager:
        path = Path(manager.save(1, model=model, optimizer=optimizer))
    size = sum(each.stat().st_size for each in path.glob("*.distcp"))
    files: list[Counting] = []
    open_file = DirectoryStore.open_file

    @contextmanager
    def counted(self: DirectoryStore, *arguments: Any) -> Iterator[Any]:
        with open_file(self, *arguments) as file:
            files.append(Counting(file))
            yield files[-1]

    monkeypatch.setattr(DirectoryStore, "open_file", counted)
    with CheckpointManager(tmp_path, memory=False) as manager:
        assert manager.load_latest(model=model, optimizer=optimizer) is not None
    read = sum(each.count for each in files)
    assert size * 0.98 < read < size * 1.05


@pytest.mark.parametrize(
    ("parts", "dtype"),
    [
        pytest.param([(0, 0, 16, 8)], torch.float32, id="the whole"),
        pytest.param([(4, 0, 6, 8)], torch.float32, id="rows in the middle"),
        pytest.param([(0, 0, 8, 8), (8, 0, 8, 8)], torch.float32, id="rows of two tensors"),
        pytest.param([(0, 0, 16, 8), (3, 2, 5, 4)], torch.float32, id="the whole, and a block of it"),
        pytest.param([(3, 2, 5, 4)], torch.float32, id="a block"),
        pytest.param([(0, 0, 16, 8)], torch.float64, id="another type"),
    ],
)
def test_any_parts_of_a_saved_tensor_are_read(
    tmp_path: Path, parts: list[tuple[int, int, int, int]], dtype: torch.dtype
) -> None:
    """parts: the first row and column of each, and how many; as a rank of another world needs them."""
    model = torch.nn.Linear(8, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with CheckpointManager(tmp_path, memory=False) as manager:
        manager.save(1, model=model, optimizer=optimizer)
    store = DirectoryStore(tmp_path)
    source = FileSource(store, store.manifest(CheckpointId(1, 1)), rank=0)
    targets = [
        LoadTarget((row, column), (rows, columns), torch.zeros(rows, columns, dtype=dtype))
        for row, column, rows, columns in parts
    ]
    assert source.fill({("model.weight", (0, 0)): targets}) == []
    for target, (row, column, rows, columns) in zip(targets, parts, strict=True):
        assert torch.equal(target.tensor, model.weight.detach()[row : row + rows, column : column + columns].to(dtype))


def test_a_checkpoint_of_an_earlier_version_is_verified_as_a_whole(tmp_path: Path) -> None:
    trainer = Trainer()
    with CheckpointManager(tmp_path, memory=False) as manager:
        for step in (1, 2):
            trainer.step(step)
            trainer.save(manager, step)
    import json

    for step in (1, 2):
        manifest = tmp_path / CheckpointId(step, 1).name / "elastipod.json"
        content = json.loads(manifest.read_text())
        for record in content["files"].values():
            record.pop("parts", None)
        manifest.write_text(json.dumps(content))
    for step in (2, 1):
        with CheckpointManager(tmp_path, memory=False) as manager:
            assert Trainer(seed=5).load(manager) == step
        part = tmp_path / CheckpointId(step, 1).name / "__0_0.distcp"
        changed = bytearray(part.read_bytes())
        changed[len(changed) // 2] ^= 1
        part.write_bytes(changed)


def test_a_directory_with_any_changed_byte_is_damaged_or_points_into_the_entry() -> None:
    """Never an error of another kind: that would end the resume, which can go on with the checkpoint before."""
    file = io.BytesIO()
    torch.save(torch.arange(4.0), file)
    content = file.getvalue()
    right = _payload_start(io.BytesIO(content), 0, len(content))
    seen = 0
    for at in range(len(content)):
        for mask in (0x01, 0x80, 0xFF):
            changed = bytearray(content)
            changed[at] ^= mask
            try:
                start = _payload_start(io.BytesIO(changed), 0, len(content))
            except (DamagedCheckpoint, struct.error):
                seen += 1
            else:
                assert start >= 0
    assert right > 0
    assert seen > 100
