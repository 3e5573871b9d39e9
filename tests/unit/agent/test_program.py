"""A program that a fork runs behaves as one that the interpreter runs: same output, same exit code, same names."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.agent_client import until

from elastipod import uncaught
from elastipod_agent.fork_server import fast_exit, program
from elastipod_agent.fork_server.program import CODE, FILE, INTERRUPTED, MODULE

SAYS_ALL = """
import builtins, sys
print(sys.argv, sys.orig_argv[-1], repr(sys.path[0]), __name__, __file__ if "__file__" in globals() else None)
print(type(__loader__).__name__, getattr(__loader__, "name", None), getattr(__loader__, "path", None))
print(getattr(__loader__, "__name__", None), __builtins__ is builtins, sys.modules["__main__"].__dict__ is globals())
print(sorted(name for name in globals() if name not in ("builtins", "sys")), __spec__ and __spec__.name, __package__)
print(globals().get("__cached__", "absent"))
x: int = 1
print(__annotations__)
"""


class Result(NamedTuple):
    """How a program ended and what it printed."""

    code: int
    out: str
    err: str


def by_the_interpreter(*arguments: str, folder: Path) -> Result:
    """Run it as `python ...` does."""
    done = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, check=False)
    return Result(done.returncode, done.stdout, done.stderr)


def by_a_fork(kind: str, target: str, args: Sequence[str], command: Sequence[str], folder: Path) -> Result:
    """Run it in a fork of this process, which exits with the code that `run` gives."""
    files = [folder / name for name in ("own-out", "own-err")]
    pid = os.fork()
    if not pid:
        code = 99
        try:
            os.chdir(folder)
            for number, file in enumerate(files, start=1):
                os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
            sys.excepthook = sys.__excepthook__
            code = program.run(kind, target, args, command)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(99 if not isinstance(code, int) or code > 255 else code & 0xFF)
    _, status = os.waitpid(pid, 0)
    return Result(os.waitstatus_to_exitcode(status), files[0].read_text(), files[1].read_text())


def both(kind: str, target: str, *args: str, folder: Path) -> tuple[Result, Result]:
    """Give how the interpreter runs it, and how a fork does."""
    command = [*{FILE: (), MODULE: ("-m",), CODE: ("-c",)}[kind], target, *args]
    own = by_a_fork(kind, target, args, [sys.executable, *command], folder)
    return by_the_interpreter(*command, folder=folder), own


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the program as a script, a module, a package, a directory and an archive."""
    (tmp_path / "script.py").write_text(SAYS_ALL)
    (tmp_path / "package").mkdir()
    for name in ("__init__.py", "__main__.py", "part.py"):
        (tmp_path / "package" / name).write_text("" if name == "__init__.py" else SAYS_ALL)
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", SAYS_ALL)
    (tmp_path / "link.py").symlink_to("script.py")
    return tmp_path


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        (FILE, "script.py"),
        (FILE, "link.py"),
        (FILE, "package"),
        (FILE, "archive.zip"),
        (MODULE, "script"),
        (MODULE, "package"),
        (MODULE, "package.part"),
        (CODE, SAYS_ALL),
    ],
    ids=lambda value: "code" if value == SAYS_ALL else value,
)
def test_a_program_finds_what_the_interpreter_would_give_it(kind: str, target: str, folder: Path) -> None:
    expected, own = both(kind, target, "-a", "b c", folder=folder)
    assert own == expected
    assert expected.code == 0
    assert expected.out.count("\n") == 6


@pytest.mark.parametrize(
    "script",
    [
        "pass",
        "raise SystemExit",
        "raise SystemExit(None)",
        "raise SystemExit(0)",
        "raise SystemExit(3)",
        "raise SystemExit(True)",
        "raise SystemExit(256 + 7)",
        "raise SystemExit(-1)",
        "raise SystemExit(2**63)",
        "raise SystemExit(-(2**63))",
        "raise SystemExit(-(2**63) - 2)",
        "raise SystemExit('a sentence')",
        "raise SystemExit([1, 2])",
        "import sys\nsys.excepthook = lambda *_: print('hook', sys.last_type.__name__, sys.exc_info()[0])\n1 / 0",
        "import sys\nsys.excepthook = lambda kind, failure, trace: sys.exit(5)\n1 / 0",
        "import sys\nsys.excepthook = lambda kind, failure, trace: sys.exit('words')\n1 / 0",
        "import sys\nsys.addaudithook(lambda event, args: event == 'sys.excepthook' and print(*map(type, args)))\n1 / 0",
        "import sys\nsys.excepthook = lambda kind, failure, trace: print(failure, sys.last_value is failure)\n1 / 0",
    ],
)
def test_how_a_program_ends(script: str, folder: Path) -> None:
    (folder / "script.py").write_text(script)
    expected, own = both(FILE, "script.py", folder=folder)
    assert (own.code, own.out, own.err.splitlines()[-1:]) == (
        expected.code,
        expected.out,
        expected.err.splitlines()[-1:],
    )


