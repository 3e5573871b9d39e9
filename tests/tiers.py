"""Run the tiers of the tests and close with pytest's own last line for each.

Usage: python tests/tiers.py [--quick | --long NAME] TIER... [-- pytest arguments]. `make test` calls it. A tier whose tests
cannot run on this machine, or that has none, is named with its reason. Exits 0 only when no tier failed.

The tiers run in several processes (pytest-xdist), those of api and e2e with an API server or a cluster in each, and the e2e
tier in two parts with a line each: its tests of agents alone, and those with a cluster. Several whole tiers run in lanes
beside each other, the unit tests in a lane for each processor with a share of the files; each line of output names its tier
then. The tests of a lane with an API server, a cluster or agents wait much; what only computes fills the processors
meanwhile, in lanes of lower priority. `lint` is no tier of tests but `make lint`.
Whoever asks for something of their own (-k, -s, --pdb, a long run) gets one tier after the other, in one process, as pytest
does it. The few tests that failed beside others are repeated alone (`tests/flaky.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

TESTS = Path(__file__).resolve().parent
NO_TESTS_COLLECTED = 5
ON_ALL_CPUS = ("--numprocesses=logical", "--maxprocesses=8", "--dist=worksteal")
# In the order of their names: the default begins with the files of most tests, and ends with one long test that has a file.
FILES_IN_TWO = ("--numprocesses=2", "--dist=loadfile", "--no-loadscope-reorder")
AGENTS, CLUSTERS = ("-m", "not cluster", *FILES_IN_TWO), ("-m", "cluster", *FILES_IN_TWO)
ONE_CLUSTER = ("-m", "cluster")  # a second one takes more of two processors than the few quick tests that it would have
SLOWEST = ("--durations=10", "--durations-min=1")  # whole tiers name the tests that they wait for
# The pytest calls of a tier; one without arguments for a tier that is not named.
PARTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "unit": (ON_ALL_CPUS,),
    "sim": (ON_ALL_CPUS,),
    "api": (FILES_IN_TWO,),
    "e2e": (AGENTS, CLUSTERS),
    "chart": (FILES_IN_TWO,),
}
LINT = "lint"
MOST_SHARES = 8
Lane = tuple[tuple[str, tuple[str, ...]], ...]
YIELDING = ("nice", "-n", "10")  # before the commands of tiers that only compute
COMPUTES = ("unit", "sim")
Say = Callable[[str], None]
CLOSING_LINE = re.compile(r"^=* ?(?:\d+ (?:passed|failed|skipped|errors?|deselected)|no tests ran)\b.* in [0-9.]+s.*$")
COUNTED = re.compile(r"(\d+) (passed|failed|skipped|errors?|xfailed)")
FAILED = 1  # the exit status of pytest when tests failed, and nothing else
SECONDS = re.compile(r"in ([0-9.]+)s")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one tier ended: its name, whether nothing failed, the lines that say so, and whether there was a test to run.

    failed: the tests that failed, if nothing else did. flaky: those of them that passed when they were repeated alone.
    """

    tier: str
    ok: bool
    line: str
    has_tests: bool = True
    failed: tuple[str, ...] = ()
    flaky: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ended:
    """How one call of pytest ended: its exit status, its closing line, and the tests that failed."""

    status: int
    line: str
    failed: tuple[str, ...] = ()


def lanes_of(cpus: int, *, is_quick: bool) -> tuple[Lane, ...]:
    """Give which parts follow each other when whole tiers run beside each other; a tier that is not named begins the first lane.

    Of the unit tests each lane has a share of the files: pytest-xdist would collect all of them in each process, and takes
    half as much time for the reports of these thousands of short tests as the tests themselves.
    """
    shares = min(cpus, MOST_SHARES)
    first, *others = [("unit", (f"--share={number}/{shares}",)) for number in range(1, shares + 1)]
    agents, api, chart = ("e2e", AGENTS), ("api", FILES_IN_TWO), ("chart", FILES_IN_TWO)
    computing: tuple[Lane, ...] = ((first, ("sim", ON_ALL_CPUS)), *((share,) for share in others))
    if is_quick:
        return (*computing, (agents, api), ((LINT, ()), ("e2e", ONE_CLUSTER), chart))
    return (*computing, (agents,), ((LINT, ()), ("e2e", CLUSTERS), api, chart))


