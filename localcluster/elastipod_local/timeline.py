"""The picture of one run: replicas that train, phases and loss over time, with the cause of every change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from elastipod_local.demo_report import Change, Phase, Run, Span, changes, losses, spans

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    Phase.STARTING: "#c9ced6",
    Phase.TRAINING: "#7fb8a4",
    Phase.DRAINING: "#f2c14e",
    Phase.RESTARTING: "#e8833a",
    Phase.RECOVERING: "#cf4d5b",
}
LOSS_COLOUR = "#33506e"
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
    "svg.fonttype": "path",  # looks the same wherever it is shown
    "svg.hashsalt": "elastipod",  # the same run gives the same file
}
SHORT_SPAN = 0.004  # of the whole time: a gap thinner than this is drawn this wide, so that it can be seen

NOTE_WIDTH = 0.25  # of the whole time: as wide as a note can get


@dataclass(frozen=True, slots=True)
class Note:
    """A change and its cause, shown above the moment it began (seconds since the job's creation)."""

    at_s: float
    text: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """What the picture shows; all times are seconds since the job's creation.

    losses: (seconds, loss) in order, one sequence for each generation: no line is drawn over the pause between two.
    """

    title: str
    spans: Sequence[Span]
    losses: Sequence[Sequence[tuple[float, float]]]
    notes: Sequence[Note]

    @property
    def end_s(self) -> float:
        """When the last phase ends."""
        return max(span.end_s for span in self.spans)


def of_run(run: Run, title: str) -> Timeline:
    """Give the picture's content for a run: its phases, its loss, and a note for each change of generation."""
    curves = tuple(tuple((at_s, loss) for at_s, _, loss in curve) for curve in losses(run))
    notes = tuple(Note(run.since_creation(change.entry.began_at), _cause(change)) for change in changes(run))
    return Timeline(title, spans(run), curves, notes)


def _cause(change: Change) -> str:
    gap = "" if change.gap_s is None else f", {change.gap_s:.2f} s"
    return f"{change.entry.size_before} → {change.entry.size} {change.entry.cause}{gap}"


def draw(timeline: Timeline, *targets: Path) -> None:
    """Write the picture to each target; its suffix (.svg, .png) names the format. Raises ValueError without phases."""
    if not timeline.spans:
        raise ValueError("there is no phase to draw: the job never made a step")
    from matplotlib import style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with style.context(STYLE):
        figure = Figure(figsize=(10, 4.6), dpi=144, facecolor="white", layout="constrained")
        FigureCanvasAgg(figure)
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        figure.suptitle(timeline.title, x=0.01, ha="left", fontsize=12, fontweight="bold")
        _draw_sizes(above, timeline)
        _draw_notes(above, timeline)
        _draw_loss(below, timeline)
        for target in targets:
            metadata = {"Date": None} if target.suffix == ".svg" else None
            figure.savefig(target, metadata=metadata)


def _draw_sizes(axes: Axes, timeline: Timeline) -> None:
    from matplotlib.patches import Patch

    highest = max(span.size for span in timeline.spans)
    least = SHORT_SPAN * timeline.end_s
    for span in timeline.spans:
        width = max(span.end_s - span.start_s, 0 if span.phase is Phase.TRAINING else least)
        order = 1 if span.phase is Phase.TRAINING else 2
        axes.bar(span.start_s, span.size, width, align="edge", color=COLOURS[span.phase], linewidth=0, zorder=order)
    axes.set_ylabel("replicas")
    axes.set_yticks(range(highest + 1))
    _plain(axes)
    used = [phase for phase in Phase if any(span.phase is phase for span in timeline.spans)]
    axes.legend(
        handles=[Patch(color=COLOURS[phase], label=phase.value) for phase in used],
        loc="lower right", bbox_to_anchor=(1, 1), ncols=len(used), frameon=False, fontsize=9, handlelength=1.0,
    )  # fmt: skip


def note_places(moments: Sequence[float], end: float, width: float) -> list[tuple[float, int]]:
    """Give for each note where its text begins and its level, 0 the lowest.

    A text of this width stands right of its moment, or left of it where it would leave the picture at `end`. Of two
    whose texts would touch, the earlier stands higher, so that no line runs through a text below it.
    """
    begins = [moment if moment + width <= end else moment - width for moment in moments]
    levels: list[int] = []
    for at in reversed(range(len(moments))):
        later = range(at + 1, len(moments))
        touching = [levels[len(moments) - 1 - other] for other in later if begins[other] < begins[at] + width]
        levels.append(max(touching, default=-1) + 1)
    return list(zip(begins, levels[::-1], strict=True))


def _draw_notes(axes: Axes, timeline: Timeline) -> None:
    """Write each cause above its moment, close neighbours at different heights."""
    highest = max(span.size for span in timeline.spans)
    moments = [note.at_s for note in timeline.notes]
    places = note_places(moments, timeline.end_s, timeline.end_s * NOTE_WIDTH)
    for note, (begin, level) in zip(timeline.notes, places, strict=True):
        on_the_right = begin < note.at_s
        height = highest * (1.07 + 0.13 * level)
        axes.vlines(note.at_s, 0, height, color=INK, linewidth=0.8, linestyles=(0, (2, 2)), zorder=3)
        axes.annotate(
            note.text, (note.at_s, height), xytext=(-3 if on_the_right else 3, 0), textcoords="offset points",
            ha="right" if on_the_right else "left", va="center", fontsize=9,
        )  # fmt: skip
    axes.set_ylim(0, highest * (1.17 + 0.13 * max((level for _, level in places), default=0)))


def _draw_loss(axes: Axes, timeline: Timeline) -> None:
    for curve in filter(None, timeline.losses):
        times, values = zip(*curve, strict=True)
        axes.plot(times, values, color=LOSS_COLOUR, linewidth=1.4)
    for span in timeline.spans:
        if span.phase is not Phase.TRAINING:
            axes.axvspan(span.start_s, span.end_s, color=COLOURS[span.phase], alpha=0.35, linewidth=0, zorder=0)
    axes.set_ylabel("training loss")
    axes.set_xlabel("seconds since the job was created")
    axes.set_xlim(0, timeline.end_s)
    axes.grid(axis="y", color="#e6e8ec", linewidth=0.8)
    axes.locator_params(axis="y", nbins=5)
    _plain(axes)


def _plain(axes: Axes) -> None:
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=3)
