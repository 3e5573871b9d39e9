"""What the demo shows while it runs: a live screen on a terminal, plain lines everywhere else."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from elastipod_local.demo.watcher import JobSnapshot
from elastipod_local.host import say

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

LINE_EVERY_S = 2.0
EVENTS_SHOWN = 8
EXPLAINED = frozenset({"Suspended", "Faulted", "Failed"})  # states whose reason the user wants to know


class View(Protocol):
    """The output of the demo. Called from two threads."""

    def act(self, title: str) -> None: ...
    def step(self, number: int, count: int, title: str) -> None: ...
    def detail(self, text: str) -> None: ...
    def job(self, snapshot: JobSnapshot) -> None: ...
    def event(self, job: str, text: str) -> None: ...
    def close(self) -> None: ...


def make_view() -> View:
    """Give the live screen on a terminal and plain lines elsewhere."""
    return LiveView() if sys.stdout.isatty() else PlainView()


def status_line(snapshot: JobSnapshot) -> str:
    """Give job, size, step, loss and rate as one line; unknown parts are left out."""
    parts = [snapshot.job, size_text(snapshot.size), snapshot.state]
    if snapshot.state in EXPLAINED:
        parts.append(snapshot.message)
    if progress := snapshot.progress:
        parts.append(f"step {progress.step}")
        if progress.loss is not None:
            parts.append(f"loss {progress.loss:.3f}")
        if progress.samples_per_s:
            parts.append(f"{progress.samples_per_s:.0f} samples/s")
    return "  ".join(parts)


def size_text(size: str) -> str:
    """Say running/target/max, as the operator prints it, in words."""
    running, _, rest = size.partition("/")
    target = rest.partition("/")[0]
    if not rest:
        return "no replicas yet"
    return f"{running} replicas" if running == target else f"{running} replicas, {target} wanted"


class PlainView:
    """One line for each step, detail and Event, and a status line every two seconds."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._due: dict[str, float] = {}
        self._lock = threading.Lock()

    def act(self, title: str) -> None:
        self._print(title)

    def step(self, number: int, count: int, title: str) -> None:
        self._print(f"[{number}/{count}] {title}")

    def detail(self, text: str) -> None:
        self._print(f"  {text}")

    def job(self, snapshot: JobSnapshot) -> None:
        if time.monotonic() >= self._due.get(snapshot.job, 0.0):
            self._due[snapshot.job] = time.monotonic() + LINE_EVERY_S
            self._print(f"  {status_line(snapshot)}")

    def event(self, job: str, text: str) -> None:
        self._print(f"  {job}  {text}")

    def close(self) -> None:
        """Nothing to restore."""

    def _print(self, text: str) -> None:
        with self._lock:
            say(f"{time.monotonic() - self._began:6.1f} s  {text}")


@dataclass(slots=True)
class _Step:
    """A line of the list; a heading has no start time."""

    title: str
    began: float | None = None
    ended: float | None = None


class LiveView:
    """The list of steps with their seconds, the status of each job, and the last Events, kept on one screen."""

    def __init__(self) -> None:
        self._steps: list[_Step] = []
        self._detail = ""
        self._snapshots: dict[str, JobSnapshot] = {}
        self._events: deque[str] = deque(maxlen=EVENTS_SHOWN)
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._live = self._start()

    def act(self, title: str) -> None:
        with self._lock:
            self._end_step()
            self._steps.append(_Step(title))

    def step(self, number: int, count: int, title: str) -> None:
        with self._lock:
            self._end_step()
            self._steps.append(_Step(f"{number}/{count} {title}", time.monotonic()))
            self._detail = ""

    def detail(self, text: str) -> None:
        with self._lock:
            self._detail = text.strip()

    def job(self, snapshot: JobSnapshot) -> None:
        with self._lock:
            self._snapshots[snapshot.job] = snapshot

    def event(self, job: str, text: str) -> None:
        with self._lock:
            self._events.append(f"{time.monotonic() - self._began:6.1f} s  {job}  {text}")

    def close(self) -> None:
        """Keep the last screen and release the terminal."""
        with self._lock:
            self._end_step()
        with suppress(OSError):  # the terminal is gone
            self._live.stop()

    def _end_step(self) -> None:
        if self._steps and self._steps[-1].began:
            self._steps[-1].ended = time.monotonic()

    def _start(self) -> Live:
        from rich.live import Live

        live = Live(get_renderable=self._render, refresh_per_second=4, redirect_stdout=False, redirect_stderr=False)
        live.start()
        return live

    def _render(self) -> RenderableType:
        from rich.console import Group
        from rich.panel import Panel
        from rich.text import Text

        with self._lock:
            lines = [_step_text(step) for step in self._steps]
            parts: list[RenderableType] = [*lines]
            if self._detail:
                parts.append(Text(f"      {self._detail}", style="dim", no_wrap=True, overflow="ellipsis"))
            if self._snapshots:
                status = "\n".join(map(status_line, self._snapshots.values()))
                parts.append(Panel(Text(status, style="bold"), title="jobs", title_align="left"))
            parts += [Text(event, no_wrap=True, overflow="ellipsis") for event in self._events]
            return Group(*parts)


def _step_text(step: _Step) -> RenderableType:
    from rich.text import Text

    if step.began is None:
        return Text(step.title, style="bold cyan")
    took_s = (step.ended or time.monotonic()) - step.began
    sign, style = ("\u2713", "green") if step.ended else ("\u25b8", "bold")
    return Text(f"{sign} {step.title}  {took_s:.0f} s", style=style)