def run_tier(tier: str, arguments: Sequence[str]) -> Outcome:
    """Run one tier with pytest, its output passed on as it comes."""
    if tier == LINT:
        return _lint(_say)
    if without := _without_tests(tier, is_ok=bool(arguments)):
        return without
    if not arguments and (failed := _prepare(tier)):
        return Outcome(tier, False, failed)
    parts = [arguments] if arguments else PARTS.get(tier, ((),))
    return _outcome(tier, [_run_part(tier, part, is_whole=not arguments) for part in parts], is_whole=not arguments)


def run_beside_each_other(tiers: Sequence[str], *, is_quick: bool = False) -> list[Outcome]:
    """Run tiers in lanes, without their slow tests if it shall be quick; lines of output begin with the name of their tier."""
    quick = ("--quick",) if is_quick else ()
    of_tests = [tier for tier in tiers if tier != LINT]
    outcomes = {tier: without for tier in of_tests if (without := _without_tests(tier, is_ok=False))}
    for tier in of_tests:
        if tier not in outcomes and (failed := _prepare(tier)):
            outcomes[tier] = Outcome(tier, False, failed)
    to_run = [tier for tier in tiers if tier not in outcomes]
    every = lanes_of(os.cpu_count() or 1, is_quick=is_quick)
    lanes = [[(tier, part) for tier, part in lane if tier in to_run] for lane in every]
    named = {tier for lane in every for tier, _ in lane}
    lanes[0][:0] = [(tier, part) for tier in to_run if tier not in named for part in PARTS.get(tier, ((),))]
    ends: dict[str, list[Ended]] = {tier: [] for tier in to_run}
    is_stopped = threading.Event()

    def follow(lane: list[tuple[str, tuple[str, ...]]]) -> None:
        for tier, part in lane:
            if is_stopped.is_set():
                return
            say = partial(_say_of, tier)
            _say(f"--- {tier} ---")
            if tier == LINT:
                outcomes[LINT] = _lint(say)
            else:
                before = YIELDING if tier in COMPUTES else ()
                ends[tier].append(_run_part(tier, (*part, *quick), say=say, before=before))

    with ThreadPoolExecutor(len(lanes)) as pool:
        runs = [pool.submit(follow, lane) for lane in lanes]
        try:
            for run in runs:
                run.result()
        except KeyboardInterrupt:
            is_stopped.set()  # pytest got the signal too and takes its clusters down
            raise
    return _without_flaky([outcomes.get(tier) or _outcome(tier, ends[tier]) for tier in tiers])


