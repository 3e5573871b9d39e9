"""The real operator on a real API server with many jobs and pods: starts, creations, and a fleet at rest and in motion.

python -m bench.operator [--jobs 100 --pods 1000 --parts starts,creations,fleet]. Nodes and pods are played by kwok, agents by
one process. Writes .run/bench/operator.json and every single measurement into operator-runs.json; a choice of parts, other
sizes or an interrupted run go to operator-part.json.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import signal
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from bench.common.processes import Failed
from bench.common.report import conclude, report, report_name, table, write_json
from bench.common.samples import Samples
from bench.common.surroundings import Surroundings
from bench.operator_load import parts
from bench.operator_load.load import load
from bench.operator_load.parts import OURS, Sizes
from bench.operator_load.rows import rows

from elastipod_local import versions

RUN = Path(__file__).resolve().parents[1] / ".run" / "bench"
PARTS = {"starts": parts.starts, "creations": parts.creations, "fleet": parts.fleet}
NODES = 60
# What the figures are quoted for. With an event a second something happens to each of a thousand jobs every 17 minutes.
WHOLE = Sizes(starts=(64, 1000, 4000), restart=1000, jobs=1000, pods=10_000, repeat=5, churn=1.0)


def main() -> int:
    """Give 0 when every row was measured and none was missed, 1 otherwise."""
    options = _options()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sizes = Sizes(
        starts=options.starts, restart=options.restart, jobs=options.jobs, pods=options.pods, repeat=options.repeat,
        churn=options.churn,
    )  # fmt: skip
    samples, surroundings = Samples(sizes.repeat), Surroundings()
    is_interrupted = False
    try:
        asyncio.run(_measure(options.parts, sizes, samples, lambda: surroundings.await_quiet(options.wait_for_quiet)))
    except KeyboardInterrupt:
        print("interrupted; all processes are ended", file=sys.stderr)
        is_interrupted = True
    is_whole = options.parts == list(PARTS) and sizes == WHOLE and not is_interrupted
    name = report_name("operator", is_whole=is_whole, repeat=sizes.repeat)
    drawn = rows(samples, sizes, options.parts)
    machine = f"{surroundings.describe()}; shared by API server, etcd, kwok, agents and operator"
    write_json(
        RUN / f"{name}.json", report(name, drawn, machine=machine, load_1m=surroundings.load_1m, versions=_versions())
    )
    write_json(RUN / f"{name}-runs.json", samples.as_json())
    print(f"\n{table(drawn)}\n\n{machine}; load {surroundings.load_1m:.2f}; {RUN / name}.json")
    surroundings.warn()
    return conclude(drawn) or int(is_interrupted)


async def _measure(chosen: list[str], sizes: Sizes, samples: Samples, wait: Callable[[], None]) -> None:
    """Measure each part on a control plane of its own, so that none finds the objects of another; each fleet is new.

    wait: until the machine is quiet, called before each control plane.
    """
    for part in chosen:
        shutil.rmtree(RUN / "operator" / part, ignore_errors=True)
        for number in range(sizes.repeat if part in parts.ONCE else 1):
            folder = RUN / "operator" / part / str(number)
            folder.mkdir(parents=True)
            wait()
            print(f"{part}: starting the control plane", flush=True)
            try:
                async with load(folder, NODES) as it:
                    print(f"{part}: measuring", flush=True)
                    await PARTS[part](it, sizes, samples)
            except Failed as error:
                samples.fail(OURS, part, str(error))
                print(f"    FAILED: {error}", flush=True)


def _versions() -> dict[str, str]:
    return {
        "python": sys.version.split()[0], "kubernetes": versions.KUBERNETES_VERSION, "etcd": versions.ETCD_VERSION,
        "kwok": versions.KWOK_VERSION, **{name: version(name) for name in ("kopf", "kubernetes", "aiohttp")},
    }  # fmt: skip


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.operator", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=100, help="jobs of the fleet (default: 100; with --whole: 1000)")
    parser.add_argument("--pods", type=int, default=1000, help="pods of the fleet (default: 1000; with --whole: 10000)")
    parser.add_argument(
        "--starts",
        type=_numbers,
        default=(64, 1000),
        help="agents that start at once (default: 64,1000; with --whole: 64,1000,4000)",
    )
    parser.add_argument(
        "--restart", type=int, default=1000, help="pods of the job whose pods are recreated (default: 1000)"
    )
    parser.add_argument(
        "--churn",
        type=float,
        default=WHOLE.churn,
        help="events per second in the minute of events (default: 1; each takes about 30 calls)",
    )
    parser.add_argument("--repeat", type=int, default=5, help="runs of each part (default: 5)")
    parser.add_argument("--parts", type=_parts, default=list(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument(
        "--wait-for-quiet", type=float, default=30.0, help="maximum seconds to wait before a control plane starts"
    )
    parser.add_argument(
        "--whole",
        action="store_true",
        help="the sizes of published figures, overriding other options; about two hours",
    )
    options = parser.parse_args()
    if options.whole:
        for name in ("starts", "restart", "jobs", "pods", "repeat", "churn"):
            setattr(options, name, getattr(WHOLE, name))
    return options


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _parts(text: str) -> list[str]:
    chosen = text.split(",")
    if unknown := set(chosen) - set(PARTS):
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}; known are {', '.join(PARTS)}")
    return [one for one in PARTS if one in chosen]


if __name__ == "__main__":
    sys.exit(main())
