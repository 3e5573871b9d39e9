"""Where the pause of a change goes, part by part: real agents and workers of examples/lm as the demo runs them, without a cluster.

python -m bench.restart [--repeat 5] [--sides process,checkpoints,former,memory,crash] [--page docs/design/in-memory-measured.md]. Writes
.run/bench/restart.json, and all that was noted into restart-spans.json; a choice of sides and fewer than five runs go to
restart-part.json. --page writes the table of the parts into a page, between its marks.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

from bench.common.processes import Failed, Processes
from bench.common.report import Reach, Row, Spread, conclude, report, report_name, table, write_json
from bench.common.samples import Samples
from bench.common.surroundings import Surroundings
from bench.pauses.lm_session import LmSession
from bench.pauses.parts import CRASH, IN_MEMORY, NEW_PROCESSES, WITHOUT_STATE, Mark, Pause, parts_of
from bench.pauses.versions import FORMER_COMMIT, PRESENT, former_version

ROOT = Path(__file__).resolve().parents[1]
RUN = ROOT / ".run" / "bench"
MEMORY = Path("/dev/shm/elastipod-bench-restart")  # noqa: S108 a memory file system, as in a pod
FORMER = "former"  # new processes too, of the version before
SIDES = {
    "process": "new processes",
    "checkpoints": "new processes without State",
    FORMER: "new processes, former version",
    "memory": "in memory",
    "crash": "crash",
}
MARKS: dict[str, tuple[Mark | str, ...]] = {
    "new processes, 2 -> 4": NEW_PROCESSES,
    "new processes, 4 -> 2": NEW_PROCESSES,
    "new processes without State, 2 -> 4": WITHOUT_STATE,
    "new processes without State, 4 -> 2": WITHOUT_STATE,
    "in memory, 2 -> 4": IN_MEMORY,
    "in memory, 4 -> 2": IN_MEMORY,
    "crash, 2 -> 2": CRASH,
}
REACH = {
    "new processes, 2 -> 4": 0.4,
    "new processes, 4 -> 2": 0.4,
    "new processes without State, 2 -> 4": 0.4,
    "crash, 2 -> 2": 0.3,
}
# The demo of the former version took 0.95 s from 2 to 4, with a script without State, in an hour as fast as the one that 0.4 s is for.
TIMES_BETTER = {"new processes, 2 -> 4": 0.95 / 0.4, "new processes without State, 2 -> 4": 0.95 / 0.4}
OF_FORMER = {
    f"{side}, {change}": f"new processes, {change}"
    for side in ("new processes", "new processes without State")
    for change in ("2 -> 4", "4 -> 2")
}
BEGIN, END = "<!-- bench restart: begin -->", "<!-- bench restart: end -->"


def main() -> int:
    """Give 0 when every row was measured and reached what it is to reach."""
    options = _options()
    surroundings, samples = Surroundings(), Samples(options.repeat)
    found: list[Pause] = []
    shutil.rmtree(RUN / "restart", ignore_errors=True)
    for repetition in range(1, options.repeat + 1):
        for side in options.sides:
            print(f"restart {repetition}/{options.repeat}: {SIDES[side]}", flush=True)
            surroundings.await_quiet(options.wait_for_quiet)
            found += _run(RUN / "restart" / f"{repetition}-{side}", side, samples)
    rows = _rows(samples, options.sides)
    machine = surroundings.describe()
    name = report_name("restart", is_whole=options.sides == list(SIDES), repeat=options.repeat)
    write_json(RUN / f"{name}.json", report(name, rows, machine=machine, load_1m=surroundings.load_1m, versions={}))
    write_json(RUN / f"{name}-spans.json", [asdict(each) for each in found])
    print(f"\n{table(rows)}\n\n{machine}; {RUN / name}.json")
    surroundings.warn()
    if options.page is not None:
        _write_into(options.page, found, samples, machine)
    return conclude(rows)


def _run(folder: Path, side: str, samples: Samples) -> list[Pause]:
    """Give the pauses of one life. Those of the former version go into the samples only: of these, no parts are noted."""
    folder.mkdir(parents=True)
    shutil.rmtree(MEMORY, ignore_errors=True)
    is_former = side == FORMER
    whose = FORMER if is_former else "ours"
    session = LmSession(folder, MEMORY)
    try:
        version = former_version(folder / "version") if is_former else PRESENT
        with Processes() as processes:
            session.run(processes, "process" if is_former else side, version)
    except Failed as error:
        samples.fail(whose, side, str(error))
        print(f"    FAILED: {error}", flush=True)
    finally:
        shutil.rmtree(MEMORY, ignore_errors=True)
    for pause in session.found:
        samples.add(whose, pause.kind, pause.pause_s)
        print(f"    {pause.kind}: {pause.pause_s:.3f}", flush=True)
        if not is_former:
            for name, seconds in parts_of(pause, MARKS[pause.kind]):
                samples.add(pause.kind, name, seconds)
    return [] if is_former else session.found


def _rows(samples: Samples, sides: Sequence[str]) -> list[Row]:
    rows: list[Row] = []
    for kind, marks in MARKS.items():
        if not any(kind.startswith(f"{SIDES[side]}, ") for side in sides):
            continue
        reach = Reach.median(REACH[kind]) if kind in REACH else None
        how = "examples/lm under real agents, beyond a usual step; without operator and cluster"
        rows.append(
            Row(
                metric=f"pause, {kind}",
                unit="s",
                ours=samples.spread("ours", kind),
                reach=reach,
                how=how,
                missing=samples.missing("ours", kind),
            )
        )
        if FORMER in sides and kind in OF_FORMER:
            rows.append(
                Row(
                    metric=f"pause, {kind}, beside the former version",
                    unit="s",
                    ours=samples.spread("ours", kind),
                    peer=f"version {FORMER_COMMIT}",
                    theirs=samples.spread(FORMER, OF_FORMER[kind]),
                    reach=Reach.ratio(TIMES_BETTER[kind]) if kind in TIMES_BETTER else None,
                    how="the last version in which each change ended all workers, in turns with this one",
                    missing=samples.missing("ours", kind),
                )
            )
        rows += [
            Row(
                metric=f"{kind}: {name}",
                unit="s",
                ours=samples.spread(kind, name),
                how="a part of this pause",
                missing=samples.missing(kind, name),
            )
            for name in (mark if isinstance(mark, str) else mark.name for mark in marks)
        ]
    return rows


def _write_into(page: Path, found: Sequence[Pause], samples: Samples, machine: str) -> None:
    """Replace what stands between the marks of a page. Raises ValueError when it has none."""
    before, rest = page.read_text("utf-8").split(BEGIN)
    _, after = rest.split(END)
    page.write_text(f"{before}{BEGIN}\n{_markdown(found, samples, machine)}\n{END}{after}", "utf-8")


def _markdown(found: Sequence[Pause], samples: Samples, machine: str) -> str:
    """Give a table for each group of changes that have the same parts: milliseconds, medians."""
    texts = [f"Medians in milliseconds. {machine}."]
    for marks in (NEW_PROCESSES, WITHOUT_STATE, IN_MEMORY, CRASH):
        of_kind = {kind: [each for each in found if each.kind == kind] for kind in MARKS if MARKS[kind] is marks}
        measured = {kind: pauses for kind, pauses in of_kind.items() if pauses}
        if not measured:
            continue
        lines = [f"| part | {' | '.join(measured)} |", "|---" * (1 + len(measured)) + "|"]
        parts = {kind: [dict(parts_of(each, marks)) for each in pauses] for kind, pauses in measured.items()}
        for mark in marks:
            name = mark if isinstance(mark, str) else mark.name
            cells = [f"{1000 * median(each[name] for each in of):.0f}" for of in parts.values()]
            lines.append(f"| {name} | {' | '.join(cells)} |")
        lines.append(_whole("pause", [samples.spread("ours", kind) for kind in measured]))
        former = [samples.spread(FORMER, OF_FORMER[kind]) for kind in measured if kind in OF_FORMER]
        if any(former):
            lines.append(_whole(f"pause of version {FORMER_COMMIT}", former))
        texts.append("\n".join(lines))
    return "\n\n".join(texts)


def _whole(name: str, spreads: Sequence[Spread | None]) -> str:
    cells = [
        f"{1000 * each.median:.0f} ({1000 * each.min:.0f} to {1000 * each.max:.0f}, n={each.runs})" if each else ""
        for each in spreads
    ]
    return f"| **{name}** | {' | '.join(cells)} |"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.restart", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeat", type=int, default=5, help="runs of every side (default: 5)")
    parser.add_argument("--sides", type=lambda text: text.split(","), default=list(SIDES), help=f"of {','.join(SIDES)}")
    parser.add_argument("--page", type=Path, help="a page with the marks between which the table is written")
    parser.add_argument("--wait-for-quiet", type=float, default=30.0, help="maximum seconds to wait before each run")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
