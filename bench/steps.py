"""What training makes and costs under our agent while nothing happens: samples a second beside torchrun, and calls in each step.

python -m bench.steps [--repeat 5] [--sizes 1,2,4] [--parts speed,calls]. Writes .run/bench/steps.json, and every single measurement
into steps-runs.json. A choice of sizes or parts and fewer than five runs go to steps-part.json.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
from pathlib import Path

from bench.common.processes import Failed, Processes
from bench.common.report import Better, Reach, Row, Spread, conclude, report, report_name, table, write_json
from bench.common.samples import Samples
from bench.common.surroundings import Surroundings
from bench.launchers.nodes import launchers
from bench.launchers.rows import MEMORY, TORCHRUN, WARM
from bench.launchers.session import Session
from bench.launchers.speed import CallsSession, SpeedSession, speed
from bench.launchers.time_calls import ALL_REDUCE, CALLS, EVENT_CHECK, REPORT
from bench.launchers.train import BATCH, STEP_S
from tests.peers import peer_python

RUN = Path(__file__).resolve().parents[1] / ".run" / "bench"
SIZES, PARTS, SIDES = [1, 2, 4], ["speed", "calls"], (TORCHRUN, WARM, MEMORY)
NO_LOSS = Reach.ratio(0.99)
SHARE_OF_STEP = 0.001  # that a call may cost


def main() -> int:
    """Give 0 when every row was measured and reached what it is to reach."""
    options = _options()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    surroundings = Surroundings()
    python = peer_python("torch211")
    known, samples = launchers(python, python), Samples(options.repeat)
    shutil.rmtree(RUN / "steps", ignore_errors=True)
    for number in range(1, options.repeat + 1):
        folder = RUN / "steps" / str(number)
        sessions: list[Session] = []
        if "speed" in options.parts:
            turns = SIDES if number % 2 else SIDES[::-1]
            sessions += [
                SpeedSession(known[side], size, folder / f"{side}-{size}", samples)
                for size in options.sizes
                for side in turns
            ]
        if "calls" in options.parts:
            sessions.append(CallsSession(known[WARM], folder / "calls", samples))
        for session in sessions:
            print(f"steps {number}/{options.repeat}: {session.folder.name}", flush=True)
            surroundings.await_quiet(options.wait_for_quiet)
            _run(session)
    drawn = rows(samples, options.sizes, options.parts)
    is_whole = (options.sizes, options.parts) == (SIZES, PARTS)
    name = report_name("steps", is_whole=is_whole, repeat=options.repeat)
    machine = surroundings.describe()
    write_json(RUN / f"{name}.json", report(name, drawn, machine=machine, load_1m=surroundings.load_1m, versions={}))
    write_json(RUN / f"{name}-runs.json", samples.as_json())
    print(f"\n{table(drawn)}\n\n{machine}; {RUN / name}.json")
    surroundings.warn()
    return conclude(drawn)


def _run(session: Session) -> None:
    session.folder.mkdir(parents=True)
    with Processes() as processes:
        try:
            (session.run_torchrun if session.launcher.name == TORCHRUN else session.run_agents)(processes)
        except Failed as error:
            print(f"    FAILED: {error}", flush=True)


def rows(samples: Samples, sizes: list[int], parts: list[str]) -> list[Row]:
    """Draw the rows of these parts."""
    found: list[Row] = []
    if "speed" in parts:
        found += _speed_rows(samples, sizes)
    if "calls" in parts:
        found += _call_rows(samples)
    return found


def _speed_rows(samples: Samples, sizes: list[int]) -> list[Row]:
    how = f"{BATCH} samples a rank in a step of {1000 * STEP_S:g} ms sleep and a small model, one worker a node, of the slowest rank"
    found: list[Row] = []
    for side in (WARM, MEMORY):
        beside = "with elastipod.State" if side == MEMORY else "restarted workers, the peer's script"
        for size in sizes:
            found.append(
                Row(
                    metric=f"{speed(size)}, {side}", unit="samples/s", ours=samples.spread(side, speed(size)),
                    peer=TORCHRUN, theirs=samples.spread(TORCHRUN, speed(size)),
                    better=Better.LARGER, reach=NO_LOSS, how=f"{how}; {beside}. {_runs(samples, side, size)}",
                    missing=samples.missing(side, speed(size)),
                )
            )  # fmt: skip
        found += [
            Row(
                metric=f"efficiency at {size}, {side}", unit="%", ours=efficiency(samples, side, size),
                peer=TORCHRUN, theirs=efficiency(samples, TORCHRUN, size), better=Better.LARGER,
                how=f"samples/s over {size} times those of one replica, in each repetition; all replicas share this machine's processors",
            )
            for size in sizes
            if size != 1 and 1 in sizes
        ]  # fmt: skip
    return found


def efficiency(samples: Samples, side: str, size: int) -> Spread | None:
    """Give the share of linear growth, in percent, that each repetition reached; None where one of its runs failed."""
    alone, together = (samples.values.get((side, speed(each)), []) for each in (1, size))
    has_failed = any((side, speed(each)) in samples.failures for each in (1, size))
    if not alone or has_failed or len(alone) != len(together):
        return None
    return Spread.of([100 * all_of / (size * one) for one, all_of in zip(alone, together, strict=True)])


def _call_rows(samples: Samples) -> list[Row]:
    limit_us = 1e6 * STEP_S * SHARE_OF_STEP
    how = f"{CALLS} calls on rank 0 of 2 under the agent, no event pending; the peer: an all-reduce of one number in each step, gloo"
    return [
        Row(
            metric=f"{kind}, {figure}", unit="us", ours=samples.spread(WARM, f"{kind}, {figure}"),
            peer=ALL_REDUCE, theirs=samples.spread(WARM, f"{ALL_REDUCE}, {figure}"),
            reach=Reach.median(limit_us) if figure == "mean" else None, how=how,
            missing=samples.missing(WARM, f"{kind}, {figure}"),
        )
        for kind in (EVENT_CHECK, REPORT)
        for figure in ("mean", "p99")
    ]  # fmt: skip


def _runs(samples: Samples, side: str, size: int) -> str:
    counts = [f"n={len(samples.values.get((each, speed(size)), ()))}" for each in (side, TORCHRUN)]
    failed = [why for each in (side, TORCHRUN) for why in samples.failures.get((each, speed(size)), [])]
    return f"ours: {counts[0]}; theirs: {counts[1]}" + (f"; failed, e.g.: {failed[0][:200]}" if failed else "")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.steps", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeat", type=int, default=5, help="runs of every side (default: 5)")
    parser.add_argument("--sizes", type=lambda text: [int(each) for each in text.split(",")], default=SIZES)
    parser.add_argument("--parts", type=_parts, default=PARTS, help=f"some of {','.join(PARTS)}")
    parser.add_argument("--wait-for-quiet", type=float, default=30.0, help="maximum seconds to wait before each run")
    return parser.parse_args()


def _parts(text: str) -> list[str]:
    chosen = text.split(",")
    if unknown := set(chosen) - set(PARTS):
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}; known are {', '.join(PARTS)}")
    return [one for one in PARTS if one in chosen]


if __name__ == "__main__":
    sys.exit(main())
