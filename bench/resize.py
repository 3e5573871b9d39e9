"""How long a resize, a crash and a hang stop a training in memory: by the size of the state, and beside peers.

python -m bench.resize [--parts compared,sizes,sharded,costs] [--sizes 1,10,100,400] [--repeat 5]. Writes .run/bench/resize.json, and every
single measurement, those of the phases included, into resize-runs.json. A choice of parts or sizes and fewer than five runs go to
resize-part.json.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import linear_regression

from bench.common.options import some_of
from bench.common.processes import Failed, Processes
from bench.common.report import Reach, Row, Spread, conclude, report, report_name, table, write_json
from bench.common.samples import Samples
from bench.common.surroundings import Surroundings
from bench.launchers.compared import SIDES, ComparedSession, compared_rows
from bench.launchers.nodes import launchers, sized
from bench.launchers.resizing import COST, GROW, SHRINK, CostSession, ResizeSession, ShardedSession
from bench.launchers.rows import TUNED
from bench.launchers.session import Session
from tests.peers import peer_python

RUN = Path(__file__).resolve().parents[1] / ".run" / "bench"
SIZES = [1.0, 10.0, 100.0, 400.0]  # MB of weights and moments
SMALL = 1.0
MOVED_MB = 10.0  # of the sharded state
COMPARED, BY_SIZE, MOVED, COSTS = "compared", "sizes", "sharded", "costs"
PARTS = (COMPARED, BY_SIZE, MOVED, COSTS)
SHARDED = {"fsdp2": "FSDP2, without copies", "copies": "FSDP2, a copy in every step"}
NUM_NEWCOMERS = 2
REACH_SLOPE, REACH_BYTES, REACH_COST = 0.2, 1.2, 0.01
REACH_PAUSE = {GROW: 0.10, SHRINK: 0.06}  # seconds, with a state of 1 MB


def main() -> int:
    """Give 0 when every row was measured and reached what it is to reach."""
    options = _options()
    surroundings = Surroundings()
    samples = Samples(options.repeat)
    shutil.rmtree(RUN / "resize", ignore_errors=True)
    for repetition in range(1, options.repeat + 1):
        for session in _sessions(options, RUN / "resize" / str(repetition), samples):
            print(f"resize {repetition}/{options.repeat}: {session.launcher.name}", flush=True)
            surroundings.await_quiet(options.wait_for_quiet)
            _run(session)
    rows = _rows(samples, options.parts, options.sizes)
    is_whole = options.sizes == SIZES and options.parts == list(PARTS)
    name = report_name("resize", is_whole=is_whole, repeat=options.repeat)
    machine = surroundings.describe()
    write_json(RUN / f"{name}.json", report(name, rows, machine=machine, load_1m=surroundings.load_1m, versions={}))
    write_json(RUN / f"{name}-runs.json", samples.as_json())
    print(f"\n{table(rows)}\n\n{machine}; {RUN / name}.json")
    surroundings.warn()
    return conclude(rows)


def _sessions(options: argparse.Namespace, folder: Path, samples: Samples) -> Iterator[Session]:
    """Give the sessions of one repetition. The sides of the comparison come first, one after the other."""
    python = peer_python("torch211")
    if COMPARED in options.parts:
        known = launchers(python, peer_python("original"))
        for side in SIDES:
            yield ComparedSession(known[side], folder / side, samples)
    if BY_SIZE in options.parts:
        for size in options.sizes:
            yield ResizeSession(sized(python, size), folder / f"{size:g}", samples)
    if MOVED in options.parts:
        yield ShardedSession(replace(sized(python, MOVED_MB, "fsdp2"), name=MOVED), folder / MOVED, samples)
    if COSTS in options.parts:
        for kind in SHARDED:
            yield CostSession(sized(python, SMALL, kind), folder / kind, samples)


def _run(session: Session) -> None:
    session.folder.mkdir(parents=True)
    with Processes() as processes:
        try:
            (session.run_torchrun if session.launcher.name == TUNED else session.run_agents)(processes)
        except Failed as error:
            print(f"    FAILED: {error}", flush=True)


def _rows(samples: Samples, parts: list[str], sizes: list[float]) -> list[Row]:
    rows: list[Row] = []
    if COMPARED in parts:
        rows += compared_rows(samples)
    if BY_SIZE in parts:
        rows += _rows_by_size(samples, sizes)
    if MOVED in parts:
        rows += [_moved_row(samples, name) for name in (GROW, SHRINK)]
    if COSTS in parts:
        rows += [_cost_row(samples, side, what) for side, what in SHARDED.items()]
    return rows


def _rows_by_size(samples: Samples, sizes: list[float]) -> list[Row]:
    gap = "last step of the old world to the first of the new one"
    rows: list[Row] = []
    for name in (GROW, SHRINK):
        pause = f"pause, {name}"
        for size in sizes:
            side = f"{size:g} MB"
            rows.append(
                Row(
                    metric=f"{pause}, {side}", unit="s", ours=samples.spread(side, pause),
                    reach=Reach.median(REACH_PAUSE[name]) if size == SMALL else None,
                    how=f"{gap}, less a usual step", missing=samples.missing(side, pause),
                )
            )  # fmt: skip
        for metric in (name, pause):
            reach = Reach.median(REACH_SLOPE) if metric == f"pause, {GROW}" else None
            how = "least squares over log(size), log(time) of each repetition"
            rows.append(
                Row(metric=f"slope, {metric}", unit="", ours=_slopes(samples, sizes, metric), reach=reach, how=how)
            )
    for size in sizes:
        side = f"{size:g} MB"
        how = "bytes sent to fill newcomers, over one state for each of them"
        rows.append(_bytes_row(samples, size, "moved in the pause", f"{GROW}, sent", Reach.worst(REACH_BYTES), how))
        how = "bytes that newcomers get from donors before: the state, and then the gradients of each step; over one state for each of them"
        rows.append(_bytes_row(samples, size, "moved by following", f"{GROW}, followed", None, how))
        metric = "step while newcomers are prepared, ratio"
        how = "median step of the old world, from /prepare to the end of its work, over that before"
        rows.append(
            Row(
                metric=f"{metric}, {side}",
                unit="x",
                ours=samples.spread(side, metric),
                how=how,
                missing=samples.missing(side, metric),
            )
        )
    rows.append(_cost_row(samples, f"{sizes[0]:g} MB", "DDP, nobody follows"))
    how = "what the thread that trains does for followers in a step, over 50 ms, while somebody follows it"
    for size in sizes:
        cost = samples.spread(f"{size:g} MB", "cost of following")
        rows.append(Row(metric=f"cost of following, {size:g} MB", unit="x", ours=cost, how=how))
    return rows


def _bytes_row(samples: Samples, size: float, what: str, metric: str, reach: Reach | None, how: str) -> Row:
    side = f"{size:g} MB"
    moved = samples.values.get((side, metric))
    shares = Spread.of([each / (NUM_NEWCOMERS * size * 1e6) for each in moved]) if moved else None
    missing = samples.missing(side, metric)
    return Row(metric=f"bytes {what}, {side}", unit="x", ours=shares, reach=reach, how=how, missing=missing)


def _moved_row(samples: Samples, name: str) -> Row:
    how = "bytes of tensors sent in the hand-over and to fill ranks, over those that each rank of the new world lacks of its part"
    return Row(
        metric=f"bytes moved, FSDP2, {name}", unit="x", ours=samples.spread(MOVED, f"{name}, moved"),
        reach=Reach.worst(REACH_BYTES), how=f"{how}; {MOVED_MB:g} MB, without copies",
        missing=samples.missing(MOVED, f"{name}, moved"),
    )  # fmt: skip


def _cost_row(samples: Samples, side: str, what: str) -> Row:
    how = f"what State does from one script's block to the next, beside the optimizer's step, over 50 ms; 2 ranks, 1 MB; {what}"
    return Row(
        metric=f"{COST}, {what}", unit="x", ours=samples.spread(side, COST), reach=Reach.median(REACH_COST), how=how,
        missing=samples.missing(side, COST),
    )  # fmt: skip


def _slopes(samples: Samples, sizes: list[float], metric: str) -> Spread | None:
    """Give the slope of log time over log size, of each repetition; None where one failed or there is one size only."""
    values = [samples.values.get((f"{size:g} MB", metric), []) for size in sizes]
    if len(sizes) < 2 or len({len(each) for each in values}) != 1:
        return None
    logs = [math.log(size) for size in sizes]
    found = [
        linear_regression(logs, [math.log(max(each, 1e-3)) for each in times]).slope
        for times in zip(*values, strict=True)
    ]
    return Spread.of(found) if found else None


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.resize", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", type=lambda text: [float(each) for each in text.split(",")], default=SIZES)
    parser.add_argument("--parts", type=some_of(PARTS), default=list(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--repeat", type=int, default=5, help="runs of every side (default: 5)")
    parser.add_argument("--wait-for-quiet", type=float, default=30.0, help="maximum seconds to wait before each run")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
