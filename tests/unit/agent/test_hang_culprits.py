"""Who is killed in a hang: those that hold up the others, and nobody on a suspicion."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.unit.agent.test_hang_message import STUCK, WAITING

from elastipod_agent.core.hang import Hang, SilentWorker
from elastipod_agent.core.hang_culprits import SuspectWorker, hang_culprits
from elastipod_agent.workers.process_table import uses_device

BACKWARD = WAITING.replace("torch/distributed/distributed_c10d.py", "torch/autograd/graph.py")
BUFFERS = WAITING.replace("torch/distributed/distributed_c10d.py", "torch/nn/parallel/distributed.py").replace(
    "in all_reduce", "in _sync_buffers"
)
IN_FORWARD_OF_DDP = STUCK.replace('train.py", line 40', 'torch/nn/parallel/distributed.py", line 1700')
PLANNED = WAITING.replace("torch/distributed/distributed_c10d.py", "elastipod/chaos.py") + (
    '  File "/site-packages/torch/distributed/distributed_c10d.py", line 2806 in all_reduce\n'
)


def hang(*steps: int) -> Hang:
    return Hang(tuple(SilentWorker(rank, step, 1.0, 9.0) for rank, step in enumerate(steps)), 5.0, 0.1)


@pytest.mark.parametrize(
    ("steps", "workers", "culprits"),
    [
        pytest.param((7, 7), [SuspectWorker(0, WAITING), SuspectWorker(1, STUCK)], {1}, id="in the loader"),
        pytest.param(
            (7, 7), [SuspectWorker(0, WAITING), SuspectWorker(1, BACKWARD)], set(), id="both wait for another pod"
        ),
        pytest.param((7, 7), [SuspectWorker(0, WAITING), SuspectWorker(1, is_unresponsive=True)], {1}, id="stopped"),
        pytest.param((7, 7), [SuspectWorker(0, WAITING), SuspectWorker(1)], set(), id="offers no stacks: not known"),
        pytest.param((7, 6), [SuspectWorker(0, WAITING), SuspectWorker(1, WAITING)], {1}, id="a step behind"),
        pytest.param(
            (7, 7),
            [SuspectWorker(0, STUCK, uses_device=True), SuspectWorker(1, STUCK, uses_device=True)],
            set(),
            id="waits for a device: perhaps for a collective on it",
        ),
        pytest.param((7,), [SuspectWorker(0, WAITING), SuspectWorker(1, STUCK)], set(), id="reports no steps"),
        pytest.param(
            (7, 7),
            [SuspectWorker(0, BUFFERS), SuspectWorker(1, IN_FORWARD_OF_DDP)],
            {1},
            id="DDP waits for the buffers of rank 0",
        ),
        pytest.param(
            (7, 7),
            [SuspectWorker(0, WAITING, uses_device=True), SuspectWorker(1, PLANNED, uses_device=True)],
            {1},
            id="a planned fault, in a collective too",
        ),
    ],
)
def test_who_holds_up_the_others(steps: tuple[int, ...], workers: list[SuspectWorker], culprits: set[int]) -> None:
    assert hang_culprits(hang(*steps), workers) == culprits


@pytest.mark.parametrize(
    ("have_reported", "culprits"),
    [
        pytest.param((False, False), set(), id="steps of a generation before say nothing"),
        pytest.param((False, True), {0}, id="one has made no step in this generation"),
    ],
)
def test_who_holds_up_the_others_in_the_first_step_of_a_generation(
    have_reported: tuple[bool, ...], culprits: set[int]
) -> None:
    silent = [SilentWorker(rank, 9 - rank, 1.0, 9.0, reported) for rank, reported in enumerate(have_reported)]
    found = hang_culprits(Hang(tuple(silent), 5.0, 0.1), [SuspectWorker(0, WAITING), SuspectWorker(1, WAITING)])
    assert found == culprits


def test_a_process_with_an_accelerator_is_known_by_its_open_files(tmp_path: Path) -> None:
    files = tmp_path / "7/fd"
    files.mkdir(parents=True)
    os.symlink("/dev/null", files / "0")
    assert not uses_device(7, tmp_path)
    os.symlink("/dev/nvidia0", files / "1")
    assert uses_device(7, tmp_path)
    assert not uses_device(8, tmp_path)
