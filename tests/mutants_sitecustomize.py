"""Records which functions a test runs, in its own process and in those that it starts.

Copied into the folder of the mutants as the module that each interpreter loads when it starts (see `site`). While the tests are run to see
which functions they run, each process appends a line `test<TAB>function` to $MUTANTS_HITS for each function that it enters.
"""

import os

HITS = "MUTANTS_HITS"

if HITS in os.environ:
    from mutmut import stats

    _seen: set[tuple[str, str]] = set()

    def _record(name: str, caller: str | None = None) -> None:
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
        if test and (test, name) not in _seen and HITS in os.environ:
            _seen.add((test, name))
            with open(os.environ[HITS], "a") as hits:
                hits.write(f"{test}\t{name}\n")

    stats.record_trampoline_hit = _record
