"""Hangs: workers that report steps and have reported no new one for too long. Decides from samples; reads no clock.

Silence is added up from observation to observation, and one interval never counts for more than twice the polling interval. A frozen
agent, a frozen pod or a clock that was set is therefore not taken for a hang.

Of a process that has reported before, silence counts from the start of each further generation on. Its first step there may wait for
processes that are new, in other pods too, and import, build and compile: such silence is a hang only of a worker that hangs by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median

FLOOR_S = 600.0
FACTOR = 10.0
# How long a first step may wait for others: ranks wait for half of it for a new process to come, and it may compile then.
FIRST_STEP_S = 3600.0
CHECKPOINT_S = 9000.0  # of silence within one checkpoint call; the library itself gives up after 7200 s
_SHARE = 0.5  # of the limit: workers that have been silent that long are named too
_MIN_REPORTS = 5  # the first steps compile, load and warm up; they do not show the usual time
_WINDOW = 64
_LONGEST_POLL_S = 0.5  # a hang is to be known within a second after the limit, however long that is
_SHORTEST_POLL_S = 0.05
_POLLS_PER_LIMIT = 10.0


@dataclass(frozen=True, slots=True)
class Sample:
    """What one living worker had reported at an observation. num_reports: of its process; time: Unix, by the worker's clock.

    is_in_checkpoint: the worker is in a call that saves or loads a checkpoint. has_reported: in this generation.
    """

    local_rank: int
    num_reports: int
    step: int
    time: float
    is_in_checkpoint: bool = False
    has_reported: bool = True


@dataclass(frozen=True, slots=True)
class SilentWorker:
    """A worker that hangs: its last step, when it reported it (Unix), and its silence as counted by the agent.

    has_reported: in this generation; else the step is one of a generation before.
    """

    local_rank: int
    step: int
    since: float
    silent_s: float
    has_reported: bool = True


@dataclass(frozen=True, slots=True)
class Hang:
    """A hang. limit_s: the limit that was exceeded; step_s: the usual time of a step, None if unknown.

    awaits_first_step: the workers may wait for new processes that have not come as far as they: it is a hang only if one of them hangs
    by itself, and `HangDetector.excuse` goes on otherwise.

    silent: the workers beyond the limit and those beyond half of it, since workers that wait for each other reach it one by one.
    """

    silent: tuple[SilentWorker, ...]
    limit_s: float
    step_s: float | None
    awaits_first_step: bool = False


@dataclass(slots=True)
class _Pace:
    """What is known of one worker: its last report, its silence since, and its pace before."""

    last: Sample
    silent_s: float = 0.0
    excused_s: float = 0.0  # of the silence
    in_checkpoint_s: float = 0.0  # of the current checkpoint call
    steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    gaps_s: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))

    @property
    def unexcused_s(self) -> float:
        return self.silent_s - self.excused_s


class HangDetector:
    """Finds hangs among the workers of one pod, in one generation after the other.

    timeout_s: the silence that is a hang. None: FACTOR times the usual time between a worker's reports of new steps, at least FLOOR_S,
    and only for workers with a handful of reports.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._paces: dict[int, _Pace] = {}
        self._observed_at: float | None = None

    @property
    def poll_interval_s(self) -> float:
        """Seconds between two observations."""
        limit_s = FLOOR_S if self._timeout_s is None else self._timeout_s
        return min(_LONGEST_POLL_S, max(_SHORTEST_POLL_S, limit_s / _POLLS_PER_LIMIT))

    def begin_generation(self) -> None:
        """Count silence from now on, and keep what is known of the pace of processes that live on."""
        self._observed_at = None
        for pace in self._paces.values():
            pace.silent_s = pace.excused_s = pace.in_checkpoint_s = 0.0

    def excuse(self, hang: Hang) -> None:
        """Let the workers of a hang that wait for others go on; they are looked at again after another limit."""
        for one in hang.silent:
            if one.local_rank in self._paces:
                self._paces[one.local_rank].excused_s = self._paces[one.local_rank].silent_s

    def observe(
        self, now: float, samples: Iterable[Sample], *, is_ending: bool = False, early_s: float = 0.0
    ) -> Hang | None:
        """Observe the living workers at this time (monotonic seconds); give the hang, if there is one.

        ``samples`` leaves out workers whose process has made no report. is_ending: a drain or a stop is under way, so no new steps are
        expected. early_s: what silence may lack of the limit.
        """
        passed_s = 0.0 if self._observed_at is None else min(now - self._observed_at, 2 * self.poll_interval_s)
        self._observed_at = now
        present = {sample.local_rank: sample for sample in samples}
        self._paces = {rank: pace for rank, pace in self._paces.items() if rank in present}
        for sample in present.values():
            self._note(sample, passed_s)
        if is_ending:
            return None
        limits = {rank: limit_s for rank, pace in self._paces.items() if (limit_s := self._limit_s(pace)) is not None}
        passed = [limit_s for rank, limit_s in limits.items() if self._paces[rank].unexcused_s >= limit_s - early_s]
        passed += [CHECKPOINT_S for rank in limits if self._paces[rank].in_checkpoint_s >= CHECKPOINT_S]
        return self._verdict(limits, min(passed)) if passed else None

    def _note(self, sample: Sample, passed_s: float) -> None:
        pace = self._paces.get(sample.local_rank)
        if pace is None or sample.num_reports < pace.last.num_reports:  # of another process
            self._paces[sample.local_rank] = _Pace(sample)
            return
        before, pace.last = pace.last, sample
        pace.in_checkpoint_s = pace.in_checkpoint_s + passed_s if sample.is_in_checkpoint else 0.0
        if sample.num_reports == before.num_reports:
            pace.silent_s += 0.0 if sample.is_in_checkpoint else passed_s
            return
        pace.silent_s = pace.excused_s = 0.0
        if not before.has_reported:
            return  # since a report of a generation before
        steps, gap_s = sample.step - before.step, sample.time - before.time
        if steps > 0 and gap_s > 0:
            pace.steps_s.append(gap_s / steps)
            pace.gaps_s.append(gap_s)

    def _limit_s(self, pace: _Pace) -> float | None:
        """Give the silence that is a hang for this worker, None while it is unknown."""
        if self._timeout_s is not None:
            return self._timeout_s
        if pace.last.num_reports < _MIN_REPORTS:
            return None
        return max(FLOOR_S, FACTOR * median(pace.gaps_s)) if pace.gaps_s else FLOOR_S

    def _verdict(self, limits: Mapping[int, float], limit_s: float) -> Hang:
        steps_s = [step_s for pace in self._paces.values() for step_s in pace.steps_s]
        silent = [
            SilentWorker(rank, last.step, last.time, pace.silent_s + pace.in_checkpoint_s, last.has_reported)
            for rank, pace in sorted(self._paces.items())
            if rank in limits
            and (pace.silent_s >= _SHARE * limits[rank] or pace.in_checkpoint_s >= _SHARE * CHECKPOINT_S)
            for last in [pace.last]
        ]
        return Hang(
            silent=tuple(silent),
            limit_s=limit_s,
            step_s=median(steps_s) if steps_s else None,
            awaits_first_step=all(not one.has_reported and one.silent_s < FIRST_STEP_S for one in silent),
        )
