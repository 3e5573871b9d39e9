"""The message of a hang: which ranks stopped at which step and when, then their stacks, the most informative first."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import takewhile

from elastipod.rank_ranges import format_ranks
from elastipod_agent.core.hang import Hang, SilentWorker

_MAX_FRAMES = 12
_PATH_PARTS = 3
_FORK_SERVER_FRAMES = "/elastipod_agent/fork_server/"  # the outermost frames of a forked worker, which say nothing
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x", re.MULTILINE)
_FRAME = re.compile(r'^  File "(?P<path>.*)", line (?P<line>\S+) in (?P<name>.*)$')


@dataclass(frozen=True, slots=True)
class WorkerActivity:
    """What one living worker is doing. stacks: as the interpreter writes them, or ""; facts: a sentence if there are no stacks."""

    global_rank: int
    stacks: str = ""
    facts: str = ""


def hang_message(hang: Hang, global_ranks: Mapping[int, int], activities: Sequence[WorkerActivity]) -> str:
    """Give the whole message; a caller that needs a shorter one cuts its end. global_ranks: by local rank."""
    steps = {global_ranks[one.local_rank]: one.step if one.has_reported else -1 for one in hang.silent}
    parts = [_headline(hang, global_ranks)]
    alike: dict[str, list[int]] = {}
    for activity in activities:
        alike.setdefault(_doing(activity), []).append(activity.global_rank)

    def how_telling(ranks: list[int]) -> tuple[bool, int, int, int]:
        """Sort key: ranks that report steps first, then ranks that are behind, then the smaller group."""
        stands_at = [steps[rank] for rank in ranks if rank in steps]
        return (not stands_at, min(stands_at, default=0), len(ranks), ranks[0])

    for doing, ranks in sorted(alike.items(), key=lambda item: how_telling(item[1])):
        parts.append(f"{format_ranks(ranks)} {doing}")
    return "\n".join(parts)


def cut(text: str, limit: int) -> str:
    """Cut a text to at most this many bytes of UTF-8."""
    data = text.encode("utf-8", "replace")
    return text if len(data) <= limit else data[: limit - 4].decode("utf-8", "ignore") + "\n..."


def main_thread(stacks: str, limit: int = _MAX_FRAMES) -> list[str]:
    """Give the innermost frames of the main thread, one short line each. The interpreter writes that thread last."""
    last = _THREAD.split(stacks)[-1].splitlines()[1:]
    frames = [
        _short_frame(line)
        for line in takewhile(lambda line: _FORK_SERVER_FRAMES not in line, last)
        if line.startswith("  ")
    ]
    return frames if len(frames) <= limit else [*frames[:limit], f"  ... {len(frames) - limit} outer frames"]


def _headline(hang: Hang, global_ranks: Mapping[int, int]) -> str:
    longest_s = max(one.silent_s for one in hang.silent)
    usual = "" if hang.step_s is None else f"; a step usually takes {_seconds(hang.step_s)}"
    by_step: dict[tuple[bool, int], list[SilentWorker]] = {}
    for one in hang.silent:
        by_step.setdefault((one.has_reported, one.step if one.has_reported else 0), []).append(one)
    stands = []
    for (has_reported, step), group in sorted(by_step.items()):
        ranks, is_one = format_ranks(global_ranks[one.local_rank] for one in group), len(group) == 1
        if has_reported:
            since = _utc(min(one.since for one in group))
            stands.append(f"{ranks} stand{'s' if is_one else ''} at step {step} since {since}")
        else:
            stands.append(f"{ranks} {'has' if is_one else 'have'} made no step in this generation")
    return f"no step for {_seconds(longest_s)} (limit {_seconds(hang.limit_s)}{usual}): {'; '.join(stands)}"


def _doing(activity: WorkerActivity) -> str:
    if not activity.stacks:
        return activity.facts
    frames = main_thread(activity.stacks)
    others = max(0, len(_THREAD.findall(activity.stacks)) - 1)
    more = f" ({others} more thread{'s' if others > 1 else ''} in the log)" if others else ""
    return "\n".join([f"in the main thread, innermost call first{more}:", *frames])


def _short_frame(line: str) -> str:
    found = _FRAME.match(line)
    if found is None:
        return line
    path = "/".join(found["path"].split("/")[-_PATH_PARTS:])
    return f"  {found['name']} ({path}:{found['line']})"


def _seconds(value: float) -> str:
    return f"{value:.0f} s" if value >= 10 else f"{value:.2g} s"


def _utc(time: float) -> str:
    return datetime.fromtimestamp(time, timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")
