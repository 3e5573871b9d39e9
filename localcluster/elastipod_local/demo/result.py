"""The end of a demo: the audit of what was trained, report.json, the timeline's table and picture."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from elastipod_client.picture import draw
from elastipod_local.demo.report import FORCED_CAUSE, PAUSE_TARGET_S, Json, Run, build_report, shortcomings
from elastipod_local.demo.timeline import timeline_of
from elastipod_local.demo.urgent_job import UrgentRun, queue_report, queue_shortcomings
from elastipod_local.errors import LocalClusterError
from elastipod_operator.core.depth_reasons import DepthReason

AUDIT_DEADLINE_S = 60
MODEL_PARAMETERS = 2_700_000  # of examples/lm with its defaults
SCALE_NOTE = (
    f"These are CPU workers on one machine that train a model of {MODEL_PARAMETERS / 1e6:.1f} million parameters: the gaps "
    "are those of agreeing, connecting and checking; larger models add the time to send their state to those who lack it."
)


@dataclass(frozen=True, slots=True)
class Audit:
    """The result of `elastipod audit --json`: its exit status, its report, or its error message."""

    exit_status: int
    report: Mapping[str, Any]
    problem: str = ""


@dataclass(frozen=True, slots=True)
class DemoResult:
    """How a run ended: the report, what it failed to show, and a summary for users."""

    report: Json
    shortcomings: Sequence[str]
    summary: str


def audit(logs: Path) -> Audit:
    """Run `elastipod audit` as a user does, on the folder with the sample logs."""
    command = [sys.executable, "-m", "elastipod.cli", "audit", "--json", str(logs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=AUDIT_DEADLINE_S, check=False)
    try:
        return Audit(done.returncode, json.loads(done.stdout), done.stderr.strip())
    except json.JSONDecodeError:
        return Audit(done.returncode, {}, done.stderr.strip())


def write_result(
    run: Run, audited: Audit, state: str, urgent: UrgentRun, seconds: Mapping[str, float], folder: Path
) -> DemoResult:
    """Write report.json, timeline.svg and timeline.png into `folder`, and give how the run ended.

    run, audited and state (the last condition) are the elastic job's; seconds: how long each step of the demo took.
    """
    folder.mkdir(parents=True, exist_ok=True)
    report = {
        **build_report(run, audited.report),
        "queue": queue_report(run, urgent),
        "state": state,
        "demo_seconds": dict(seconds),
        "versions": versions(),
        "machine": machine(),
    }
    failed = shortcomings(report, state=state, audit_exit=audited.exit_status) + queue_shortcomings(report["queue"])
    if audited.problem:
        failed.append(audited.problem)
    report["ok"], report["shortcomings"] = not failed, failed
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    newcomer = report["queue"]["newcomer"]
    lines = [
        table(report),
        *depth_lines(report),
        *queue_lines(report["queue"]),
        samples_line("the elastic job", report),
        samples_line(newcomer["job"], newcomer),
        SCALE_NOTE,
    ]
    if report["phases"]:
        picture = folder / "timeline.svg"
        draw(timeline_of(run, title(report), urgent), picture, picture.with_suffix(".png"))
        lines.append(f"picture: {picture}")
    lines.append(f"report:  {folder / 'report.json'}")
    return DemoResult(report, failed, "\n".join(lines))


def title(report: Mapping[str, Any]) -> str:
    """Give the picture's title: the sizes and the faults."""
    sizes = " → ".join(map(str, report["sizes"]))
    recovered = len(report["recoveries"])
    crashes = f", {recovered} recovery" if recovered == 1 else f", {recovered} recoveries" if recovered else ""
    urgent = report["queue"]["newcomer"]
    visit = f"; {urgent['job']} comes and goes" if urgent["steps"] else ""
    return f"{sizes} replicas{crashes}{visit}"


TABLE_HEADS = (
    "generation", "replicas", "cause", "depth", "detected after", "training gap", "work lost", "pause", "target",
    "steps repeated", "reason for the depth",
)  # fmt: skip
PAUSE_IS = "pause: the gap without the time of a usual step, and without the work lost in a step that was interrupted"


