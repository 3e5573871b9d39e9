"""Records which functions a test runs in processes that it starts; mutmut sees only those of pytest's own process.

Copied into the folder of the mutants as the module that each interpreter loads when it starts (see `site`). While mutmut collects which
tests run which functions, each process appends a line `test<TAB>function` to $MUTANTS_HITS for each function that it enters.
"""

import os
import sys

HITS, MAIN = "MUTANTS_HITS", "MUTANTS_MAIN_PID"
os.environ.setdefault(MAIN, str(os.getpid()))

if HITS in os.environ:
    if str(os.getpid()) != os.environ[MAIN]:
        sys.path.insert(0, os.path.join(os.path.dirname(os.environ[HITS]), "mutants"))
    from mutmut import stats

    _record_here = stats.record_trampoline_hit
    _seen: set[tuple[str, str]] = set()

    def _record(name: str, caller: str | None = None) -> None:
        if str(os.getpid()) == os.environ.get(MAIN):
            _record_here(name, caller)
            return
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
        if (test, name) not in _seen and HITS in os.environ:
            _seen.add((test, name))
            with open(os.environ[HITS], "a") as hits:
                hits.write(f"{test}\t{name}\n")

    stats.record_trampoline_hit = _record
