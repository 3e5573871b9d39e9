"""The chart's dashboard as a page, drawn from its own file: each panel in its place, with the series of its own queries.

It stands in for Grafana, which the package registries do not have: places, titles, units, legends and stacking are those of
the file; the rest of Grafana's looks is left out.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DASHBOARD = Path(__file__).resolve().parents[1] / "charts/elastipod/dashboards/elastipod.json"
# What Grafana puts in place of its variables.
VARIABLES = {"$__rate_interval": "30s", "$namespace": ".*", "$job": ".*"}
COLORS = ("#3274a1", "#e1812c", "#3a923a", "#c03d3e", "#9372b2", "#845b53", "#d684bd", "#7f7f7f", "#a9aa35", "#2eabb8")
COLUMN, ROW, GAP = 58, 34, 8  # pixels of Grafana's grid
WIDTH = 24 * COLUMN + 2 * GAP
LEFT, RIGHT, TOP, BOTTOM = 54, 8, 6, 20  # around a plot
TICKS = 4
STYLE = f"""
body {{ margin: 0; background: #ffffff; color: #24292e; font: 12px 'DejaVu Sans', sans-serif; }}
main {{ position: relative; margin: {GAP}px; }}
h1 {{ margin: 0 0 4px; font-size: 18px; }} p {{ margin: 0 0 {GAP}px; color: #57606a; }}
section, h2 {{ position: absolute; box-sizing: border-box; overflow: hidden; margin: 0; }}
section {{ border: 1px solid #d0d7de; border-radius: 3px; padding: 5px 7px; }}
h2 {{ font-size: 14px; padding-top: 8px; }} h3 {{ margin: 0 0 2px; font-size: 12px; }}
ul {{ margin: 0; padding: 0; list-style: none; font-size: 10px; line-height: 13px; }}
li {{ display: inline-block; margin-right: 9px; }}
li i {{ display: inline-block; width: 10px; height: 3px; margin: 0 4px 3px 0; }}
.stat {{ display: flex; height: 80%; align-items: center; justify-content: center; font-size: 40px; }}
"""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a panel; a missing value is NaN."""

    name: str
    points: Sequence[Point]

    @property
    def is_empty(self) -> bool:
        return all(math.isnan(value) for _, value in self.points)


@dataclass(frozen=True, slots=True)
class Span:
    """The time that is shown, and between two points of it, in seconds."""

    start: float
    end: float
    step: float


# Gives the series of an expression over a time, as Prometheus answers.
Query = Callable[[str, Span], list[Any]]


def panels() -> list[dict[str, Any]]:
    """Give the panels and rows of the dashboard, with its variables filled in."""
    text = DASHBOARD.read_text(encoding="utf-8")
    found: list[dict[str, Any]] = json.loads(text)["panels"]
    for panel in found:
        for target in panel.get("targets", ()):
            for variable, value in VARIABLES.items():
                target["expr"] = target["expr"].replace(variable, value)
    return found


def series_of(panel: Mapping[str, Any], query: Query, span: Span) -> list[Series]:
    """Ask for what a panel shows."""
    found = []
    for target in panel.get("targets", ()):
        for one in query(target["expr"], span):
            labels: dict[str, str] = one["metric"]
            name = re.sub(r"{{(\w+)}}", lambda match, labels=labels: labels.get(match[1], ""), target["legendFormat"])  # type: ignore[misc]
            found.append(Series(name, [(float(at), float(value)) for at, value in one["values"]]))
    return found


def page(
    title: str, origin: str, span: Span, shown: Iterable[tuple[Mapping[str, Any], Sequence[Series]]]
) -> tuple[str, int]:
    """Give the page and its height. origin: a sentence below the title that says what the data is of."""
    parts, height = [], 0
    for panel, series in shown:
        place = panel["gridPos"]
        box = (place["x"] * COLUMN, 60 + place["y"] * ROW, place["w"] * COLUMN - GAP, place["h"] * ROW - GAP)
        height = max(height, box[1] + box[3])
        where = "left:{}px;top:{}px;width:{}px;height:{}px".format(*box)
        if panel["type"] == "row":
            parts.append(f"<h2 style='{where}'>{html.escape(panel['title'])}</h2>")
        else:
            drawn = _stat(panel, series) if panel["type"] == "stat" else _plot(panel, series, span, box[2] - 16, box[3])
            parts.append(f"<section style='{where}'><h3>{html.escape(panel['title'])}</h3>{drawn}</section>")
    head = f"<h1>{html.escape(title)}</h1><p>{html.escape(origin)}</p>"
    text = f"<!doctype html><meta charset=utf-8><style>{STYLE}</style><main>{head}{''.join(parts)}</main>"
    return text, height + 2 * GAP


def _stat(panel: Mapping[str, Any], series: Sequence[Series]) -> str:
    values = [value for one in series for _, value in one.points if not math.isnan(value)]
    said = in_unit(values[-1], _unit(panel)) if values else "no data"
    return f"<div class=stat>{said}</div>"


def _plot(panel: Mapping[str, Any], series: Sequence[Series], span: Span, width: int, height: int) -> str:
    """Draw lines, or areas on top of each other, with a legend below."""
    legend = "".join(
        f"<li><i style='background:{COLORS[at % len(COLORS)]}'></i>{html.escape(one.name)}</li>"
        for at, one in enumerate(series)
    )
    lines_of_legend = max(1, math.ceil(sum(len(one.name) * 6.6 + 30 for one in series) / (width - 60)))
    height = height - 34 - 13 * lines_of_legend
    custom = panel["fieldConfig"]["defaults"]["custom"]
    stacked = custom["stacking"]["mode"] == "normal"
    bands = _stacked(series) if stacked else [(one.points, None) for one in series]
    values = [value for points, _ in bands for _, value in points if not math.isnan(value)]
    ticks = ticks_up_to(max(values, default=1.0))
    top = ticks[-1]

    def x(at: float) -> float:
        return LEFT + (at - span.start) / (span.end - span.start) * (width - LEFT - RIGHT)

    def y(value: float) -> float:
        return height - BOTTOM - value / top * (height - TOP - BOTTOM)

    parts = []
    for tick in ticks:
        parts.append(f"<path d='M{LEFT} {y(tick):.1f}H{width - RIGHT}' stroke='#e6e9ec'/>")
        parts.append(
            f"<text x='{LEFT - 5}' y='{y(tick) + 3.5:.1f}' text-anchor='end'>{in_unit(tick, _unit(panel))}</text>"
        )
    for minute in range(int((span.end - span.start) // 60) + 1):
        at = x(span.start + 60 * minute)
        parts.append(f"<text x='{at:.1f}' y='{height - 6}' text-anchor='middle'>{minute} min</text>")
    for at, (points, below) in enumerate(bands):
        color = COLORS[at % len(COLORS)]
        for run in runs(points, span.step):
            if len(run) == 1:
                parts.append(f"<circle cx='{x(run[0][0]):.1f}' cy='{y(run[0][1]):.1f}' r='1.5' fill='{color}'/>")
                continue
            if below is not None:
                back = [(time, below[time]) for time, _ in reversed(run)]
                parts.append(f"<path d='{_path([*run, *back], x, y)}Z' fill='{color}' fill-opacity='0.35'/>")
            parts.append(f"<path d='{_path(run, x, y)}' fill='none' stroke='{color}' stroke-width='1.5'/>")
    plot = f"<svg width='{width}' height='{height}' font-size='10' fill='#57606a'>{''.join(parts)}</svg>"
    return f"{plot}<ul>{legend}</ul>"


def _stacked(series: Sequence[Series]) -> list[tuple[list[Point], dict[float, float]]]:
    """Give for each series the line on top of those before it, and what is below that line."""
    below: dict[float, float] = {}
    found = []
    for one in series:
        before = {at: below.get(at, 0.0) for at, _ in one.points}
        line = [(at, before[at] + value) for at, value in one.points]
        below |= {at: value for at, value in line if not math.isnan(value)}
        found.append((line, before))
    return found


def runs(points: Sequence[Point], step: float) -> list[list[Point]]:
    """Part points where a value is missing: nothing is drawn over a gap."""
    found: list[list[Point]] = []
    last = -math.inf
    for at, value in points:
        if math.isnan(value):
            continue
        if at - last > 1.5 * step:
            found.append([])
        found[-1].append((at, value))
        last = at
    return found


def _path(points: Sequence[Point], x: Callable[[float], float], y: Callable[[float], float]) -> str:
    return "M" + "L".join(f"{x(at):.1f} {y(value):.1f}" for at, value in points)


def ticks_up_to(highest: float) -> list[float]:
    """Give round values from 0 on, the last of which is not below the highest value."""
    if highest <= 0:
        return [0.0, 1.0]
    power = 10 ** math.floor(math.log10(highest / TICKS))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor * TICKS >= highest * 0.999)
    return [step * number for number in range(math.ceil(highest * 0.999 / step) + 1)]


def in_unit(value: float, unit: str) -> str:
    """Say a value as Grafana does in a unit."""
    if unit == "percentunit":
        return f"{value * 100:.3g} %"
    if unit != "s":
        return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    if 0 < value < 1:
        return f"{value * 1000:.3g} ms"
    return f"{value:.3g} s" if value < 120 else f"{value / 60:.3g} min"


def _unit(panel: Mapping[str, Any]) -> str:
    return str(panel["fieldConfig"]["defaults"].get("unit", "short"))
