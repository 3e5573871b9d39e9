"""Run the tiers of the tests and close with pytest's own last line for each.

Usage: python tests/tiers.py [--long NAME] TIER... [-- pytest arguments]. `make test` calls it. A tier whose tests
cannot run on this machine, or that has none, is named with its reason. Exits 0 only when no tier failed.

The tiers run in several processes (pytest-xdist), those of api and e2e with an API server or a cluster in each, and the e2e
tier in two parts with a line each: its tests of agents alone, and those with a cluster. Several whole tiers run in two lanes
beside each other: what computes, and what mostly waits for API servers and clusters; each line of output names its tier then.
Whoever asks for something of their own (-k, -s, --pdb, a long run) gets one tier after the other, in one process, as pytest
does it.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parent
NO_TESTS_COLLECTED = 5
ON_ALL_CPUS = ("--numprocesses=logical", "--maxprocesses=8", "--dist=worksteal")
FILES_IN_TWO = ("--numprocesses=2", "--dist=loadfile")
AGENTS, CLUSTERS = ("-m", "not cluster", *FILES_IN_TWO), ("-m", "cluster", *FILES_IN_TWO)
SLOWEST = ("--durations=10", "--durations-min=1")  # whole tiers name the tests that they wait for
# The pytest calls of a tier; one without arguments for a tier that is not named.
PARTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "unit": (ON_ALL_CPUS,),
    "sim": (ON_ALL_CPUS,),
    "api": (FILES_IN_TWO,),
    "e2e": (AGENTS, CLUSTERS),
    "chart": (FILES_IN_TWO,),
}
# Which parts follow each other when whole tiers run beside each other; a tier that is not named begins the first lane.
LANES: tuple[tuple[tuple[str, tuple[str, ...]], ...], ...] = (
    (("unit", ON_ALL_CPUS), ("sim", ON_ALL_CPUS), ("e2e", AGENTS)),
    (("e2e", CLUSTERS), ("api", FILES_IN_TWO), ("chart", FILES_IN_TWO)),
)
Say = Callable[[str], None]
CLOSING_LINE = re.compile(r"^=* ?(?:\d+ (?:passed|failed|skipped|errors?|deselected)|no tests ran)\b.* in [0-9.]+s.*$")
COUNTED = re.compile(r"(\d+) (passed|failed|skipped|errors?|xfailed)")
FAILED_LINE = re.compile(r"^(?:FAILED|ERROR) \S+::\S+")
SECONDS = re.compile(r"in ([0-9.]+)s")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one tier ended: its name, whether nothing failed, the lines that say so, and whether there was a test to run."""

    tier: str
    ok: bool
    line: str
    has_tests: bool = True


def run_tier(tier: str, arguments: Sequence[str]) -> Outcome:
    """Run one tier with pytest, its output passed on as it comes."""
    if without := _without_tests(tier, is_ok=bool(arguments)):
        return without
    if not arguments and (failed := _prepare(tier)):
        return Outcome(tier, False, failed)
    parts = [arguments] if arguments else PARTS.get(tier, ((),))
    return _outcome(tier, [_run_part(tier, part, is_whole=not arguments) for part in parts], is_whole=not arguments)


def run_beside_each_other(tiers: Sequence[str]) -> list[Outcome]:
    """Run whole tiers in lanes; lines of output begin with the name of their tier."""
    outcomes = {tier: without for tier in tiers if (without := _without_tests(tier, is_ok=False))}
    for tier in tiers:
        if tier not in outcomes and (failed := _prepare(tier)):
            outcomes[tier] = Outcome(tier, False, failed)
    to_run = [tier for tier in tiers if tier not in outcomes]
    lanes = [[(tier, part) for tier, part in lane if tier in to_run] for lane in LANES]
    named = {tier for lane in LANES for tier, _ in lane}
    lanes[0][:0] = [(tier, part) for tier in to_run if tier not in named for part in PARTS.get(tier, ((),))]
    ends: dict[str, list[tuple[int, str]]] = {tier: [] for tier in to_run}
    is_stopped = threading.Event()

    def follow(lane: list[tuple[str, tuple[str, ...]]]) -> None:
        for tier, part in lane:
            if not is_stopped.is_set():
                _say(f"--- {tier} ---")
                ends[tier].append(_run_part(tier, part, say=lambda line, tier=tier: _say(f"{tier:5} | {line}")))  # type: ignore[misc]

    with ThreadPoolExecutor(len(lanes)) as pool:
        runs = [pool.submit(follow, lane) for lane in lanes]
        try:
            for run in runs:
                run.result()
        except KeyboardInterrupt:
            is_stopped.set()  # pytest got the signal too and takes its clusters down
            raise
    return [outcomes.get(tier) or _outcome(tier, ends[tier]) for tier in tiers]


def _without_tests(tier: str, *, is_ok: bool) -> Outcome | None:
    folder = TESTS / tier
    if any(folder.rglob("test_*.py")):
        return None
    return Outcome(tier, is_ok, f"skipped: there is no test in {folder.relative_to(TESTS.parent)}", has_tests=False)


