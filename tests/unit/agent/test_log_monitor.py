"""The watch over lines with a real matcher process: slow patterns, its death, a backlog, and a clean end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import psutil
import pytest
from tests.patience import PATIENCE_S

from elastipod_agent.core.log_rules import LogRule
from elastipod_agent.log import EventLog
from elastipod_agent.workers import log_matcher, log_monitor
from elastipod_agent.workers.log_monitor import LogMonitor
from elastipod_agent.workers.monitors import Finding
from elastipod_agent.workers.reaper import ChildProcess, Reaper

EVIL = LogRule(name="evil", log_pattern=r"(x+x+)+y", expected_start_cutoff_s=30)
EVIL_LINE = b"x" * 60 + b"\n"
LOSS = LogRule(name="loss", log_pattern=r".*loss: (\S+)", metric_threshold=0, operator="lt")


class Starter:
    """Starts processes as the agent's reaper does, but leaves other children of this process alone."""

    def __init__(self) -> None:
        self.children: list[ChildProcess] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def spawn(self, command: Sequence[str], env: Mapping[str, str], *, stdout: int, stderr: int) -> ChildProcess:
        process = await asyncio.create_subprocess_exec(*command, env=dict(env), stdout=stdout, stderr=stderr)
        child = ChildProcess(process.pid)
        self.children.append(child)
        self._tasks.append(asyncio.ensure_future(self._wait(process, child)))
        return child

    async def _wait(self, process: asyncio.subprocess.Process, child: ChildProcess) -> None:
        child.end(await process.wait())

    async def done(self) -> None:
        await asyncio.gather(*self._tasks)


class Watching:
    """A log watch that runs, and what it logs."""

    def __init__(self, *rules: LogRule, **options: Any) -> None:
        self.said: list[str] = []
        self.starter = Starter()
        self.watch = LogMonitor(
            rules,
            reaper=cast(Reaper, self.starter),
            environ=dict(os.environ),
            log=EventLog(self.said.append, "ns/job"),
            catch_up=_caught_up,
            **options,
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Task[Finding]]:
        task = asyncio.ensure_future(self.watch.run())
        yield task
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await self.starter.done()

    async def until(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, "waited in vain"
            await asyncio.sleep(0.005)

    async def until_matched(self, index: int, count: int) -> None:
        await self.until(lambda: self.watch.trackers[index].num_matches >= count)


def _caught_up() -> Future[None]:
    done: Future[None] = Future()
    done.set_result(None)
    return done


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_monitor, "_GATHER_S", 0.01)
    monkeypatch.setattr(log_monitor, "_START_AGAIN_S", 0.01)
    monkeypatch.setattr(log_matcher, "LIMIT_S", 0.2)


async def test_numbers_are_compared_in_order_and_what_is_no_number_counts_as_a_match_only() -> None:
    rule = LogRule(
        name="slow", log_pattern=r"rate (\S+)", metric_threshold=10, operator="lt", metric_evaluation_points=3
    )
    watching = Watching(rule)
    async with watching.running() as task:
        watching.watch.take(b"rate 5\nrate 6\nnoise\nrate 50\nrate 1\nrate nan\nrate none\nrate 2\n")
        await watching.until_matched(0, 7)
        assert (watching.watch.trackers[0].num_bad, task.done()) == (2, False)
        watching.watch.take(b"rate 3e0\n")
        finding = await task
    assert finding.reason == "LogSlow_slow"
    assert "below 10 3 times in a row; the last is 3: rate 3e0" in finding.message


def test_lines_that_fill_the_memory_for_waiting_ones_are_kept_and_those_beyond_are_counted() -> None:
    backlog = log_monitor.Backlog([LogRule(name="loss", log_pattern="loss")], max_bytes=14)
    assert backlog.take(b"loss 1\nloss 2\n")
    assert backlog.dropped() == [0]
    assert backlog.take(b"loss 3\nloss 4\n")
    assert backlog.dropped() == [2]
    assert backlog.give(0) == (b"loss 1\nloss 2\n", 1)


async def test_a_stop_pattern_ends_the_rule_in_the_middle_of_a_block() -> None:
    stopped = LogRule(name="stopped", log_pattern="bad", fault_on_match=True, stop_pattern="^all well$")
    other = LogRule(name="other", log_pattern="bad", fault_on_match=True)
    watching = Watching(stopped, other)
    async with watching.running() as task:
        watching.watch.take(b"all well\nbad luck\n")
        assert (await task).reason == "LogFault_other"
        assert watching.watch.trackers[0].is_over


async def test_a_carriage_return_ends_a_line_and_bytes_that_are_no_text_do_no_harm() -> None:
    rule = LogRule(name="bar", log_pattern=r"^\s*(\d+)%$")
    watching = Watching(rule)
    async with watching.running():
        watching.watch.take(b"\r 10%\r 20%\r\xff\xfe\r\n")
        await watching.until_matched(0, 2)
        assert watching.watch.trackers[0].last_line == " 20%"