@pytest.mark.parametrize(
    ("kind", "target"), [(FILE, "none.py"), (MODULE, "none"), (FILE, "empty"), (CODE, "a b"), (FILE, "bad.py")]
)
def test_a_program_that_cannot_be_run(kind: str, target: str, folder: Path) -> None:
    (folder / "empty").mkdir()
    (folder / "bad.py").write_text("a b\n")
    expected, own = both(kind, target, folder=folder)
    assert (own.code, own.out) == (expected.code, "")
    assert own.code != 0
    assert own.err.splitlines()[-1:] == expected.err.splitlines()[-1:]


def test_a_file_that_does_not_exist_is_told_in_one_line(folder: Path) -> None:
    own = by_a_fork(FILE, "none.py", (), (), folder)
    why = f"can't open file '{folder}/none.py': [Errno 2] No such file or directory"
    assert own == Result(2, "", f"{sys.executable}: {why}\n")


def test_an_error_in_the_hook_shows_both_errors(folder: Path) -> None:
    (folder / "script.py").write_text(
        "import sys\ndef hook(*_):\n    raise ValueError('of the hook')\nsys.excepthook = hook\nraise KeyError('of the script')\n"
    )
    own = by_a_fork(FILE, "script.py", (), (), folder)
    lines = own.err.splitlines()
    assert own.code == 1
    assert lines[0] == "Error in sys.excepthook:"
    middle = lines.index("Original exception was:")
    assert lines[middle - 1] == ""
    assert lines[middle - 2] == "ValueError: of the hook"
    assert lines[1] == lines[middle + 1] == "Traceback (most recent call last):"
    assert lines[-1] == "KeyError: 'of the script'"


def test_an_interrupt_is_told_to_the_caller(folder: Path) -> None:
    own = by_a_fork(CODE, "raise KeyboardInterrupt", (), (), folder)
    assert own.code == INTERRUPTED & 0xFF
    assert own.err.splitlines()[-1] == "KeyboardInterrupt"


def test_what_a_debugger_reads_after_an_error(folder: Path) -> None:
    script = (
        "import atexit, sys\n"
        "sys.excepthook = lambda kind, failure, trace: print(sys.last_type is kind, sys.last_value is failure,"
        " sys.last_traceback is trace, trace is failure.__traceback__, kind.__name__)\nraise KeyError(1)\n"
    )
    assert by_a_fork(CODE, script, (), (), folder).out == "True True True True KeyError\n"


def test_a_program_is_torn_down_before_what_was_loaded_for_it(folder: Path) -> None:
    """The interpreter clears modules in reverse order."""
    assert by_a_fork(CODE, "import sys\nprint(list(sys.modules)[-1])", (), (), folder).out == "__main__\n"


def test_with_a_safe_path_only_directories_and_archives_come_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Flags:
        safe_path = True

    monkeypatch.setattr("sys.flags", Flags())
    assert program.first_path(FILE, str(folder / "package")) == str(folder / "package")
    assert program.first_path(FILE, str(folder / "script.py")) is None
    assert program.first_path(MODULE, "script") is None
    assert program.first_path(CODE, "pass") is None


def test_the_flush_of_c_streams_says_whether_it_was_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fast_exit.can_flush_c_streams(60.0) is True
    is_over = threading.Event()
    monkeypatch.setattr(fast_exit, "flush_c_streams", is_over.wait)
    assert fast_exit.can_flush_c_streams(0.01) is False
    is_over.set()
    until(lambda: not any(thread.name == "flush" for thread in threading.enumerate()), "the end of the flush")


@pytest.mark.parametrize(("code", "status"), [(0, 0), (3, 3), (program.INTERRUPTED, 130)])
def test_exit_handlers_can_ask_for_the_status_of_a_worker(
    monkeypatch: pytest.MonkeyPatch, code: int, status: int
) -> None:
    monkeypatch.setattr(uncaught, "_asked_for", None)
    with pytest.raises(SystemExit) as ended:
        fast_exit.exit_process(code)
    assert ended.value.code == uncaught.exit_status() == status