def _without_flaky(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Repeat the few tests that failed alone; a tier of which all pass then is no failure, but names them."""
    from tests.flaky import find_flaky

    def passes(name: str) -> bool:
        _say(f"--- {name} again, alone ---")
        return _run_pytest([name], _say).status == 0

    flaky = find_flaky({one.tier: one.failed for one in outcomes}, passes)
    return [
        replace(one, ok=one.ok or (one.failed != () and one.failed == flaky[one.tier]), flaky=flaky[one.tier])
        for one in outcomes
    ]


def _without_tests(tier: str, *, is_ok: bool) -> Outcome | None:
    folder = TESTS / tier
    if any(folder.rglob("test_*.py")):
        return None
    return Outcome(tier, is_ok, f"skipped: there is no test in {folder.relative_to(TESTS.parent)}", has_tests=False)


def _run_part(
    tier: str, part: Sequence[str], *, is_whole: bool = True, say: Say | None = None, before: Sequence[str] = ()
) -> Ended:
    return _run_pytest([str(TESTS / tier), *part, *(SLOWEST if is_whole else ())], say or _say, before)


def _lint(say: Say) -> Outcome:
    status = _run(["make", LINT], say)
    return Outcome(LINT, status == 0, "failed" if status else "passed", has_tests=False)


def _outcome(tier: str, ends: Sequence[Ended], *, is_whole: bool = True) -> Outcome:
    """Say how a tier ended whose parts ended so. A whole one has tests in each; only who selects some may find none here."""
    has_tests = any(one.status != NO_TESTS_COLLECTED for one in ends)
    ok = all(one.status == 0 or (not is_whole and one.status == NO_TESTS_COLLECTED) for one in ends)
    has_only_failures = all(one.status == 0 or (one.status == FAILED and one.failed) for one in ends)
    failed = tuple(name for one in ends for name in one.failed) if has_only_failures else ()
    return Outcome(tier, ok, "\n".join(one.line for one in ends), has_tests, failed)


def _prepare(tier: str) -> str:
    """Fetch and build what the tier needs, shown here; its own processes would do it in silence. Give what failed."""
    from tests.conftest import why_no_cluster
    from tests.preparation import prepare_tier

    from elastipod_local.errors import LocalClusterError, what_the_machine_refused

    try:
        if why_no_cluster() is None:
            prepare_tier(tier, progress=_say)
    except LocalClusterError as failed:
        return str(failed)
    except (OSError, subprocess.TimeoutExpired) as failed:
        return what_the_machine_refused(failed)
    return ""


def _announce(tiers: Sequence[str]) -> None:
    from tests.conftest import why_no_cluster
    from tests.preparation import announce_tiers

    if why_no_cluster() is None:
        announce_tiers(tiers, _say)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")  # at once: lines of lanes must not mix
    sys.stdout.flush()


def _say_of(tier: str, line: str) -> None:
    _say(f"{tier:5} | {line}")


def _run_pytest(arguments: Sequence[str], say: Say, before: Sequence[str] = ()) -> Ended:
    """Run pytest. say: shows each line of its output but the closing one. before: what the command begins with."""
    closing = ""
    started = time.monotonic()

    def show(line: str) -> None:
        nonlocal closing
        if CLOSING_LINE.match(line):
            closing = line  # shown once, at the very end
        else:
            say(line)

    with tempfile.TemporaryDirectory(prefix="pytest-cache-") as cache:
        command = [sys.executable, "-m", "pytest", "--color=no", "-o", f"cache_dir={cache}", *arguments]
        status = _run([*before, *command], show)
        failed = _failed_in(Path(cache))
    if status == NO_TESTS_COLLECTED:
        return Ended(status, "skipped: no test was selected")
    passed_s = time.monotonic() - started
    return Ended(status, closing or f"pytest ended with {status} after {passed_s:.0f} s without a summary", failed)


def _run(command: Sequence[str], say: Say) -> int:
    """Run a command, each line of its output passed on as it comes; gives its exit status."""
    with subprocess.Popen(command, cwd=TESTS.parent, stdout=subprocess.PIPE, text=True, errors="replace") as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                say(line.rstrip())
        except KeyboardInterrupt:
            process.wait()  # it got the signal too; pytest takes its clusters down
            raise
    return process.returncode


def _failed_in(cache: Path) -> tuple[str, ...]:
    """Give the tests that failed, as pytest keeps them for --last-failed: its lines of output cut names short."""
    path = cache / "v" / "cache" / "lastfailed"
    return tuple(json.loads(path.read_text())) if path.is_file() else ()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the named tiers; give 0 when none failed, 1 otherwise, 2 when no test was named, 130 on Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--long", metavar="NAME", help="run the long test of this name only; empty: every long test")
    parser.add_argument("--quick", action="store_true", help="leave out slow tests, unless a tier or tests are chosen")
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
            outcomes = run_beside_each_other(options.tiers, is_quick=options.quick)
        else:
            for tier in options.tiers:
                _say(f"\n--- {tier} ---")
                outcomes.append(run_tier(tier, arguments))
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    print()
    for outcome in outcomes:
        print("\n".join([outcome.tier, *_named(outcome), outcome.line]))
    for outcome in outcomes if run_whole and not options.quick else ():
        if outcome.tier != LINT:
            _try_to_report(outcome)
    if not any(outcome.has_tests for outcome in outcomes):
        print("no test was selected in any of these tiers", file=sys.stderr)
        return 2
    return 0 if all(outcome.ok for outcome in outcomes) else 1


def _named(outcome: Outcome) -> list[str]:
    """Name again, at the very end, what failed: the output of several tiers is thousands of lines."""
    return [
        f"FLAKY {name}: it failed beside other tests, above, and passed alone"
        if name in outcome.flaky
        else f"FAILED {name}"
        for name in outcome.failed
    ]


def _unknown_long_run(name: str) -> str:
    """Say what there is in place of a long run that does not exist; empty for one that does."""
    from tests.long_runs import long_names

    names = long_names()
    return "" if name in names else f"there is no long run {name!r}; there are {', '.join(names)}"


def _try_to_report(outcome: Outcome) -> None:
    try:
        _write_report(outcome)
    except OSError as refused:
        print(f"the report of {outcome.tier} was not written: {refused}", file=sys.stderr)


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
        "flaky": outcome.flaky,
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