async def test_a_catastrophic_pattern_is_given_up_and_costs_the_others_no_line() -> None:
    watching = Watching(EVIL, LOSS)
    async with watching.running() as task:
        for number in range(200):
            watching.watch.take(EVIL_LINE + b"step %d loss: %d\n" % (number, number))
        watching.watch.take(EVIL_LINE)
        assert watching.watch.trackers[1].num_matches == 0, "the output thread never waits for a pattern"
        await watching.until_matched(1, 200)
        assert len(watching.starter.children) == 1  # the matcher itself gave the search up
        watching.watch.take(EVIL_LINE + b"loss: -1\n")
        assert (await task).reason == "LogSlow_loss"
    (line,) = watching.said
    assert 'WARNING log rule is no longer monitored job=ns/job rule=evil why="its pattern took more than 0.2 s' in line


async def test_a_pattern_that_cannot_even_be_interrupted_costs_the_matcher_but_no_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(log_matcher, "LIMIT_S", 1e6)
    monkeypatch.setattr(log_matcher, "_POLL_S", 0.05)
    monkeypatch.setattr(log_matcher, "_KILL_AFTER_S", 0.5)  # the start of the matcher takes some of it
    watching = Watching(LOSS, EVIL, LOSS)
    async with watching.running():
        watching.watch.take(b"loss: 1\n" + EVIL_LINE + b"loss: 2\n")
        await watching.until_matched(2, 2)
        await watching.until(lambda: watching.said)
        watching.watch.take(b"loss: 3\n" + EVIL_LINE)
        await watching.until_matched(2, 3)
    assert [watch.num_matches for watch in watching.watch.trackers] == [3, 0, 3]
    assert len(watching.said) == 1
    assert "rule=evil" in watching.said[0]


async def test_a_matcher_that_is_killed_again_and_again_costs_no_line() -> None:
    watching = Watching(LOSS)
    async with watching.running():
        for number in range(20):
            watching.watch.take(b"".join(b"loss: %d\n" % n for n in range(500)))
            await watching.until(lambda: watching.starter.children)
            if number % 2:
                watching.starter.children[-1].send(signal.SIGKILL)
            await asyncio.sleep(0.01)
        await watching.until_matched(0, 10_000)
    assert watching.watch.trackers[0].num_matches == 10_000
    assert len(watching.starter.children) > 1


async def test_what_the_matcher_cannot_keep_up_with_is_counted_and_puts_a_hang_off() -> None:
    hang = LogRule(name="hang", log_pattern="loss: ", expected_start_cutoff_s=3)
    watching = Watching(hang, max_waiting_bytes=50)
    watching.watch.take(b"loss: 1\n" * 20)
    async with watching.running() as task:
        await watching.until(lambda: watching.said)
        await asyncio.sleep(0.5)
        watching.watch.take(b"loss: 1\n" * 20)
        dropped_at = time.monotonic()
        assert (await task).reason == "LogHang_hang"
        assert time.monotonic() - dropped_at >= 3
    (line,) = watching.said
    assert line.endswith("WARNING log rules: lines were not matched, the matcher is behind job=ns/job lines=20")


async def test_a_silence_counts_only_once_all_that_was_printed_has_been_read() -> None:
    hang = LogRule(name="hang", log_pattern="loss: ", expected_start_cutoff_s=0.05)
    watching = Watching(hang)
    asked: list[Future[None]] = []

    def catch_up() -> Future[None]:
        asked.append(Future())
        return asked[-1]

    watching.watch._catch_up = catch_up
    async with watching.running() as task:
        await watching.until(lambda: asked)
        await asyncio.sleep(0.1)
        assert not task.done()
        watching.watch.take(b"loss: 1\n")  # was in the pipe all the time
        asked[0].set_result(None)
        await watching.until_matched(0, 1)
        await asyncio.sleep(0.05)
        assert not task.done()
        assert len(asked) == 1


async def test_no_hang_where_no_more_lines_are_expected() -> None:
    hang = LogRule(name="hang", log_pattern="loss: ", expected_start_cutoff_s=0.01)
    is_over = True
    watching = Watching(hang, is_over=lambda: is_over)
    async with watching.running() as task:
        await asyncio.sleep(0.1)
        assert not task.done()
        is_over = False
        assert (await task).reason == "LogHang_hang"


async def test_a_matcher_that_cannot_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/nowhere/python")
        watching = Watching(LOSS)
        async with watching.running():
            watching.watch.take(b"loss: 1\n")
            await watching.until(lambda: watching.said)
            patch.undo()
            await watching.until_matched(0, 1)
    (line,) = watching.said
    assert "log rules cannot be matched now" in line


async def test_the_end_leaves_nothing() -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    for seconds in (0.0, 0.01, 0.05, 0.3):  # before, while and after the matcher starts
        watching = Watching(LOSS, EVIL)
        watching.watch.take(b"loss: 1\n" + EVIL_LINE)
        async with watching.running():
            await asyncio.sleep(seconds)
        watching.watch.take(b"loss: 2\n")
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert not psutil.Process().children()
    assert sorted(os.listdir("/proc/self/fd")) == before