def _run_part(tier: str, part: Sequence[str], *, is_whole: bool = True, say: Say | None = None) -> tuple[int, str]:
    return _run_pytest([str(TESTS / tier), *part, *(SLOWEST if is_whole else ())], say or _say)


def _outcome(tier: str, ends: Sequence[tuple[int, str]], *, is_whole: bool = True) -> Outcome:
    """Say how a tier ended whose parts ended so. A whole one has tests in each; only who selects some may find none here."""
    has_tests = [status != NO_TESTS_COLLECTED for status, _ in ends]
    ok = all(status == 0 or (not is_whole and status == NO_TESTS_COLLECTED) for status, _ in ends)
    return Outcome(tier, ok, "\n".join(line for _, line in ends), any(has_tests))


def _prepare(tier: str) -> str:
    """Fetch and build what the tier needs, shown here; its own processes would do it in silence. Give what failed."""
    from tests.conftest import why_no_cluster
    from tests.preparation import prepare_tier

    from elastipod_local.errors import LocalClusterError

    try:
        if why_no_cluster() is None:
            prepare_tier(tier, progress=_say)
    except LocalClusterError as failed:
        return str(failed)
    return ""


def _announce(tiers: Sequence[str]) -> None:
    from tests.conftest import why_no_cluster
    from tests.preparation import announce_tiers

    if why_no_cluster() is None:
        announce_tiers(tiers, _say)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")  # at once: lines of two lanes must not mix
    sys.stdout.flush()


def _run_pytest(arguments: Sequence[str], say: Say) -> tuple[int, str]:
    """Run pytest; gives its exit status, and the lines that say what failed and how it ended. say: shows each other line."""
    command = [sys.executable, "-m", "pytest", "--color=no", *arguments]
    closing = ""
    failed: list[str] = []
    started = time.monotonic()
    with subprocess.Popen(command, cwd=TESTS.parent, stdout=subprocess.PIPE, text=True, errors="replace") as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if CLOSING_LINE.match(line):
                    closing = line.rstrip()  # shown once, at the very end
                    continue
                say(line.rstrip("\n"))
                failed += FAILED_LINE.findall(line)  # shown again at the very end
        except KeyboardInterrupt:
            process.wait()  # pytest got the signal too and takes its clusters down
            raise
    if process.returncode == NO_TESTS_COLLECTED:
        return process.returncode, "skipped: no test was selected"
    passed_s = time.monotonic() - started
    ended = closing or f"pytest ended with {process.returncode} after {passed_s:.0f} s without a summary"
    return process.returncode, "\n".join([*failed, ended])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the named tiers; give 0 when none failed, 1 otherwise, 2 when no test was named, 130 on Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--long", metavar="NAME", help="run the long test of this name only; empty: every long test")
    parser.add_argument("tiers", nargs="+", metavar="TIER")
    own, rest = _split(sys.argv[1:] if argv is None else list(argv))
    options = parser.parse_args(own)
    arguments = [*rest] if options.long is None else [f"--long={options.long}", *rest]
    outcomes: list[Outcome] = []
    run_whole = not arguments
    sys.path.insert(0, str(TESTS.parent))
    if options.long and (unknown := _unknown_long_run(options.long)):
        print(unknown, file=sys.stderr)
        return 2
    try:
        if not arguments:
            _announce(options.tiers)
        if run_whole and len(options.tiers) > 1:
            outcomes = run_beside_each_other(options.tiers)
        else:
            for tier in options.tiers:
                _say(f"\n--- {tier} ---")
                outcomes.append(run_tier(tier, arguments))
        for outcome in outcomes if run_whole else ():
            _write_report(outcome)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    print()
    for outcome in outcomes:
        print(f"{outcome.tier}\n{outcome.line}")
    if not any(outcome.has_tests for outcome in outcomes):
        print("no test was selected in any of these tiers", file=sys.stderr)
        return 2
    return 0 if all(outcome.ok for outcome in outcomes) else 1


def _unknown_long_run(name: str) -> str:
    """Say what there is in place of a long run that does not exist; empty for one that does."""
    from tests.long_runs import long_names

    names = long_names()
    return "" if name in names else f"there is no long run {name!r}; there are {', '.join(names)}"


def _write_report(outcome: Outcome) -> None:
    """Keep what the closing lines of a whole tier count, in .run/tests/<tier>.json, for tests/proven.py."""
    from tests.commit_under_test import commit_under_test

    counts: Counter[str] = Counter()
    seconds = 0.0
    for line in filter(CLOSING_LINE.match, outcome.line.splitlines()):
        counts.update({kind.rstrip("s"): int(number) for number, kind in COUNTED.findall(line)})
        seconds += float(SECONDS.findall(line)[-1])
    folder = TESTS.parent / ".run" / "tests"
    folder.mkdir(parents=True, exist_ok=True)
    report = {
        "tier": outcome.tier,
        "ok": outcome.ok,
        "counts": counts,
        "seconds": round(seconds, 1),
        "commit": commit_under_test(),
    }
    (folder / f"{outcome.tier}.json").write_text(json.dumps(report, indent=2) + "\n")


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Part our own arguments from those after `--`, which belong to pytest."""
    if "--" not in argv:
        return argv, []
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]


if __name__ == "__main__":
    sys.exit(main())
