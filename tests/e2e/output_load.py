"""Workers that print a lot, a console that counts every line, and what carrying it costs the agent."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from tests.agent_client import until
from tests.e2e.agent_process import AgentProcess

# Prints numbered lines of 100 bytes, each with a write of its own, at so many bytes a second (0: as fast as it can) until
# it has printed so many, to both streams in turn. Every so many lines comes one that a log rule looks for.
PRINTER = """
import os, sys, time
rank, rate, count, step_every = os.environ["RANK"], float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
words = ("iteration %d of the epoch: loader 0.0131 s, forward 0.0422 s, backward 0.0871 s, memory 61.3 GiB" % rate).encode()
steps = b"loss: 2.3125 TFLOPs: 412.5 samples/s: 1843.2 grad_norm: 0.9821 lr: 3.0e-04 tokens: 1048576 ..............."
begin = time.monotonic()
for number in range(count):
    head = b"line %s %09d " % (rank.encode(), number)
    line = (head + (steps if number % step_every == 0 else words))[:99].ljust(99, b".") + b"\\n"
    os.write(1 + number % 2, line)
    if rate and number % 100 == 99:
        ahead = number * 100 / rate - (time.monotonic() - begin)
        if ahead > 0:
            time.sleep(ahead)
"""

# Reads what the agent prints, checks that each rank's lines of each stream come whole and in order, passes on all other
# lines, and ends with what it counted. argv: seconds to sleep between reads.
CONSOLE = """
import json, os, sys, time
expected, count, wrong, rest = {}, 0, [], b""
while data := os.read(0, 1 << 20):
    lines = (rest + data).split(b"\\n")
    rest = lines.pop()
    for line in lines:
        if not line.startswith(b"[default") or b":line " not in line[:20]:
            print(line.decode("utf-8", "replace"), flush=True)
            continue
        head, rank, number = line[: line.index(b"]:") + 2], *line[line.index(b"]:") + 7 :].split(b" ", 2)[:2]
        stream = rank, int(number) % 2
        is_whole = len(line) - len(head) == 99
        if not is_whole or int(number) != expected.get(stream, stream[1]):
            wrong.append(line.decode("utf-8", "replace"))
        expected[stream] = int(number) + 2
        count += 1
    time.sleep(float(sys.argv[1]))
print("console: " + json.dumps({"lines": count, "wrong": wrong[:5], "num_wrong": len(wrong), "rest": len(rest)}), flush=True)
"""

# One rule of each kind.
TYPICAL_RULES: list[dict[str, Any]] = [
    {
        "name": "JobStart",
        "logPattern": ".*Experiment configuration.*",
        "expectedStartCutOffInSeconds": 600,
        "stopPattern": ".*loss: .*",
    },
    {"name": "Hang", "logPattern": r".*loss: (\d+\.\d+).*", "expectedRecurringFrequencyInSeconds": 300},
    {
        "name": "Slow",
        "logPattern": r".*TFLOPs: (\d+\.?\d*).*",
        "metricThreshold": 80,
        "operator": "lteq",
        "metricEvaluationDataPoints": 25,
    },
    {"name": "DeviceError", "logPattern": ".*(CUDA error|NCCL error|Xid).*", "faultOnMatch": True},
]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputLoad:
    """What a run cost. Percentages of one core while the workers printed; printed_mb_s: what they got out then."""

    agent_percent: float
    matcher_percent: float
    printed_mb_s: float
    num_lines: int
    num_expected: int
    num_wrong: int
    wrong: list[str]  # the first of them


def run_load(
    folder: Path,
    *,
    rate_mb_s: float = 10.0,
    seconds: float = 10.0,
    nproc: int = 1,
    rules: Sequence[dict[str, Any]] = (),
    options: Sequence[str] = (),
    slow_s: float = 0.0,
    num_lines: int | None = None,
    step_every: int = 1000,
) -> OutputLoad:
    """Let ``nproc`` workers print this much together; measured in between, after the start and before the end.

    rate_mb_s: 0 = at full speed, with ``num_lines`` per worker. slow_s: how long the console sleeps between reads.
    step_every: lines from one that the rules look for to the next; at 10 MB/s 1000 means 100 steps a second.
    """
    count = int(rate_mb_s * 1e6 * (seconds + 2) / nproc / 100) if num_lines is None else num_lines
    (folder / "printer.py").write_text(PRINTER)
    (folder / "console.py").write_text(CONSOLE)
    wrapper = ["/bin/sh", "-c", f'"$@" 2>&1 | {sys.executable} console.py {slow_s}', "sh"]
    arguments = [
        f"--nproc-per-node={nproc}",
        *options,
        "printer.py",
        str(rate_mb_s * 1e6 / nproc),
        str(count),
        str(step_every),
    ]
    agent = AgentProcess(folder, arguments, wrapper=wrapper)
    try:
        until(agent.answers, "the agent to listen")
        process = next(
            one for one in psutil.Process(agent.process.pid).children() if "elastipod_agent" in one.cmdline()
        )
        assert agent.start(log_monitoring_configuration=list(rules) or None) == (200, None)
        costs = _watch(process, seconds) if rate_mb_s else (0.0, 0.0, 0.0)
        seen = agent.until("completed")
        assert seen.get("reason") is None, seen
    finally:
        agent.end()
    counted = json.loads(agent.printed().rpartition("console: ")[2])
    assert counted["rest"] == 0, "the console's last line was not whole"
    return OutputLoad(
        agent_percent=costs[0],
        matcher_percent=costs[1],
        printed_mb_s=costs[2],
        num_lines=counted["lines"],
        num_expected=count * nproc,
        num_wrong=counted["num_wrong"],
        wrong=counted["wrong"],
    )


def _watch(agent: psutil.Process, seconds: float) -> tuple[float, float, float]:
    """Give the CPU of the agent, that of its matcher (both in percent of a core), and MB/s that the workers wrote."""
    time.sleep(1.0)
    workers = [one for one in agent.children() if "printer.py" in one.cmdline()]
    matchers = [one for one in agent.children() if any("matcher" in part for part in one.cmdline())]
    before = [_cpu_s([agent]), _cpu_s(matchers), sum(one.io_counters().write_chars for one in workers)]
    begin = time.monotonic()
    time.sleep(seconds)
    passed_s = time.monotonic() - begin
    after = [_cpu_s([agent]), _cpu_s(matchers), sum(one.io_counters().write_chars for one in workers)]
    agent_s, matcher_s, num_bytes = (late - early for late, early in zip(after, before, strict=True))
    return 100 * agent_s / passed_s, 100 * matcher_s / passed_s, num_bytes / passed_s / 1e6


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    return sum(sum(one.cpu_times()[:2]) for one in processes)
