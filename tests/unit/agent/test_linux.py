"""Process settings of Linux, each tried in a child process of its own."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastipod_agent.workers import linux

PR_GET_PDEATHSIG, PR_GET_CHILD_SUBREAPER = 2, 37


def in_a_child(work: Callable[[], object]) -> int:
    """Run this in a fork; gives how it ended, as subprocess counts. A result that is not true is 1."""
    pid = os.fork()
    if not pid:
        code = 99
        try:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            code = 0 if work() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def prctl_value(option: int) -> int:
    """Read a process setting."""
    value = ctypes.c_int(-1)
    assert ctypes.CDLL(None).prctl(option, ctypes.byref(value), 0, 0, 0) == 0
    return value.value


def test_orphans_are_adopted() -> None:
    def work() -> bool:
        linux.adopt_orphans()
        return prctl_value(PR_GET_CHILD_SUBREAPER) == 1

    assert in_a_child(work) == 0


def test_a_kernel_that_refuses_to_give_orphans_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def prctl(self, *_: int) -> int:
            ctypes.set_errno(errno.EPERM)
            return -1

    monkeypatch.setattr(linux, "_libc", Refusing())
    with pytest.raises(PermissionError) as refused:
        linux.adopt_orphans()
    assert (refused.value.errno, refused.value.strerror) == (errno.EPERM, "Operation not permitted")


def test_a_child_dies_with_its_parent() -> None:
    parent = os.getpid()

    def work() -> bool:
        linux.die_with_parent(parent)
        return prctl_value(PR_GET_PDEATHSIG) == signal.SIGKILL

    assert in_a_child(work) == 0


def test_a_child_whose_parent_is_gone_already_ends() -> None:
    def work() -> bool:
        linux.die_with_parent(1 << 22)
        return True

    assert in_a_child(work) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_process_dies_by_a_signal_that_it_handles(number: signal.Signals) -> None:
    def work() -> None:
        signal.signal(number, lambda *_: None)
        linux.die_by_signal(number)

    assert in_a_child(work) == -number


def test_the_command_line_of_this_process_is_where_the_kernel_says() -> None:
    begin, end = linux.process_memory("arg")
    shown = Path("/proc/self/cmdline").read_bytes()  # goes on beyond the area where pytest-xdist set a longer title
    assert linux.read_memory(begin, end) == shown[: end - begin]


def test_a_shown_command_line_is_that_of_its_own_process_alone() -> None:
    begin, _ = linux.process_memory("arg")
    before = Path("/proc/self/cmdline").read_bytes()

    def work() -> bool:
        linux.overwrite_memory(begin, b"other")
        return Path("/proc/self/cmdline").read_bytes() == b"other" + before[5:]

    assert in_a_child(work) == 0
    assert Path("/proc/self/cmdline").read_bytes() == before


def test_the_initial_environment_is_where_the_kernel_says() -> None:
    begin, end = linux.process_memory("env")
    assert linux.read_memory(begin, end) == Path("/proc/self/environ").read_bytes()


def test_output_of_c_code_is_flushed(tmp_path: Path) -> None:
    def work() -> bool:
        libc = ctypes.CDLL(None)
        libc.fopen.restype = ctypes.c_void_p
        file = ctypes.c_void_p(libc.fopen(os.fsencode(tmp_path / "out"), b"w"))
        libc.fputs(b"from C", file)
        assert (tmp_path / "out").read_bytes() == b"", "it is in a buffer"
        linux.flush_c_streams()
        return (tmp_path / "out").read_bytes() == b"from C"

    assert in_a_child(work) == 0


@given(
    data=st.text(alphabet="ab\0ÿ", max_size=30),
    text=st.text(alphabet="ab\0ÿ", min_size=1, max_size=3),
    at=st.integers(0, 5),
)
def test_a_fast_search_finds_what_find_does(data: str, text: str, at: int) -> None:
    searched, wanted = data.encode(), text.encode()
    at = min(at, len(searched))
    assert linux.fast_find(searched)(wanted, at) == searched.find(wanted, at)
