"""The agent's own log lines: one per event, with the job and, once it is known, the pod's group rank."""

from __future__ import annotations

from collections.abc import Callable

from elastipod_agent.clock import utc_now


class EventLog:
    """Prints ``hyperpodrun: <time> <level> <event> job=... group_rank=... field=value``; never an environment value.

    HyperPod's own tools search a pod's log for the group_rank field to find the head pod.
    """

    def __init__(self, print_line: Callable[[str], None], job: str) -> None:
        self._print_line = print_line
        self._job = job
        self.group_rank: int | None = None

    def info(self, event: str, **fields: object) -> None:
        """Print an expected event."""
        self._print("INFO", event, fields)

    def warning(self, event: str, **fields: object) -> None:
        """Print an event that may need attention."""
        self._print("WARNING", event, fields)

    def error(self, event: str, **fields: object) -> None:
        """Print a failure."""
        self._print("ERROR", event, fields)

    def _print(self, level: str, event: str, fields: dict[str, object]) -> None:
        known: dict[str, object] = {}
        if self._job:
            known["job"] = self._job
        if self.group_rank is not None:
            known["group_rank"] = self.group_rank
        pairs = "".join(f" {name}={_one_line(value)}" for name, value in (known | fields).items() if value is not None)
        self._print_line(f"hyperpodrun: {utc_now()} {level} {event}{pairs}")


def _one_line(value: object) -> str:
    text = " ".join(str(value).split())
    return f'"{text}"' if " " in text else text