def table(report: Mapping[str, Any]) -> str:
    """Give the changes of a run as a text table, one line each, in order."""
    rows = [TABLE_HEADS]
    found = sorted([*report["resizes"], *report["recoveries"]], key=lambda change: change["generation"])
    rows += [
        (
            str(change["generation"]),
            f"{change['from']} -> {change['to']}",
            change["cause"],
            change.get("depth") or "-",
            _seconds(change.get("detection_s")),
            _seconds(change["gap_s"]),
            _seconds(change.get("lost_s")),
            _seconds(change["pause_s"]),
            _target(change),
            str(change["steps_repeated"]),
            DepthReason(change.get("depth_code", "")).told(change.get("depth_reason", "")),
        )
        for change in found
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def depth_lines(report: Mapping[str, Any]) -> list[str]:
    """Compare the changes in memory with the forced restart of processes, in sentences."""
    found = sorted([*report["resizes"], *report["recoveries"]], key=lambda change: change["generation"])
    in_memory = [c["pause_s"] for c in found if c.get("depth") == "memory" and c["pause_s"] is not None]
    lines = [PAUSE_IS]
    if in_memory:
        lines.append(
            f"{len(in_memory)} changes in memory: pauses of {min(in_memory):.2f} to {max(in_memory):.2f} s; no worker that stayed "
            "was restarted"
        )
        targets = [c["pause_target_met"] for c in found if "pause_target_met" in c]
        lines.append(
            f"the target of {PAUSE_TARGET_S:g} s for a pause in memory was met by {sum(targets)} of {len(targets)}"
        )
    lines += [
        f"{change['from']} -> {change['to']} with new processes, for comparison: a pause of {change['pause_s']:.2f} s "
        f"({change['depth_reason']})"
        for change in found
        if change["cause"] == FORCED_CAUSE and change.get("depth_reason") and change["pause_s"] is not None
    ]
    return lines


def queue_lines(report: Mapping[str, Any]) -> list[str]:
    """Describe the second act in sentences."""
    urgent, shrink = report["newcomer"], report["given_up"]
    if not urgent["steps"] or urgent["quota_after_s"] is None or shrink is None:
        return []
    waited_s = urgent["first_step_s"] - urgent["arrived_s"]
    return [
        f"{urgent['job']}: had its quota {urgent['quota_after_s']:.1f} s after it was applied and made its first step after "
        f"{waited_s:.1f} s; while it made {urgent['steps']} steps, the elastic job made {report['meanwhile']['steps']}",
        f"Kueue's reason: {shrink['kueue_said']}",
    ]


def _target(change: Mapping[str, Any]) -> str:
    if "pause_target_s" not in change:
        return "-"
    return f"{change['pause_target_s']:g} s, {'met' if change['pause_target_met'] else 'missed'}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s"


def samples_line(whose: str, report: Mapping[str, Any]) -> str:
    """Say what the audit of a job counted."""
    counts = (report["samples_unique"], report["samples_expected"], report["samples_total"])
    if None in counts:
        return f"samples of {whose}: the audit gave no verdict"
    unique, expected, total = counts
    return f"samples of {whose}: {unique} of {expected} in the final weights, {total} trained in all"


def versions() -> dict[str, str | None]:
    """Give the versions that a figure of the report depends on."""
    return {
        "elastipod": _version("elastipod"),
        "torch": _version("torch"),
        "python": platform.python_version(),
        "kernel": platform.release(),
    }


def machine() -> dict[str, Any]:
    """Describe the machine of the figures."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_bytes / 2**30, 1),
        "architecture": platform.machine(),
        "load_1m": round(os.getloadavg()[0], 2),
    }


DIAGNOSTICS = {
    "jobs.txt": ("describe", "hyperpodpytorchjobs"),
    "pods.txt": ("describe", "pods", "--all-namespaces"),
    "nodes.txt": ("describe", "nodes"),
    "queues.txt": ("describe", "clusterqueues,localqueues,workloads", "--all-namespaces"),
    "events.txt": ("get", "events", "--all-namespaces", "--sort-by=.metadata.creationTimestamp"),
    "operator.log": ("logs", "--namespace=aws-hyperpod", "--selector=app.kubernetes.io/name=elastipod", "--tail=-1"),
    "workers.log": ("logs", "--selector=HPJob", "--prefix", "--tail=200"),
}


def collect_diagnostics(kubectl: Callable[..., str], folder: Path) -> Path:
    """Write diagnostics of a failure below `folder` and give the path. Failed queries are noted there."""
    target = folder / "failure"
    target.mkdir(parents=True, exist_ok=True)
    for name, arguments in DIAGNOSTICS.items():
        try:
            text = kubectl(*arguments, timeout_s=20)
        except LocalClusterError as error:
            text = f"{error}\n"
        (target / name).write_text(text)
    return target


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
