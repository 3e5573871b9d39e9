"""Runs a worker's script, module or code as the interpreter does, and gives the exit code that the interpreter would."""

from __future__ import annotations

import builtins
import io
import os
import pkgutil
import runpy
import sys
import traceback
from collections.abc import Sequence
from importlib.machinery import BuiltinImporter, SourceFileLoader
from types import ModuleType, TracebackType

FILE, MODULE, CODE = "file", "module", "code"
INTERRUPTED = -2  # exit by SIGINT, as after an unhandled KeyboardInterrupt


def first_path(kind: str, target: str) -> str | None:
    """Give what a new interpreter puts first on sys.path for this program; None if nothing."""
    if kind == FILE and pkgutil.get_importer(target) is not None:
        return os.path.abspath(target)
    if getattr(sys.flags, "safe_path", False):
        return None
    if kind == FILE:
        return os.path.dirname(os.path.realpath(target))
    return os.getcwd() if kind == MODULE else ""


def run(kind: str, target: str, args: Sequence[str], command: Sequence[str]) -> int:
    """Run the program to its end; gives the exit code, or INTERRUPTED. Errors are printed."""
    sys.orig_argv[:] = command
    first = first_path(kind, target)
    if first is not None:
        sys.path.insert(0, first)
    failure: BaseException | None = None
    try:
        if kind == MODULE:
            sys.argv = ["-m", *args]
            _fresh_main()
            runpy._run_module_as_main(target)  # type: ignore[attr-defined]  # what python -m calls
        elif kind == CODE:
            sys.argv = ["-c", *args]
            _run_code(target)
        else:
            sys.argv = [target, *args]
            _run_file(target)
    except BaseException as error:  # the script's, reported as the interpreter would report it
        failure = error
    # Outside the handler: a hook must not see an exception that is still being handled.
    return 0 if failure is None else _exit_code(failure)


def _run_code(code: str) -> None:
    exec(compile(code, "<string>", "exec", dont_inherit=True), _fresh_main())  # noqa: S102 the user's own code


def _run_file(path: str) -> None:
    if pkgutil.get_importer(path) is not None:  # a directory or an archive with a __main__.py
        _fresh_main()
        runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]  # what the interpreter calls
        return
    try:
        with io.open_code(os.path.abspath(path)) as file:
            source = file.read()
    except OSError as error:
        reason = f"[Errno {error.errno}] {error.strerror}"
        print(f"{sys.executable}: can't open file {os.path.abspath(path)!r}: {reason}", file=sys.stderr)
        raise SystemExit(2) from None
    place = os.path.abspath(path)
    names = _fresh_main()
    names["__file__"], names["__cached__"] = place, None
    names["__loader__"] = SourceFileLoader("__main__", place)
    exec(compile(source, place, "exec", dont_inherit=True), names)  # noqa: S102 the user's own code


def _fresh_main() -> dict[str, object]:
    """Replace the server's ``__main__`` by an empty one, last in sys.modules so that it is torn down first."""
    module = ModuleType("__main__")
    names = module.__dict__
    names["__loader__"] = BuiltinImporter
    if sys.version_info < (3, 14):
        names["__annotations__"] = {}
    names["__builtins__"] = builtins
    sys.modules.pop("__main__", None)
    sys.modules["__main__"] = module
    return names


def _exit_code(failure: BaseException) -> int:
    if isinstance(failure, SystemExit):
        return _asked_for(failure.code)
    kind = type(failure)
    trace = _without_ours(failure.__traceback__)
    failure = failure.with_traceback(trace)
    sys.last_type, sys.last_value, sys.last_traceback = kind, failure, trace
    if sys.version_info >= (3, 12):
        sys.last_exc = failure
    sys.audit("sys.excepthook", sys.excepthook, kind, failure, trace)
    try:
        sys.excepthook(kind, failure, trace)
    except SystemExit as leaving:
        return _asked_for(leaving.code)
    except BaseException as error:  # the hook itself failed; the interpreter prints both
        print("Error in sys.excepthook:", file=sys.stderr)
        traceback.print_exception(type(error), error, _without_ours(error.__traceback__))
        print("\nOriginal exception was:", file=sys.stderr)
        traceback.print_exception(kind, failure, trace)
    return INTERRUPTED if kind is KeyboardInterrupt else 1


def _asked_for(code: object) -> int:
    """Give the exit code of sys.exit() with this argument; a text is printed, as the interpreter does."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF if -(2**63) <= code < 2**63 else 0xFF
    print(code, file=sys.stderr)
    return 1


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    """Leave out this module's frames, which come before those of the program."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace
