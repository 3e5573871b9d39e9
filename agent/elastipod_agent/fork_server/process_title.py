"""Shows a worker's own command line and environment for a process that was forked.

`ps`, nvidia-smi and the agent's search for a worker's processes read the command line and the initial environment from the process's
memory, which a fork inherits unchanged. The agent starts the server with one argument and one variable of padding, which a worker
overwrites.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastipod_agent.workers.linux import overwrite_memory, process_memory, read_memory

VARIABLE = "ELASTIPOD_ROOM"
PADDING = "-" * 12_000  # more than two paths of maximal length
_LONGEST_ENVIRONMENT = 4 * 1024 * 1024


class TitleUnavailable(Exception):
    """The kernel does not show where the padding is."""


@dataclass(frozen=True, slots=True)
class ProcessTitle:
    """Address ranges of the command line and of the padding variable."""

    command: tuple[int, int]
    variable: tuple[int, int]

    @classmethod
    def locate(cls) -> ProcessTitle:
        """Find the address ranges in this process. Raises TitleUnavailable."""
        try:
            command = process_memory("arg")
            begin, end = process_memory("env")
        except (OSError, IndexError, ValueError) as error:
            raise TitleUnavailable(f"/proc/self/stat cannot be used: {error}") from error
        entry = f"{VARIABLE}={PADDING}\0".encode()
        at = read_memory(begin, end).find(entry) if 0 < begin < end < begin + _LONGEST_ENVIRONMENT else -1
        if at < 0 or command[1] - command[0] <= len(PADDING):
            raise TitleUnavailable("the kernel does not show where this process's environment is")
        return cls(command, (begin + at, begin + at + len(entry)))

    def show(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Show this command line, cut to the available space, and as many variables of this environment as fit, the shortest first.

        The first argument stays, because libc keeps a pointer to it.
        """
        begin, end = self.command
        others = b"".join(_encoded(part) for part in command[1:])
        begin += len(read_memory(begin, end).partition(b"\0")[0]) + 1
        _write(begin, end, others)
        room, entries = self.variable[1] - self.variable[0] - 1, b""
        for entry in sorted((_encoded(f"{name}={value}") for name, value in environ.items()), key=len):
            if len(entries) + len(entry) <= room:
                entries += entry
        _write(*self.variable, entries)


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape") + b"\0"


def _write(begin: int, end: int, data: bytes) -> None:
    room = end - begin
    overwrite_memory(begin, data[: room - 1].ljust(room, b"\0"))
