"""The loss of a job with ten resizes and crashes against the same job undisturbed, and the picture of both."""

from __future__ import annotations

from pathlib import Path

from bench.data_load import once
from tests.e2e.data_run import STEPS, DataRun, Stay, stays
from tests.e2e.torch_fork_server import TorchForkServer
from tests.e2e.training_run import worker_environment

SMALLEST = 1e-9  # what a difference of 0 is drawn as, on a logarithmic axis


Losses = dict[str, dict[int, float]]


def play(folder: Path, seed: int) -> tuple[list[Stay], Losses, dict[str, int]]:
    """Train the job three times: undisturbed in one process, and through the same fate with both kinds of sums.

    Gives the fate, the loss of each step, and how many samples each run lost or repeated.
    """
    fate = stays(seed)
    fork_server = TorchForkServer(worker_environment())
    losses, wrong = {}, {}
    try:
        for name, mode, through in (
            ("undisturbed", "fixed-order", [Stay(1, STEPS)]),
            ("fixed order", "fixed-order", fate),
            ("DDP", "ddp", fate),
        ):
            job = DataRun(fork_server, folder / name.replace(" ", "-"), mode)
            try:
                job.play(through)
                losses[name] = job.run.losses()
                wrong[name] = once.in_logs(job.run.logs)
            finally:
                job.run.close()
    finally:
        fork_server.close()
    return fate, losses, wrong


def differences(losses: Losses, name: str) -> list[float]:
    """Give the relative difference to the undisturbed run, step by step."""
    return [abs(losses[name][step] / loss - 1) for step, loss in sorted(losses["undisturbed"].items())]


def draw(path: Path, fate: list[Stay], losses: Losses) -> None:
    """Draw losses, sizes and differences over the steps."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG  # takes seconds to load
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.4), layout="constrained")
    FigureCanvasSVG(figure)
    above, middle, below = figure.subplots(3, 1, sharex=True, height_ratios=[3, 1, 2])
    steps = sorted(losses["undisturbed"])
    above.plot(
        steps, [losses["undisturbed"][step] for step in steps], color="#bbbbbb", lw=6, label="undisturbed, 1 worker"
    )
    for name, colour, style in (("fixed order", "#0072b2", "-"), ("DDP", "#d55e00", "--")):
        above.plot(steps, [losses[name][step] for step in steps], style, color=colour, lw=1.3, label=f"resized, {name}")
        shown = [max(difference, SMALLEST) for difference in differences(losses, name)]
        below.semilogy(steps, shown, style, color=colour, lw=1.3, label=name)
    above.set_ylabel("loss")
    above.legend(frameon=False)
    edges = [0, *(stay.leave_after for stay in fate)]
    middle.stairs([stay.world_size for stay in fate], edges, color="#333333", lw=1.5)
    crashes = [stay for stay in fate if stay.dies is not None]
    middle.plot(
        [stay.leave_after for stay in crashes],
        [stay.world_size for stay in crashes],
        "x",
        color="#cc0000",
        label="crash",
    )
    middle.set(ylabel="workers", ylim=(0.5, 4.5), yticks=[1, 2, 3, 4])
    if crashes:
        middle.legend(frameon=False, loc="upper right")
    below.axhline(1e-4, color="#999999", lw=1, ls=":")
    below.annotate("bound for DDP", (1, 1e-4), va="bottom", color="#666666", fontsize=8)
    below.annotate("0: bit for bit", (1, SMALLEST * 0.8), va="top", color="#0072b2", fontsize=8)
    below.set(ylabel="relative difference", xlabel="step", ylim=(SMALLEST / 8, 1e-3))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
