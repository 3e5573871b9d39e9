"""Monitors worker output by the log rules: sends lines that may match to the matcher, and checks matches and silence."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress

from elastipod_agent.core.log_lines import candidates
from elastipod_agent.core.log_literals import required_literals
from elastipod_agent.core.log_rule_tracker import Matches, RuleTracker, SteadyClock, next_deadline
from elastipod_agent.core.log_rules import LogRule
from elastipod_agent.core.requests import StartRequest
from elastipod_agent.log import EventLog
from elastipod_agent.waiting import set_within
from elastipod_agent.workers.linux import fast_find
from elastipod_agent.workers.log_matcher import Matcher, MatcherGone, MatcherStuck
from elastipod_agent.workers.monitors import Finding
from elastipod_agent.workers.output_pump import OutputPump
from elastipod_agent.workers.reaper import Reaper

MAX_WAITING_BYTES = 8 << 20  # lines that wait for the matcher; lines beyond are not matched
REQUEST_BYTES = 256 * 1024
_GATHER_S = 0.25  # lines are matched in batches, which delays a match by this much and saves CPU time
_STEP_S = 1.0
_WARN_AGAIN_S = 60.0
_START_AGAIN_S = 1.0
_MAX_DEATHS = 3  # of the matcher by one request, before its rule is given up


class Backlog:
    """Lines that wait for the matcher, by rule. The output thread fills it, the event loop empties it."""

    def __init__(self, rules: Sequence[LogRule], max_bytes: int = MAX_WAITING_BYTES) -> None:
        self._texts = [required_literals(rule.log_pattern, rule.stop_pattern) for rule in rules]
        self.num_taken = 0  # blocks, ever
        self._waiting: list[deque[bytes]] = [deque() for _ in rules]
        self._dropped = [0] * len(rules)
        self._num_bytes = 0
        self._max_bytes = max_bytes
        self._lock = threading.Lock()

    def take(self, lines: bytes) -> bool:
        """Keep lines that may match; True if there are any."""
        has_any = False
        find = fast_find(lines)
        with self._lock:
            for index, texts in enumerate(self._texts):
                block = candidates(lines, texts, find)
                if not block:
                    continue
                has_any = True
                if self._num_bytes + len(block) > self._max_bytes:
                    self._dropped[index] += block.count(b"\n")
                    continue
                self._waiting[index].append(block)
                self._num_bytes += len(block)
                self.num_taken += 1
        return has_any

    def give(self, index: int) -> tuple[bytes, int]:
        """Give lines of one rule, at most about REQUEST_BYTES, and their number of blocks."""
        blocks: list[bytes] = []
        size = 0
        with self._lock:
            waiting = self._waiting[index]
            while waiting and size < REQUEST_BYTES:
                blocks.append(waiting.popleft())
                size += len(blocks[-1])
            self._num_bytes -= size
        return b"".join(blocks), len(blocks)

    def dropped(self) -> list[int]:
        """Give how many lines of each rule were dropped since the last call."""
        with self._lock:
            dropped, self._dropped = self._dropped, [0] * len(self._dropped)
        return dropped

    def forget(self, index: int) -> int:
        """Keep no more lines for a rule; gives how many blocks were dropped."""
        with self._lock:
            self._texts[index] = ()
            num = len(self._waiting[index])
            self._num_bytes -= sum(map(len, self._waiting[index]))
            self._waiting[index].clear()
        return num


class LogMonitor:
    """Monitors the lines of local rank 0 in one generation by its log rules, from `run` on.

    catch_up: gives a future that is done once all output until now was taken. is_over: tells whether no more lines are expected, because
    of a stop or because the worker has ended.
    """

    def __init__(
        self,
        rules: Sequence[LogRule],
        *,
        reaper: Reaper,
        environ: Mapping[str, str],
        log: EventLog,
        catch_up: Callable[[], Future[None]],
        is_over: Callable[[], bool] = lambda: False,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
    ) -> None:
        self.trackers = [RuleTracker(rule=rule) for rule in rules]
        self._reaper = reaper
        self._environ = environ
        self._log = log
        self._catch_up = catch_up
        self._is_over = is_over
        self._backlog = Backlog(rules, max_waiting_bytes)
        self._num_matched = 0  # blocks of the backlog that were handled
        self._matcher: Matcher | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._arrived = asyncio.Event()
        self._changed = asyncio.Event()
        self._is_notified = False
        self._is_closed = False
        self._num_dropped = 0
        self._warned_at: float | None = None

    def take(self, lines: bytes) -> None:
        """Take complete lines of one stream. Called in the output thread; never waits."""
        if self._is_closed or not self._backlog.take(lines) or self._is_notified or self._loop is None:
            return
        self._is_notified = True
        with suppress(RuntimeError):  # the agent is shutting down
            self._loop.call_soon_threadsafe(self._arrived.set)

    async def run(self) -> Finding:
        """Return once a rule is in a fault state."""
        self._loop = asyncio.get_running_loop()
        self._clock = SteadyClock(self._loop.time(), _STEP_S)
        self._arrived.set()
        tasks = [asyncio.ensure_future(self._feed()), asyncio.ensure_future(self._watch_silence())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return next(task for task in tasks if task.done()).result()
        finally:
            self._is_closed = True
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._end_matcher()

    # -- lines ---------------------------------------------------------------------------------------------------

    async def _feed(self) -> Finding:
        """Match lines as they arrive, until a match is a finding."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            self._is_notified = False
            is_more = True
            while is_more:
                is_more = await self._feed_round()
                finding = self._finding()
                if finding is not None:
                    return finding
            await asyncio.sleep(_GATHER_S)

    async def _feed_round(self) -> bool:
        """Match some lines of each rule, so that no rule waits for another; True if more lines wait."""
        given = [(index, *self._backlog.give(index)) for index in range(len(self.trackers))]
        requests = [(index, lines) for index, lines, _ in given if lines and self.trackers[index].is_watched]
        if requests:
            for (index, _), matches in zip(requests, await self._ask(requests), strict=True):
                self._judge(index, matches)
        self._num_matched += sum(num_blocks for _, _, num_blocks in given)
        self._changed.set()
        return any(len(lines) >= REQUEST_BYTES for _, lines, _ in given)

    def _judge(self, index: int, matches: Matches | str) -> None:
        tracker = self.trackers[index]
        if isinstance(matches, Matches):
            tracker = tracker.add_matches(self._now(), matches)
        else:
            self._log.warning("log rule is no longer monitored", rule=tracker.rule.name, why=matches)
            tracker = tracker.stop()
        self.trackers[index] = tracker
        if not tracker.is_watched:
            self._num_matched += self._backlog.forget(index)

    async def _ask(self, requests: list[tuple[int, bytes]]) -> list[Matches | str]:
        """Give the matches of each rule, or why the rule cannot be matched."""
        why = ""
        for _ in range(_MAX_DEATHS):
            matcher = await self._ready_matcher()
            try:
                return await matcher.ask(requests)
            except (MatcherGone, MatcherStuck) as error:
                await self._end_matcher()
                if len(requests) > 1:  # one of them is the cause: ask again one by one
                    return [matches for one in requests for matches in await self._ask([one])]
                why = str(error)
                if isinstance(error, MatcherStuck):
                    break
        return [why]

    async def _ready_matcher(self) -> Matcher:
        """Give the matcher; start it if necessary, and retry until that succeeds."""
        has_failed = False
        while self._matcher is None:
            matcher = Matcher(self._reaper, self._environ, [tracker.rule for tracker in self.trackers])
            self._matcher = matcher
            try:
                await matcher.start()
            except (OSError, MatcherGone, MatcherStuck) as error:
                if not has_failed:
                    self._log.warning("log rules cannot be matched now", why=repr(error))
                has_failed = True
                await self._end_matcher()
                await asyncio.sleep(_START_AGAIN_S)
        return self._matcher

    async def _end_matcher(self) -> None:
        matcher, self._matcher = self._matcher, None
        if matcher is not None:
            await matcher.close()

    # -- silence -------------------------------------------------------------------------------------------------

    async def _watch_silence(self) -> Finding:
        """Check the silence of each rule at its deadline, until there is a finding."""
        while True:
            self._note_dropped()
            now = self._now()
            deadline = next_deadline(self.trackers)
            if deadline is None:
                await self._change(None)
            elif now < deadline:
                await self._change(min(_STEP_S, deadline - now))
            elif self._is_over():
                await self._change(_STEP_S)
            else:
                await self._settle()
                self._note_dropped()
                self.trackers = [tracker.check_silence(now) for tracker in self.trackers]
                finding = self._finding()
                if finding is not None and not self._is_over():
                    return finding

    async def _settle(self) -> None:
        """Wait until all output until now was matched, for as long as the console or a pattern takes."""
        caught_up = asyncio.wrap_future(self._catch_up())
        while not caught_up.done():
            await asyncio.wait([caught_up], timeout=_STEP_S)
            self._now()
        num_taken = self._backlog.num_taken
        while self._num_matched < num_taken:
            await self._change(_STEP_S)
            self._now()

    async def _change(self, limit_s: float | None) -> None:
        """Wait until lines were matched, or at most this long."""
        self._changed.clear()
        await set_within(self._changed, limit_s)

    def _note_dropped(self) -> None:
        """Restart the silence of rules with dropped lines, which may have matched."""
        now = self._now()
        for index, num in enumerate(self._backlog.dropped()):
            if num:
                self.trackers[index] = self.trackers[index].restart_silence(now)
                self._num_dropped += num
        if self._num_dropped and (self._warned_at is None or now - self._warned_at >= _WARN_AGAIN_S):
            self._log.warning("log rules: lines were not matched, the matcher is behind", lines=self._num_dropped)
            self._num_dropped = 0
            self._warned_at = now

    def _finding(self) -> Finding | None:
        return next((Finding(tracker.reason, tracker.message()) for tracker in self.trackers if tracker.reason), None)

    def _now(self) -> float:
        assert self._loop is not None
        return self._clock.at(self._loop.time())


def monitor_logs(
    start: StartRequest,
    job: str,
    *,
    reaper: Reaper,
    environ: Mapping[str, str],
    pump: OutputPump,
    is_over: Callable[[], bool],
) -> LogMonitor | None:
    """Give the log monitor of a generation, None if its start has no rule."""
    if not start.log_rules:
        return None
    log = EventLog(pump.print_line, job)
    log.group_rank = start.rank
    return LogMonitor(start.log_rules, reaper=reaper, environ=environ, log=log, catch_up=pump.catch_up, is_over=is_over)
