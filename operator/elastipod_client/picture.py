"""The picture of a job's life: replicas that train, phases, loss over time, cause and depth of every change. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from html import escape
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class JobPhase(StrEnum):
    """What the job does at a moment."""

    STARTING = "starting"
    TRAINING = "training"
    DRAINING = "draining"
    RESTARTING = "restarting"
    RECOVERING = "recovering"
    IN_MEMORY = "changing in memory"
    UNKNOWN = "training or stopped"


@dataclass(frozen=True, slots=True)
class Span:
    """One phase of the job, seconds since its creation; size: replicas that train (or are about to)."""

    phase: JobPhase
    start_s: float
    end_s: float
    size: int


COLOURS = {
    JobPhase.STARTING: "#c9ced6",
    JobPhase.TRAINING: "#7fb8a4",
    JobPhase.DRAINING: "#f2c14e",
    JobPhase.RESTARTING: "#e8833a",
    JobPhase.RECOVERING: "#cf4d5b",
    JobPhase.IN_MEMORY: "#2f7d63",
    JobPhase.UNKNOWN: "#dfe8e4",
}
LOSS_COLOUR = "#33506e"
URGENT_COLOUR = "#8d7fc0"
WAITING_COLOUR = "#dcd8ec"
INK = "#2b2f36"
FAINT = "#8a919c"
STYLE = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "svg.fonttype": "path",  # looks the same in every viewer
    "svg.hashsalt": "elastipod",  # the same run gives the same file
}
DEPTH_NAMES = {"memory": "in memory", "process": "new processes", "pod": "new pod", "job": "all pods new"}
# Colour, dashes and thickness: the line of a change in memory is solid and green; deeper changes are dashed.
_Line = tuple[str, tuple[float, tuple[float, float]], float]
DEPTH_LINES: dict[str, _Line] = {"memory": ("#2f7d63", (0.0, (1.0, 0.0)), 1.6)}
OTHER_LINE: _Line = (INK, (0.0, (2.0, 2.0)), 0.8)
MOST_SIZES = 10  # that are written at the axis of the replicas
SHORT_SPAN = 0.004  # of the whole time: a shorter gap is drawn this wide, so that it is visible

NOTE_WIDTH = 0.115  # of the whole time: the maximum width of a note
NOTE_SHARE = 0.16  # of the height of the replicas' axis: three lines of a note


@dataclass(frozen=True, slots=True)
class Note:
    """What happened and why, shown above its start (seconds since the job's creation).

    depth: as in the history. tip: what a viewer of the SVG shows to whom points at the note.
    """

    at_s: float
    text: str
    depth: str | None = None
    tip: str = ""


def depth_label(depth: str | None) -> str:
    """Give the last line of a note; empty if the depth is not known."""
    return "" if depth is None else f"\n{DEPTH_NAMES.get(depth, depth)}"


def depth_tip(change: str, depth: str | None, reason: str) -> str:
    """Give the sentence for whom points at a note. change: what happened; reason: why it went as deep, empty if not known."""
    name = "" if depth is None else f"; {DEPTH_NAMES.get(depth, depth)}"
    return f"{change}{name} because {reason}" if name and reason else f"{change}{name}"


Curves = Sequence[Sequence[tuple[float, float]]]


@dataclass(frozen=True, slots=True)
class UrgentTrack:
    """The other job in the picture. spans: until it trains, and then; floor: the replicas on which they are stacked."""

    job: str
    spans: Sequence[Span]
    floor: int
    losses: Curves


@dataclass(frozen=True, slots=True)
class Timeline:
    """What the picture shows; all times are seconds (or another unit) since the job's creation.

    losses: (seconds, loss) in order, one sequence for each generation: no line crosses the pause between two.
    """

    title: str
    spans: Sequence[Span]
    losses: Curves
    notes: Sequence[Note]
    urgent: UrgentTrack | None = None
    unit: str = "seconds"

    @property
    def end_s(self) -> float:
        """When the last phase ends."""
        return max(span.end_s for span in self.spans)


def draw(timeline: Timeline, *targets: Path) -> None:
    """Write the picture to each target; its suffix (.svg, .png) names the format. Raises ValueError without phases."""
    from matplotlib import style

    with style.context(STYLE):
        figure = _figure(timeline)
        for target in targets:
            if target.suffix == ".svg":
                target.write_text(_as_svg(figure, timeline.notes), encoding="utf-8")
            else:
                figure.savefig(target)


def svg(timeline: Timeline) -> str:
    """Give the picture as the text of an SVG file. Raises ValueError without phases."""
    from matplotlib import style

    with style.context(STYLE):
        return _as_svg(_figure(timeline), timeline.notes)


def _as_svg(figure: Figure, notes: Sequence[Note]) -> str:
    """Give the SVG with a title in each note and its line: viewers show it to whom points there."""
    target = BytesIO()
    figure.savefig(target, format="svg", metadata={"Date": None})
    picture = target.getvalue().decode()
    for number, note in enumerate(notes):
        for part in ("line", "text"):
            group = f'<g id="note-{number}-{part}">'
            if note.tip:
                picture = picture.replace(group, f"{group}<title>{escape(note.tip)}</title>", 1)
    return picture


def _figure(timeline: Timeline) -> Figure:
    """Draw replicas above, and the loss below where it is known."""
    if not timeline.spans:
        raise ValueError("there is no phase to draw: the job never made a step")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    has_loss = any(timeline.losses)
    figure = Figure(figsize=(10, 5.4 if has_loss else 3.8), dpi=144, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(timeline.title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    if has_loss:
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(7, 4))
        _draw_loss(below, timeline)
    else:
        above = below = figure.subplots()
    _draw_sizes(above, timeline)
    _draw_notes(above, timeline)
    below.set_xlabel(f"{timeline.unit} since the job was created")
    below.set_xlim(0, timeline.end_s)
    return figure


def _draw_sizes(axes: Axes, timeline: Timeline) -> None:
    from matplotlib.patches import Patch

    least = SHORT_SPAN * timeline.end_s
    for span in timeline.spans:
        width = max(span.end_s - span.start_s, 0 if span.phase is JobPhase.TRAINING else least)
        order = 1 if span.phase is JobPhase.TRAINING else 2
        axes.bar(span.start_s, span.size, width, align="edge", color=COLOURS[span.phase], linewidth=0, zorder=order)
    used = [phase for phase in JobPhase if any(span.phase is phase for span in timeline.spans)]
    handles = [Patch(color=COLOURS[phase], label=phase.value) for phase in used]
    if timeline.urgent:
        _draw_urgent(axes, timeline.urgent)
        name = timeline.urgent.job
        handles += [
            Patch(color=WAITING_COLOUR, label=f"{name} waits, starts"),
            Patch(color=URGENT_COLOUR, label=f"{name} trains"),
        ]
    axes.set_ylabel("replicas")
    highest = _highest(timeline)
    axes.set_yticks(range(0, highest + 1, max(1, -(-highest // MOST_SIZES))))
    _plain(axes)
    axes.legend(
        handles=handles,
        loc="lower right", bbox_to_anchor=(1, 1), ncols=len(handles), frameon=False, fontsize=9, handlelength=1.0,
    )  # fmt: skip


def _highest(timeline: Timeline) -> int:
    urgent = timeline.urgent
    stacked = [span.size + urgent.floor for span in urgent.spans] if urgent else []
    return max([span.size for span in timeline.spans] + stacked)


def _draw_urgent(axes: Axes, urgent: UrgentTrack) -> None:
    for span in urgent.spans:
        colour = URGENT_COLOUR if span.phase is JobPhase.TRAINING else WAITING_COLOUR
        width = span.end_s - span.start_s
        axes.bar(span.start_s, span.size, width, bottom=urgent.floor, align="edge", color=colour, linewidth=0, zorder=1)


def note_places(moments: Sequence[float], end: float, width: float) -> list[tuple[float, int]]:
    """Give for each note where its text begins and its level, 0 the lowest.

    A text of this width is right of its moment, or left of it if it would exceed the picture at `end`. Of two texts that
    would touch, the earlier one is higher, so that no line crosses a text below it.
    """
    begins = [moment if moment + width <= end else moment - width for moment in moments]
    levels: list[int] = []
    for at in reversed(range(len(moments))):
        later = range(at + 1, len(moments))
        touching = [levels[len(moments) - 1 - other] for other in later if begins[other] < begins[at] + width]
        levels.append(max(touching, default=-1) + 1)
    return list(zip(begins, levels[::-1], strict=True))


def axis_height(levels: int) -> float:
    """Give the height of the replicas' axis, in times of the largest number of replicas, with so many levels of notes on the bars.

    The texts keep their size while the axis grows with the levels, so each level takes the same share of it.
    """
    return 1 / (1 - min(0.85, NOTE_SHARE * levels))


def _draw_notes(axes: Axes, timeline: Timeline) -> None:
    """Write each cause above its moment, close neighbours at different heights."""
    highest = _highest(timeline)
    moments = [note.at_s for note in timeline.notes]
    places = note_places(moments, timeline.end_s, timeline.end_s * NOTE_WIDTH)
    top = highest * axis_height(1 + max((level for _, level in places), default=0))
    for number, (note, (begin, level)) in enumerate(zip(timeline.notes, places, strict=True)):
        on_the_right = begin < note.at_s
        height = highest + top * NOTE_SHARE * (level + 0.5)
        colour, style, thickness = DEPTH_LINES.get(note.depth or "", OTHER_LINE)
        line = axes.vlines(note.at_s, 0, height, color=colour, linewidth=thickness, linestyles=style, zorder=3)
        line.set_gid(f"note-{number}-line")
        axes.annotate(
            note.text, (note.at_s, height), xytext=(-3 if on_the_right else 3, 0), textcoords="offset points",
            ha="right" if on_the_right else "left", va="center", fontsize=8.5, zorder=4, gid=f"note-{number}-text",
            bbox={"facecolor": axes.get_facecolor(), "edgecolor": "none", "alpha": 0.8, "pad": 0.5},  # a line may cross it
        )  # fmt: skip
    axes.set_ylim(0, top)


def _draw_loss(axes: Axes, timeline: Timeline) -> None:
    _draw_curves(axes, timeline.losses, LOSS_COLOUR)
    if timeline.urgent:
        _draw_curves(axes, timeline.urgent.losses, URGENT_COLOUR)
    for span in timeline.spans:
        if span.phase is not JobPhase.TRAINING:
            axes.axvspan(span.start_s, span.end_s, color=COLOURS[span.phase], alpha=0.35, linewidth=0, zorder=0)
    axes.set_ylabel("training loss")
    axes.grid(axis="y", color="#e6e8ec", linewidth=0.8)
    axes.locator_params(axis="y", nbins=5)
    _plain(axes)


def _draw_curves(axes: Axes, curves: Curves, colour: str) -> None:
    for curve in filter(None, curves):
        times, values = zip(*curve, strict=True)
        axes.plot(times, values, color=colour, linewidth=1.4)


def _plain(axes: Axes) -> None:
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=3)
