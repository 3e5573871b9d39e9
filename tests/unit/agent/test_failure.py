"""What a failure report says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.nonempty import every

from elastipod_agent.workers.failure import (
    MAX_MESSAGE_BYTES,
    Failure,
    describe,
    describe_error,
    last_error,
    last_lines,
    last_traceback,
    printable,
    reported_error,
    shorten,
    write_termination_message,
)

TRACEBACK = 'Traceback (most recent call last):\n  File "t.py", line 2, in <module>\nValueError: bad'


def report(status: int, tmp_path: Path, tail: str = "") -> Failure:
    return describe(
        global_rank=5, local_rank=1, status=status, error_file=tmp_path / "error.json", stderr_tail=tail, time="t"
    )


def test_a_failure_has_the_time_at_which_it_was_seen(tmp_path: Path) -> None:
    assert [report(status, tmp_path).time for status in (1, -9)] == ["t", "t"]


def test_an_exit_code_with_the_last_traceback(tmp_path: Path) -> None:
    failure = report(1, tmp_path, f"epoch 1\n{TRACEBACK.replace('bad', 'handled')}\nepoch 2\n{TRACEBACK}\n")
    assert (failure.global_rank, failure.local_rank, failure.exitcode, failure.signal) == (5, 1, 1, None)
    assert failure.message == f"rank 5 (local rank 1) ended with exit code 1: ValueError: bad\n{TRACEBACK}"


def test_a_signal_by_name_with_a_hint_for_the_commonest_cause(tmp_path: Path) -> None:
    failure = report(-9, tmp_path)
    assert (failure.exitcode, failure.signal) == (None, "SIGKILL")
    assert "out-of-memory" in failure.message
    assert report(-11, tmp_path).message == "rank 5 was killed by SIGSEGV"


REMARK = "[W1121 04:28:38.471 socket.cpp:207] [c10d] The hostname of the client socket cannot be retrieved.\n"


def test_torchs_remarks_are_never_the_reason(tmp_path: Path) -> None:
    killed = report(-9, tmp_path, f"loading\n{REMARK}[rank0]:{REMARK}").message
    assert killed.startswith("rank 5 was killed by SIGKILL")
    assert "\n" not in killed
    assert report(3, tmp_path, f"no such file\n{REMARK}").message.endswith("exit code 3: no such file")
    assert report(1, tmp_path, f"{TRACEBACK}\n{REMARK}").message.endswith("\nValueError: bad")


@pytest.mark.parametrize(
    "said",
    [
        TRACEBACK,
        "Fatal Python error: Aborted",
        "terminate called without an active exception",
        "[rank0]:[E1121 04 x] y",
    ],
)
def test_an_error_printed_before_a_signal_is_told(tmp_path: Path, said: str) -> None:
    assert report(-6, tmp_path, f"epoch 1\n{said}\n{REMARK}").message == f"rank 5 was killed by SIGABRT\n{said}"


def test_the_report_of_torchs_record_comes_before_what_was_printed(tmp_path: Path) -> None:
    error = {
        "message": {
            "message": "ValueError: x",
            "extraInfo": {"py_callstack": f"the stack\n{TRACEBACK}", "timestamp": "1"},
        }
    }
    (tmp_path / "error.json").write_text(json.dumps(error), "utf-8")
    assert report(1, tmp_path, TRACEBACK).message.endswith(f": ValueError: bad\nthe stack\n{TRACEBACK}")


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ('{"message": "plain"}', "plain"),
        ('{"message": {"message": "m"}}', "m"),
        ('{"message": {"message": "m", "extraInfo": []}}', "m"),
        ('{"other": 1}', ""),
        ("[]", ""),
        ("no json", ""),
        ("[" * 100_000, ""),
    ],
)
def test_reports_of_any_shape(tmp_path: Path, content: str, found: str) -> None:
    (tmp_path / "e").write_text(content, "utf-8")
    assert reported_error(tmp_path / "e") == found


def test_a_chained_traceback_is_kept_whole() -> None:
    chain = f"{TRACEBACK}\n\nThe above exception was the direct cause of the following exception:\n\n{TRACEBACK}"
    assert last_traceback(f"{TRACEBACK}\nunrelated\n{chain}") == chain


def test_an_early_remark_does_not_hide_how_an_ordinary_exit_ended(tmp_path: Path) -> None:
    said = "[E1121 04:28:38.471 socket.cpp:207] [c10d] retrying\nepoch 1\nthe corpus is too small"
    assert report(1, tmp_path, said).message.endswith("\nthe corpus is too small")


def test_without_a_traceback_the_last_lines_speak() -> None:
    tail = "\n".join(f"line {n}" for n in range(100)) + '\n  File "t.py", line 1\nSyntaxError: invalid syntax\n'
    found = last_lines(tail)
    assert found.endswith("SyntaxError: invalid syntax")
    assert len(found.splitlines()) == 20


@pytest.mark.parametrize(
    ("details", "why"),
    [
        pytest.param(TRACEBACK, "ValueError: bad", id="a traceback's error"),
        pytest.param(
            f"{TRACEBACK}\nhint: try again\n  indented", "ValueError: bad", id="without the rest of its message"
        ),
        pytest.param(
            '  File "t.py", line 1\n    def x(:\n          ^\nSyntaxError: invalid', "SyntaxError: invalid", id="syntax"
        ),
        pytest.param("one\ntwo", "two", id="else the last line"),
        pytest.param('File "t.py", line 1', "", id="a torn traceback says nothing"),
        pytest.param("", "", id="nothing"),
    ],
)
def test_the_first_line_says_what_went_wrong(details: str, why: str) -> None:
    assert last_error(details) == why


def test_a_line_that_is_too_long_for_a_sentence_stands_below(tmp_path: Path) -> None:
    assert report(1, tmp_path, "x" * 300).message == f"rank 5 (local rank 1) ended with exit code 1\n{'x' * 300}"


def test_colours_progress_bars_and_garbage_become_plain_text(tmp_path: Path) -> None:
    assert printable("\x1b[1;31mred\x1b[0m\r50 %\r\n\tend\x00\x1b") == "red\n50 %\n\tend\ufffd\ufffd"
    message = report(7, tmp_path, bytes(range(256)).decode("utf-8", "replace")).message
    assert every(one.isprintable() or one in "\n\t" for one in message)


def test_what_the_system_refused_names_the_file() -> None:
    assert describe_error(FileNotFoundError(2, "No such file or directory", "x")) == "x: No such file or directory"
    assert describe_error(OSError("storage is gone")) == "storage is gone"


def test_long_texts_keep_head_and_end() -> None:
    text = shorten("who\n" + "ä" * 10_000 + "\nwhy")
    assert len(text.encode()) <= MAX_MESSAGE_BYTES
    assert text.startswith("who\n")
    assert text.endswith("\nwhy")


def test_the_termination_message_is_written_where_there_is_a_place(tmp_path: Path) -> None:
    place = tmp_path / "log"
    write_termination_message("x" * 9000, str(place))
    assert not place.exists()
    place.touch()
    write_termination_message("x" * 9000, str(place))
    assert place.stat().st_size <= 4096
