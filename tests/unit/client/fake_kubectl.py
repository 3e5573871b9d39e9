"""A kubectl that answers from a table: the command line's beginning, and what it prints or complains about."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

SCRIPT = """#!{python}
import json, signal, sys
signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as programs in Go
table = json.load(open({table!r}))
reads = "-f" in sys.argv and sys.argv[sys.argv.index("-f") + 1] == "-"
with open({log!r}, "a") as log:
    print(json.dumps([sys.argv[1:], sys.stdin.read() if reads else ""]), file=log)
line = " ".join(sys.argv[1:])
found = max((start for start in table if line.startswith(start)), key=len, default=None)
answer = table[found] if found is not None else "error: not in the table: " + line
if answer.startswith(("error:", "Error", "refused:")) or answer == "no":
    sys.stderr.write(answer.removeprefix("refused:"))
    sys.exit(1)
sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")
print(answer)
"""


class FakeKubectl:
    """answers: by the beginning of a command line, the longest that fits."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._table, self._log = folder / "table.json", folder / "log"
        self.answer({})
        program = folder / "kubectl"
        program.write_text(SCRIPT.format(python=sys.executable, table=str(self._table), log=str(self._log)))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def answer(self, answers: Mapping[str, object]) -> None:
        """Set what calls are answered with: text, or an object that is printed as JSON.

        Answers that begin with "error:" or "Error", and what follows "refused:", go to standard error, and the call fails.
        A byte that is not UTF-8 is written as Python escapes it: "\\udcff" for 0xff.
        """
        texts = {start: one if isinstance(one, str) else json.dumps(one) for start, one in answers.items()}
        self._table.write_text(json.dumps(texts))

    def calls(self) -> list[list[str]]:
        """Give the arguments of each call so far."""
        return [json.loads(line)[0] for line in self._log.read_text().splitlines()]

    def inputs(self) -> list[str]:
        """Give the standard input of each call so far; empty for those that read none."""
        return [json.loads(line)[1] for line in self._log.read_text().splitlines()]
