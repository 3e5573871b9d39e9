"""What saving and restoring cost, side by side with torch.distributed.checkpoint and with plain copying.

python -m bench.checkpoint [--repeat 5] [--mib 256] [--memory /dev/shm]. Writes .run/bench/checkpoint.json (another size or
fewer than five runs: checkpoint-part.json), and every single measurement into .run/bench/checkpoint-runs.json. Two (four) ranks
over gloo on this machine stand for as many nodes.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import shutil
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

from bench.common.report import Reach, Row, conclude, report, report_name, table, write_json
from bench.common.samples import Samples
from bench.common.surroundings import Surroundings
from tests.e2e.rank_worlds import Cases

from elastipod.checkpoint.memory_directory import DEFAULT_ROOT

RUN = Path(__file__).resolve().parents[1] / ".run" / "bench"
MIB = 256.0
COPY_FACTOR = 1.5  # the stall may be so many times a plain copy
RESTORE_FACTOR = 2.0  # a restore from memory may be so many times a plain copy, or transfer
DURABLE_FACTOR = 1.2  # a restore from durable storage may be so many times dcp.load on the same files


def main() -> int:
    options = _options()
    surroundings = Surroundings()
    surroundings.await_quiet(options.wait_for_quiet)
    samples = Samples(options.repeat)
    RUN.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=RUN) as place,
        tempfile.TemporaryDirectory(dir=options.memory) as memory,
        closing(Cases("bench.checkpoints.cases")) as cases,
    ):
        for case, arguments in (("stall", ()), ("restore", ()), ("reshard", (4, 2)), ("reshard", (2, 4))):
            name = " ".join(map(str, (case, *arguments)))
            print(f"checkpoint: {name}", flush=True)
            folder = Path(place) / name.replace(" ", "-")
            folder.mkdir()
            images = Path(memory) / folder.name
            images.mkdir()
            answer = cases.run(case, folder, str(images), options.mib, options.repeat, *arguments)
            for metric, seconds in answer["times"].items():
                for each in seconds:
                    samples.add(name, metric, each / (answer["bytes"] / 1e9))
            for used in (folder, images):
                shutil.rmtree(used)
    rows = _rows(
        samples,
        f"FSDP2 with two AdamW, {3 * options.mib:.0f} MiB of state in all, images in {options.memory}, gloo, {options.repeat} times each",
    )
    versions = {"python": platform.python_version(), "torch": importlib.metadata.version("torch")}
    content: dict[str, Any] = report(
        "checkpoint", rows, machine=surroundings.describe(), load_1m=surroundings.load_1m, versions=versions
    )
    name = report_name("checkpoint", is_whole=options.mib == MIB, repeat=options.repeat)
    write_json(RUN / f"{name}.json", content)
    write_json(RUN / f"{name}-runs.json", samples.as_json())
    print(table(rows))
    surroundings.warn()
    return conclude(rows)


def _rows(samples: Samples, how: str) -> list[Row]:
    def row(metric: str, case: str, ours: str, peer: str, note: str, reach: float | None = None) -> Row:
        return Row(
            metric=metric,
            unit="s/GB",
            ours=samples.spread(case, ours),
            peer=peer,
            theirs=samples.spread(case, peer),
            reach=None if reach is None else Reach.ratio(reach),
            how=f"{how}; {note}",
        )

    two = "two ranks, each with its own memory"
    stall = "training stands still for a save"
    lost = "node 0 has lost its memory; against sending as much over the same group"
    copying = f"{two}; against copying the same tensors"
    rows = [
        row(stall, "stall", "ours: stall", "memcpy", copying, 1 / COPY_FACTOR),
        row(stall, "stall", "ours: stall", "dcp async_save: stall", two),
        row(stall, "stall", "ours: stall", "dcp save", two),
        row(
            "until a save is durable",
            "stall",
            "ours: until durable",
            "dcp save",
            f"{two}; ours keeps copies in memory too",
        ),
        row(
            "restore from this node's memory",
            "restore",
            "memory",
            "memcpy",
            f"{two}; verified; into tensors that have been in use, as is the copy that it is held against",
            1 / RESTORE_FACTOR,
        ),
        row(
            "restore from this node's memory",
            "restore",
            "memory",
            "memcpy, mapped again",
            f"{two}; verified; against the same copy out of a file in memory, in small pages, that is mapped for it, as a new process must",
        ),
        row(
            "restore from this node's memory in a new process",
            "restore",
            "memory, new process",
            "memcpy, new moments",
            f"{two}; verified; the optimizer has no moments yet; against a copy into memory that is untouched where those are",
        ),
        row(
            "restore one of two nodes from a peer", "restore", "peer", "loopback", f"{two}; {lost}", 1 / RESTORE_FACTOR
        ),
        row(
            "restore from durable storage",
            "restore",
            "durable",
            "dcp load",
            f"{two}; verified while it is read",
            1 / DURABLE_FACTOR,
        ),
    ]
    for before, after in ((4, 2), (2, 4)):
        case = f"reshard {before} {after}"
        name = f"restore {before} -> {after} ranks from"
        rows.append(row(f"{name} durable storage", case, "durable", "dcp load", "verified first"))
        rows.append(row(f"{name} memory", case, "memory", "dcp load", "two nodes; verified first"))
    return rows


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.checkpoint", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeat", type=int, default=5, help="measurements of each (default: 5)")
    parser.add_argument(
        "--mib", type=float, default=MIB, help="weights of the model; the state is three times that (default: 256)"
    )
    parser.add_argument("--wait-for-quiet", type=float, default=30.0, help="maximum seconds to wait before the run")
    parser.add_argument(
        "--memory",
        type=Path,
        default=Path(DEFAULT_ROOT),
        help="folder of a memory file system (default: /dev/shm)",
    )
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
