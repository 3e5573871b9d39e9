"""Why a worker failed, in one text: its own error report, else the last traceback that it printed, else one sentence."""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from elastipod_agent.core.exits import describe_status, signal_name

MAX_MESSAGE_BYTES = 4000  # fits the pod's termination message of 4 KiB
TERMINATION_LOG = "/dev/termination-log"
TERMINATION_LOG_ENV = "ELASTIPOD_TERMINATION_LOG"
_MAX_REPORT_BYTES = 256 * 1024
_TRACEBACK = "Traceback (most recent call last):"
_MAX_TAIL_LINES = 20
_MAX_WHY = 200
_SMALL_REST_BYTES = 16 * 1024
_FRAME = re.compile(r'\s*File ".*", line \d+')
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
# torch's own log lines in glog's format: "[W1121 04:28:38.471 socket.cpp:207] ...", also behind "[rank0]:"
_REMARK = re.compile(r"^(?:\[rank\d+\]: ?)?\[[IW]\d{4} .*\n?", re.MULTILINE)
# What a process prints when it raises a fatal signal: faulthandler, the C++ runtime, glog's errors.
_DEADLY = re.compile(r"^(?:Fatal Python error: |terminate called |(?:\[rank\d+\]: ?)?\[[EF]\d{4} )", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The first failure of a generation. A worker's has exactly one of exitcode and signal. time: UTC, RFC 3339."""

    global_rank: int | None
    local_rank: int | None
    exitcode: int | None
    signal: str | None
    message: str
    time: str

    def as_json(self) -> dict[str, Any]:
        """Give the failure as /status shows it."""
        return asdict(self)


def describe(
    *, global_rank: int, local_rank: int, status: int, error_file: Path | None, stderr_tail: str, time: str
) -> Failure:
    """Describe a worker that failed. error_file: None if it cannot be read. stderr_tail: the end of its standard error."""
    stderr_tail = printable(stderr_tail)
    if status < 0:
        sentence = f"rank {global_rank} was killed by {signal_name(-status)}"
        printed = last_traceback(stderr_tail) or fatal_report(stderr_tail)
    else:
        sentence = f"rank {global_rank} (local rank {local_rank}) ended with {describe_status(status)}"
        printed = last_traceback(stderr_tail) or last_lines(stderr_tail)
    if status == -9:
        sentence += "; if nobody sent it, the kernel's out-of-memory killer did"
    reported = "" if error_file is None else reported_error(error_file)
    details = printable(reported) or printed
    why = last_error(details)
    if status > 0 and 0 < len(why) <= _MAX_WHY:
        sentence += f": {why}"
        details = "" if details.strip() == why else details
    elif not details and error_file is not None and is_full(error_file.parent):
        sentence += f"; the disk that holds {error_file.parent} is full"
    return Failure(
        global_rank=global_rank,
        local_rank=local_rank,
        exitcode=status if status >= 0 else None,
        signal=signal_name(-status) if status < 0 else None,
        message=shorten(f"{sentence}\n{details}" if details else sentence),
        time=time,
    )


def is_full(place: Path) -> bool:
    """Tell whether a disk is too full for a message, so that a worker could not report its error."""
    try:
        disk = os.statvfs(place)
    except OSError:
        return False
    return disk.f_bavail * disk.f_frsize < _SMALL_REST_BYTES


def describe_error(error: OSError) -> str:
    """Describe a system error, with the file that it concerns."""
    why = error.strerror or str(error)
    return why if error.filename is None else f"{os.fspath(error.filename)}: {why}"


def printable(text: str) -> str:
    """Remove colours and control characters from a text."""
    lines = _COLOURS.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", lines)


def last_error(details: str) -> str:
    """Give the line that names the error: the first line of a traceback's error, else the last line."""
    lines = details.splitlines()
    frames = [number for number, line in enumerate(lines) if _FRAME.match(line)]
    after = lines[frames[-1] + 1 :] if frames else lines[-1:]
    return next((line.strip() for line in after if line and not line[0].isspace()), "")


def reported_error(path: Path) -> str:
    """Read the file that torch's ``@record`` writes if the script's main function raises; "" if there is none."""
    try:
        with open(path, "rb") as file:
            report = json.loads(file.read(_MAX_REPORT_BYTES))
        message = report["message"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""
    if not isinstance(message, dict):
        return str(message)
    extra = message.get("extraInfo")
    stack = extra.get("py_callstack") if isinstance(extra, dict) else None
    return str(stack or message.get("message") or "").strip()


def last_traceback(stderr_tail: str) -> str:
    """Give the last traceback that a worker printed, or ""."""
    text = _REMARK.sub("", stderr_tail)
    begin = text.rfind(_TRACEBACK)
    if begin < 0:
        return ""
    # A chained exception prints several tracebacks; the first one is the cause.
    while (earlier := text.rfind(_TRACEBACK, 0, begin)) >= 0 and _is_chained(text[earlier:begin]):
        begin = earlier
    return text[begin:].strip()


def fatal_report(stderr_tail: str) -> str:
    """Give what a process printed when it raised a fatal signal, or ""."""
    text = _REMARK.sub("", stderr_tail)
    deadly = _DEADLY.search(text)
    return "\n".join(text[deadly.start() :].strip().splitlines()[:_MAX_TAIL_LINES]) if deadly else ""


def last_lines(stderr_tail: str) -> str:
    """Give the last lines that a worker printed, without torch's log lines; they often name the cause."""
    return "\n".join(_REMARK.sub("", stderr_tail).strip().splitlines()[-_MAX_TAIL_LINES:])


def _is_chained(between: str) -> bool:
    last_lines = between.rstrip().rpartition("\n")[2]
    return last_lines.startswith(("During handling of the above", "The above exception was the direct cause"))


def shorten(text: str, limit: int = MAX_MESSAGE_BYTES) -> str:
    """Cut the middle out of a long text: its first line names the worker, its end the cause."""
    data = text.encode("utf-8", "replace")
    if len(data) <= limit:
        return data.decode("utf-8", "replace")
    head, gap = data[: limit // 4], b"\n...\n"
    tail = data[-(limit - len(head) - len(gap)) :]
    return (head + gap + tail).decode("utf-8", "ignore")


def write_termination_message(text: str, path: str | None = None) -> None:
    """Write the container's termination message for the kubelet, if the file exists and can be written.

    path: by default ``ELASTIPOD_TERMINATION_LOG`` (for pods with a terminationMessagePath), else Kubernetes' default path.
    """
    with suppress(OSError), open(path or os.environ.get(TERMINATION_LOG_ENV) or TERMINATION_LOG, "r+b") as file:
        file.truncate()
        file.write(shorten(text, 4096).encode("utf-8", "replace"))
