"""Folders and files that this process may not read or write in: one sentence each, and everything is as it was.

Root may everything, whatever the modes say; so the attempts are made in a process without root's power over files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.patience import PATIENCE_S
from tests.unit.checkpoint.trainer import Trainer

from elastipod.checkpoint import CheckpointManager
from elastipod.data.batch_cache import BatchCache
from elastipod.data.elastic_batches import ElasticBatches
from elastipod.data.shards import shard_lengths
from elastipod.data.tokens import TokenFile
from elastipod.data.tokens_command import build
from elastipod.errors import CheckpointError, DataError

POWERS = "-dac_override,-dac_read_search"
WITHOUT_POWERS = ("setpriv", f"--inh-caps={POWERS}", f"--bounding-set={POWERS}") if os.geteuid() == 0 else ()


def contents(folder: Path) -> dict[str, bytes]:
    """Give every file; modes are as they are."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs setpriv")
def test_what_may_not_be_read_or_written_is_named_and_left_alone(tmp_path: Path) -> None:
    for name in ("sealed", "claims", "hidden", "folder", "later"):
        Trainer().save(CheckpointManager(tmp_path / name, generation=1), 1)
    build(tmp_path / "tokens", [Path(__file__)])
    (tmp_path / "index").write_text(json.dumps({"v": 1, "lengths": [3]}))
    (tmp_path / "read-only").mkdir()
    before = contents(tmp_path)
    checkpoint = "step-0000000001-gen-000001"
    for name, mode in (
        ("sealed", 0o500),
        ("claims/.claims", 0o500),
        (f"hidden/{checkpoint}/__0_0.distcp", 0o000),
        (f"folder/{checkpoint}", 0o000),
        ("tokens", 0o200),
        ("index", 0o000),
        ("read-only", 0o500),
    ):
        (tmp_path / name).chmod(mode)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("ELASTIPOD_", "JOB_"))}
    done = subprocess.run(
        [*WITHOUT_POWERS, sys.executable, "-W", "ignore", "-m", __name__, str(tmp_path)],
        env=environ, capture_output=True, text=True, timeout=PATIENCE_S, check=True, cwd=Path(__file__).parents[3],
    )  # fmt: skip
    said = json.loads(done.stdout)
    may_not_write = f"this process, of user {os.geteuid()}, may not write in {tmp_path}"
    storage = "cannot be read at the moment: Permission denied; start again when storage answers, or move it away"
    expected = {
        "save, sealed": f"cannot write the checkpoint of step 2 in {tmp_path}/sealed: Permission denied",
        "load, claims": f"{may_not_write}/claims (Permission denied); permit it, or name another directory",
        "load, hidden": f"{tmp_path}/hidden/{checkpoint} {storage}",
        "load, folder": f"{tmp_path}/folder/{checkpoint} {storage}",
        "save, later": f"cannot write the checkpoint of step 2 in {tmp_path}/later: Permission denied",
        "tokens": f"cannot read the token file {tmp_path}/tokens: Permission denied",
        "index": f"cannot read the index of shards {tmp_path}/index: Permission denied",
        "new index": f"cannot write the index of shards {tmp_path}/read-only/index: Permission denied",
        "build": f"cannot write {tmp_path}/read-only/new: ",
        "cache": f"cannot use the batch cache {tmp_path}/read-only/cache: Permission denied",
    }
    assert set(said) == set(expected)
    for case, words in expected.items():
        assert words in said[case], case
        assert "\n" not in said[case], case
    for path in (tmp_path, *tmp_path.rglob("*")):
        path.chmod(0o700)
    after = contents(tmp_path)
    assert {name: after.get(name) for name in before} == before
    assert {name for name in after if "/.claims/" not in name} == {name for name in before if "/.claims/" not in name}


def attempts(folder: Path) -> dict[str, Callable[[], object]]:
    """Give what is tried, by name."""
    trainer, later = Trainer(), CheckpointManager(folder / "later")

    def save_later() -> None:
        trainer.load(later)
        (folder / "later").chmod(0o500)
        trainer.save(later, 2)

    def cached() -> object:
        cache, plan = BatchCache(folder / "read-only" / "cache"), ElasticBatches(8, 4)
        return next(iter(cache.iterate(plan, lambda batch: torch.zeros(1), rank=0, world_size=1)))

    def counted(index: Path) -> list[int]:
        return shard_lengths(lambda shard, first: range(3), 1, index)

    return {
        "save, sealed": lambda: trainer.save(CheckpointManager(folder / "sealed"), 2),
        **{
            f"load, {name}": partial(trainer.load, CheckpointManager(folder / name))
            for name in ("claims", "hidden", "folder")
        },
        "save, later": save_later,
        "tokens": lambda: TokenFile(folder / "tokens"),
        "index": lambda: counted(folder / "index"),
        "new index": lambda: counted(folder / "read-only" / "index"),
        "build": lambda: build(folder / "read-only" / "new", [Path(__file__)]),
        "cache": cached,
    }


def main(folder: Path) -> None:
    said = {}
    for name, attempt in attempts(folder).items():
        try:
            said[name] = f"done: {attempt()}"
        except (CheckpointError, DataError) as error:
            said[name] = str(error)
        except OSError as error:
            said[name] = f"{type(error).__name__}: {error}"
    print(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
