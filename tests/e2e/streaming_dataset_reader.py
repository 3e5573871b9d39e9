"""Runs lines of the documentation on a real StreamingDataset: prints, by world size and step, the samples that all ranks trained.

Arguments: a folder for the files, and a file with the lines, whose passes call `train`. One process plays all ranks.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from streaming import MDSWriter, StreamingDataset  # type: ignore[import-not-found]  # in an environment of its own

import elastipod
from elastipod import Batch

SAMPLES = 557


def write_files(remote: Path) -> None:
    with MDSWriter(out=str(remote), columns={"number": "int"}, size_limit=1024) as writer:
        for number in range(SAMPLES):
            writer.write({"number": number})


def main() -> None:
    folder, lines = Path(sys.argv[1]), Path(sys.argv[2]).read_text()
    write_files(folder / "remote")
    trained: dict[int, dict[int, list[int]]] = {}

    for world_size in (2, 3, 1):
        steps = trained.setdefault(world_size, {})

        def train(batch: Batch, rows: list[Any], steps: dict[int, list[int]] = steps) -> None:
            used = [row for part in batch.micro_batches(8) if part.weight for row in rows[part.rows]]
            steps.setdefault(batch.step, []).extend(row["number"] for row in used)

        for rank in range(world_size):
            local = folder / f"local-{world_size}-{rank}"
            opened = partial(_opened, folder / "remote", local)
            names = {name: getattr(elastipod, name) for name in elastipod.__all__}
            exec(lines, {**names, "StreamingDataset": opened, "train": train, "rank": rank, "world_size": world_size})
    print(json.dumps(trained))


def _opened(files: Path, copies: Path, **settings: Any) -> Any:
    """Open a dataset as the lines do, but with files that are here."""
    places = {"remote": str(files), "local": str(copies)}
    data = StreamingDataset(**(settings | places))
    assert len(data.samples_per_shard) > 1
    return data


if __name__ == "__main__":
    main()
