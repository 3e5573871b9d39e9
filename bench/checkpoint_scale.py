"""How agreeing on a checkpoint's plan grows with the ranks: 64 to 1,024 simulated ones, threads that speak through memory.

python -m bench.checkpoint_scale [--ranks 64,256,1024] [--tensors 900]. Writes .run/bench/checkpoint_scale.json; other numbers or
fewer than five runs go to checkpoint_scale-part.json. There is no network and no gloo in it: it counts processor time, bytes and
connections of the ranks that have most of them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.common.report import Reach, Row, Spread, conclude, report, report_name, table, write_json
from bench.common.surroundings import Surroundings

RUN = Path(__file__).resolve().parents[1] / ".run" / "bench"
RANKS, TENSORS = [64, 256, 1024], 900
PEER = "everybody's JSON on every rank"


def main() -> int:
    options = _options()
    surroundings = Surroundings()
    surroundings.await_quiet(options.wait_for_quiet)
    rows: list[Row] = []
    for ranks in options.ranks:
        print(f"checkpoint_scale: {ranks} simulated ranks", flush=True)
        found: dict[str, list[dict[str, Any]]] = {
            case: [_measured(case, ranks, options.tensors) for _ in range(options.repeat)]
            for case in ("plan", "flat", "words")
        }
        rows += _rows(ranks, options.tensors, found)
    RUN.mkdir(parents=True, exist_ok=True)
    content = report(
        "checkpoint_scale",
        rows,
        machine=surroundings.describe(),
        load_1m=surroundings.load_1m,
        versions={"python": sys.version.split()[0]},
    )
    is_whole = (options.ranks, options.tensors) == (RANKS, TENSORS)
    name = report_name("checkpoint_scale", is_whole=is_whole, repeat=options.repeat)
    write_json(RUN / f"{name}.json", content)
    print(table(rows))
    surroundings.warn()
    return conclude(rows)


def _rows(ranks: int, tensors: int, found: dict[str, list[dict[str, Any]]]) -> list[Row]:
    how = f"{ranks} simulated ranks of FSDP, {tensors} tensors; "

    def spread(case: str, *path: str, unit: float = 1.0) -> Spread:
        values: list[float] = []
        for each in found[case]:
            for name in path:
                each = each[name]
            values.append(float(each) / unit)  # type: ignore[arg-type]
        return Spread.of(values)

    def work(name: str) -> Spread:
        """Of a rank but 0: its part in the agreement, and reading the plan."""
        return Spread.of([each["others"][name] + each["reading"]["cpu_s"] for each in found["plan"]])

    def row(metric: str, unit: str, ours: Spread, theirs: Spread | None, note: str, reach: Reach | None = None) -> Row:
        peer = PEER if theirs else ""
        return Row(
            metric=f"{metric}, {ranks} ranks",
            unit=unit,
            ours=ours,
            peer=peer,
            theirs=theirs,
            reach=reach,
            how=how + note,
        )

    mb = 1e6
    flat_s, flat_mb = spread("flat", "cpu_s"), spread("flat", "memory_bytes", unit=mb)
    flat_got, flat_links = spread("flat", "got_bytes", unit=mb), spread("flat", "connections")
    zero_s, zero_got = spread("plan", "rank_0", "cpu_s"), spread("plan", "rank_0", "got_bytes", unit=mb)
    other_got = spread("plan", "others", "got_bytes", unit=mb)
    other_mb = spread("plan", "reading", "memory_bytes", unit=mb)
    links = spread("plan", "others", "connections", unit=0.5)  # of two groups: one for each kind of thread
    words_s, words_got = spread("words", "rank_0", "cpu_s", unit=1e-3), spread("words", "others", "got_bytes", unit=1e3)
    return [
        row("plan: processor, rank 0", "s", zero_s, flat_s, "all that it does", Reach.ratio(2)),
        row(
            "plan: processor, another rank",
            "s",
            work("cpu_median_s"),
            flat_s,
            "its part in the agreement, the median of all, and reading the plan",
            Reach.ratio(20),
        ),
        row(
            "plan: processor, the busiest other rank",
            "s",
            work("cpu_s"),
            flat_s,
            "the same of a leader, which speaks for its node",
            Reach.ratio(2),
        ),
        row("plan: heard, rank 0", "MB", zero_got, flat_got, "bytes that arrive", Reach.ratio(20)),
        row("plan: heard, another rank", "MB", other_got, flat_got, "bytes that arrive, the most", Reach.ratio(20)),
        row("plan: memory, another rank", "MB", other_mb, flat_mb, "while it has the plan", Reach.ratio(10)),
        row("connections of a rank", "", links, flat_links, "the most, in both groups"),
        row("three facts: processor, rank 0", "ms", words_s, None, "as before every copy"),
        row("three facts: heard, another rank", "kB", words_got, None, "the most: a leader"),
    ]


def _measured(case: str, ranks: int, tensors: int) -> dict[str, Any]:
    """Run a case in a process of its own."""
    command = [sys.executable, "-m", "bench.many_ranks.cases", case, str(ranks), str(tensors)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=900)
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=lambda text: [*map(int, text.split(","))], default=RANKS)
    parser.add_argument("--tensors", type=int, default=TENSORS, help="tensors of model and optimizer together")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--wait-for-quiet", type=float, default=30.0, help="maximum seconds to wait before the run")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
