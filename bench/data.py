"""Loading of tokens beside torch's own loaders, and what resizes do to the loss.

python -m bench.data [--repeat 5] [--parts tokens,resume,equivalence] [--image FILE]. Writes .run/bench/data.json, and every single
measurement with the losses of the last repetition into .run/bench/data-runs.json; a choice of parts and fewer than five runs go to
data-part.json.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from bench.common.report import Better, Reach, Row, conclude, report, report_name, table, write_json
from bench.common.samples import Samples
from bench.common.surroundings import Surroundings
from bench.data_load import equivalence, once
from bench.data_load.sides import (
    BATCH,
    OURS,
    OURS_PLAIN,
    SEQ_LEN,
    STATEFUL,
    TORCH,
    TORCH_TOKENS,
    WORLD,
    ArrayWindows,
    open_ours,
    open_torch,
    stateful,
    token_windows,
)
from tests.e2e.data_run import EPOCHS, SAMPLES, STEPS

from elastipod.data.token_format import HEADER_BYTES, TokenHeader
from elastipod.data.tokens import TokenFile, TokenWindows

RUN = Path(__file__).resolve().parents[1] / ".run" / "bench"
PARTS = ("tokens", "resume", "equivalence")
TOKENS = 1 << 26
WORKERS = (0, 2)
STARTS = 4  # of each loader in a repetition: on which processors its processes come to lie makes a great difference
MEASURED_S = 0.5  # after each
RESUME_STEP = 3000
HUGE = 1 << 40
SAME = Reach.ratio(0.99)
SEED = 20240611
_LOADER = f"windows of {SEQ_LEN} two-byte tokens, {BATCH} at a time, rank 0 of {WORLD}, shuffled, pages in memory"


def main() -> int:
    """Give 0 when every row was measured and none was missed, 1 otherwise."""
    options = _options()
    surroundings, samples = Surroundings(), Samples(options.repeat)
    losses: dict[str, dict[int, float]] = {}
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="elastipod-bench-") as name:
        folder = Path(name)
        path = _token_file(folder / "tokens")
        for repetition in range(1, options.repeat + 1):
            print(f"{repetition}/{options.repeat}", flush=True)
            surroundings.await_quiet(options.wait_for_quiet)
            if "tokens" in options.parts:
                _measure_tokens(path, samples, ours_first=repetition % 2 == 0)
            if "resume" in options.parts:
                _measure_resume(path, folder, samples)
            if "equivalence" in options.parts:
                fate, losses, wrong = equivalence.play(folder / f"jobs-{repetition}", SEED + repetition)
                samples.add(once.USUAL, "wrong", once.with_usual_sampler(fate, SEED + repetition))
                for side in ("fixed order", "DDP"):
                    samples.add(side, "loss", max(equivalence.differences(losses, side)))
                    samples.add(side, "wrong", wrong[side])
                if options.image and repetition == options.repeat:
                    equivalence.draw(options.image, fate, losses)
    drawn = [row for row in _rows(samples) if options.parts == list(PARTS) or row.ours]
    machine = surroundings.describe()
    versions = {name: version(name) for name in ("torch", "torchdata", "numpy")}
    name = report_name("data", is_whole=options.parts == list(PARTS), repeat=options.repeat)
    file = RUN / f"{name}.json"
    write_json(RUN / f"{name}-runs.json", {**samples.as_json(), "losses": losses})
    write_json(file, report("data", drawn, machine=machine, load_1m=surroundings.load_1m, versions=versions))
    print(f"\n{table(drawn)}\n\n{machine}; load {surroundings.load_1m:.2f}; {file}")
    surroundings.warn()
    return conclude(drawn)


def _measure_tokens(path: Path, samples: Samples, *, ours_first: bool) -> None:
    """Measure both sides with either dataset; who goes first finds fewer pages mapped, so they take turns."""
    sides = (OURS, TORCH_TOKENS, OURS_PLAIN, TORCH) if ours_first else (TORCH, OURS_PLAIN, TORCH_TOKENS, OURS)
    for workers in WORKERS:
        counted = {side: (0, 0.0) for side in sides}
        for _ in range(STARTS):
            for side in sides:
                tokens, seconds = _load(side, path, workers)
                counted[side] = counted[side][0] + tokens, counted[side][1] + seconds
        for side, (tokens, seconds) in counted.items():
            samples.add(side, f"tokens {workers}", tokens / seconds)


def _load(side: str, path: Path, workers: int) -> tuple[int, float]:
    """Start a loader and give the tokens that came after its first batch, and their seconds."""
    dataset = token_windows(path) if side in (OURS, TORCH_TOKENS) else ArrayWindows(path)
    if side not in (OURS, OURS_PLAIN):
        return _count(open_torch(dataset, workers))
    batches, loader = open_ours(dataset, workers)
    found = _count(batches)
    loader.close()
    return found


def _measure_resume(path: Path, folder: Path, samples: Samples) -> None:
    started = time.perf_counter()
    batches, loader = open_ours(token_windows(path), 0, RESUME_STEP)
    next(batches)
    samples.add(OURS, "resume", time.perf_counter() - started)
    loader.close()
    started = time.perf_counter()
    next(open_torch(ArrayWindows(path), 0, RESUME_STEP))
    samples.add(TORCH, "resume", time.perf_counter() - started)
    state = _state_at(path, RESUME_STEP)
    started = time.perf_counter()
    resumed = stateful(path, 0)
    resumed.load_state_dict(state)
    next(iter(resumed))
    samples.add(STATEFUL, "resume", time.perf_counter() - started)
    for metric, count in (("open", TOKENS), ("open huge", HUGE)):
        file = path if count == TOKENS else _hole(folder / "huge", count)
        started = time.perf_counter()
        windows = TokenWindows(TokenFile(file), SEQ_LEN)
        windows.batch([len(windows) - 1])
        samples.add(OURS, metric, (time.perf_counter() - started) * 1e3)


def _rows(samples: Samples) -> list[Row]:
    rows = [
        Row(
            metric=f"{metric}, {workers} worker processes",
            unit="tokens/s",
            ours=samples.spread(ours, f"tokens {workers}"),
            peer=theirs,
            theirs=samples.spread(theirs, f"tokens {workers}"),
            reach=reach,
            better=Better.LARGER,
            how=f"{_LOADER}; {what}; {STARTS} starts, each {MEASURED_S:g} s, or to the end of the epoch, after the first batch",
        )
        for metric, ours, theirs, reach, what in (
            ("loading tokens", OURS, TORCH, None, "our TokenWindows against what people write by hand"),
            ("loading TokenWindows", OURS, TORCH_TOKENS, SAME, "both with our dataset"),
            ("loading a plain dataset", OURS_PLAIN, TORCH, SAME, "both with windows of a numpy memory map"),
        )
        for workers in WORKERS
    ]
    rows += [
        Row(
            metric=f"first batch after step {RESUME_STEP}",
            unit="s",
            ours=samples.spread(OURS, "resume"),
            peer=peer,
            theirs=samples.spread(peer, "resume"),
            how=f"{_LOADER}; {how}",
        )
        for peer, how in ((TORCH, "the peer reads and drops what came before"), (STATEFUL, "the peer loads its state"))
    ]
    rows += [
        Row(
            metric=f"open a file of {count} tokens",
            unit="ms",
            ours=samples.spread(OURS, name),
            how="and give its last window",
        )
        for name, count in (("open", TOKENS), ("open huge", HUGE))
    ]
    how = f"{STEPS} steps, 10 changes of size among 1 to 4 workers, some of them crashes; largest of all steps"
    rows += [
        Row(
            metric=f"loss of a resized run, {side}",
            unit="relative difference",
            ours=samples.spread(side, "loss"),
            reach=Reach.worst(bound),
            how=how,
        )
        for side, bound in (("fixed order", 0.0), ("DDP", 1e-4))
    ]
    how = (
        f"in the final weights of {EPOCHS} epochs of {SAMPLES} samples, by the audit of the same runs' logs; "
        "the peer through the same changes and crashes, its ranks share the global batch, "
        "and its loop skips the trained batches of the epoch when it resumes"
    )
    rows += [
        Row(
            metric=f"samples lost or repeated, {side}",
            unit="samples",
            ours=samples.spread(side, "wrong"),
            peer=once.USUAL,
            theirs=samples.spread(once.USUAL, "wrong"),
            reach=Reach.worst(0),
            how=how,
        )
        for side in ("fixed order", "DDP")
    ]
    return rows


def _count(batches: Iterator[torch.Tensor]) -> tuple[int, float]:
    next(batches)
    tokens, started = 0, time.perf_counter()
    for windows in batches:
        tokens += windows[:, 1:].numel()
        if time.perf_counter() - started > MEASURED_S:
            break
    return tokens, time.perf_counter() - started


def _state_at(path: Path, step: int) -> dict[str, Any]:
    loader = stateful(path, 0)
    batches = iter(loader)
    for _ in range(step):
        next(batches)
    state: dict[str, Any] = loader.state_dict()
    return state


def _token_file(path: Path) -> Path:
    """Write tokens that no page of which is like another; all of them are in the page cache afterwards."""
    generator = torch.Generator().manual_seed(SEED)
    with open(path, "wb") as file:
        file.write(TokenHeader(2, TOKENS, 1 << 16, 1, 0).encode())
        for _ in range(TOKENS >> 20):
            part = array("H", torch.randint(0, 1 << 16, (1 << 20,), generator=generator).tolist())
            file.write(part.tobytes())
    return path


def _hole(path: Path, count: int) -> Path:
    with open(path, "wb") as file:
        file.write(TokenHeader(1, count, 256, 1, 0).encode())
        file.truncate(HEADER_BYTES + count)
    return path


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.data", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeat", type=int, default=5, help="runs of every side (default: 5)")
    parser.add_argument("--parts", type=_parts, default=list(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument(
        "--wait-for-quiet", type=float, default=30.0, help="maximum seconds to wait before each repetition"
    )
    parser.add_argument("--image", type=Path, help="where to draw the losses, as SVG")
    return parser.parse_args()


def _parts(text: str) -> list[str]:
    chosen = text.split(",")
    if unknown := set(chosen) - set(PARTS):
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}; known are {', '.join(PARTS)}")
    return [part for part in PARTS if part in chosen]


if __name__ == "__main__":
    sys.exit(main())
