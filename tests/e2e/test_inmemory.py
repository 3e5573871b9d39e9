"""Resizes and recoveries in memory, with real worker processes: no step is lost, no sample is used twice, no bit differs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.inmemory_evaluation import DIES_AT
from tests.e2e.inmemory_job import InMemoryJob, train_alone
from tests.e2e.inmemory_mutants import MUTANTS
from tests.e2e.inmemory_schedules import Played, draw
from tests.e2e.inmemory_slots import Ended, Resize
from tests.e2e.inmemory_verdicts import too_many_repeated
from tests.e2e.torch_fork_server import TorchForkServer
from tests.nonempty import some
from tests.patience import PATIENCE_S
from tests.slow import all_but_first

from elastipod.audit.log_reader import read_logs
from elastipod.audit.report import audit
from elastipod.chaos import FaultKind, Moment, PlannedFault

LIMIT_S = PATIENCE_S
EVALUATED = re.compile(r"generation (\d+) rank \d+: step (\d+) (.*evaluated.*)")
SCRIPTS = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def undisturbed(fork_server: TorchForkServer, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the weights that a single process ends with, which nothing disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    train_alone(folder, fork_server)
    return (folder / "final-single").read_text()


@pytest.fixture
def play(tmp_path: Path, fork_server: TorchForkServer) -> Any:
    """Play a job to its end."""

    def run(**job: Any) -> Played:
        return Played(tmp_path, InMemoryJob(tmp_path, fork_server, **job).run(LIMIT_S))

    return run


@pytest.mark.long("variants")
def test_a_replaced_rank_is_filled_by_the_one_that_kept_its_process(play: Any, undisturbed: str) -> None:
    job = play(size=2, faults=[PlannedFault(FaultKind.KILL, Moment.BACKWARD, rank=1, step=8)])
    first, second = job.joined(1), job.joined(2)
    assert (job.ended.generations, job.ended.faults) == (2, 1), job.told()
    assert second[0][0] == first[0][0], "the survivor kept its process"
    assert second[1][0] != first[1][0]
    assert {step for _, _, step in second.values()} == {7}, "the step in work is computed again, no other"
    assert (job.finals, job.report.exact) == ({undisturbed}, True), job.told()


def test_groups_of_several_backends_live_through_a_planned_change_and_a_crash(play: Any, undisturbed: str) -> None:
    """As with NCCL, whose groups carry host memory through gloo; torch aborts and forgets them in other ways than those of gloo alone."""
    kill = PlannedFault(FaultKind.KILL, Moment.BACKWARD, rank=1, step=12)
    job = play(size=2, resizes=[Resize(5, 3)], faults=[kill], options={"backend": "cpu:gloo"})
    worlds = [job.joined(generation) for generation in (1, 2, 3)]
    assert [len(world) for world in worlds] == [2, 3, 3], job.told()
    assert worlds[0][0][0] == worlds[1][0][0] == worlds[2][0][0], "rank 0 is one process"
    assert job.ended.processes == 4, job.told()
    assert (job.finals, job.report.exact) == ({undisturbed}, True), job.told()


@pytest.mark.slow
def test_a_rank_that_holds_the_reduced_gradients_commits_though_its_peer_dies(play: Any, undisturbed: str) -> None:
    job = play(size=2, faults=[PlannedFault(FaultKind.KILL, Moment.BEFORE_APPLY, rank=0, step=8)])
    assert {step for _, _, step in job.joined(2).values()} == {8}, "no step is lost"
    assert (job.finals, job.report.exact) == ({undisturbed}, True), job.told()


@pytest.mark.parametrize("agents_begin", [False, True], ids=["as the operator says", "agents begin"])
def test_planned_changes_keep_processes_and_repeat_no_step(play: Any, undisturbed: str, agents_begin: bool) -> None:
    job = play(size=2, resizes=[Resize(5, 4), Resize(12, 2)], agents_begin=agents_begin)
    worlds = [job.joined(generation) for generation in (1, 2, 3)]
    assert [len(world) for world in worlds] == [2, 4, 2]
    assert worlds[0][0][0] == worlds[1][0][0] == worlds[2][0][0], "rank 0 is one process"
    assert job.ended.processes == 4, job.told()
    assert job.ended.begun_by_agents == ({2, 3} if agents_begin else set()), job.told()
    assert not any(job.report.steps_repeated.values()), job.told()
    assert (job.finals, job.report.exact) == ({undisturbed}, True), job.told()


def test_a_loader_is_a_member_whose_position_follows_the_steps_that_count(play: Any, undisturbed: str) -> None:
    """Its worker processes have read ahead, in the step that is torn too."""
    kill = PlannedFault(FaultKind.KILL, Moment.BEFORE_APPLY, rank=1, step=15)
    torn = PlannedFault(FaultKind.KILL, Moment.BACKWARD, rank=1, step=18)
    job = play(size=2, resizes=[Resize(5, 4), Resize(12, 2)], faults=[kill, torn], options={"loads": True})
    assert [len(job.joined(generation)) for generation in (1, 2, 3)] == [2, 4, 2], job.told()
    assert job.ended.faults == 2, job.told()
    assert (job.finals, job.report.exact) == ({undisturbed}, True), job.told()


@pytest.mark.parametrize("evaluates", all_but_first(["before", "after"]))
def test_a_rank_that_dies_in_an_evaluation_costs_neither_the_others_nor_a_step(
    play: Any, undisturbed: str, evaluates: str
) -> None:
    """Before the block of a step, the ranks of the next world evaluate again, newcomers too; after it, nobody does."""
    job = play(size=3, resizes=[Resize(13, 2)], options={"evaluates": evaluates})
    first, second, third = (job.joined(generation) for generation in (1, 2, 3))
    assert [second[rank][0] == first[rank][0] for rank in range(3)] == [True, False, True], "survivors kept theirs"
    assert {step for _, _, step in second.values()} == {DIES_AT}, job.told()
    assert (len(third), job.ended.faults) == (2, 1), job.told()
    assert not any(job.report.steps_repeated.values()), job.told()
    evaluated = Counter(EVALUATED.findall(job.told()))
    again = 3 if evaluates == "before" else 0
    assert evaluated["1", "8", "not evaluated"] == 2, job.told()
    assert (
        sum(number for (_, step, how), number in evaluated.items() if step == "8" and how != "not evaluated") == again
    )
    assert (evaluated["1", "6", "evaluated by 3"], evaluated["2", "10", "evaluated by 3"]) == (3, 3), job.told()
    assert (job.finals, job.report.exact) == ({undisturbed}, True), job.told()


@pytest.mark.slow
def test_those_who_have_left_come_back_where_they_alone_hold_the_state(play: Any, undisturbed: str) -> None:
    """Both who stay die one after the other before the smaller world has made a step."""
    first = PlannedFault(FaultKind.HANG, Moment.CONNECTING, rank=1, from_generation=2)
    second = PlannedFault(FaultKind.HANG, Moment.AGREEING, rank=0, from_generation=2)
    job = play(size=4, resizes=[Resize(7, 2)], faults=[first, second])
    began, again = job.joined(1), job.joined(4)
    assert (job.ended.faults, job.ended.lost_copies) == (2, 0), job.told()
    assert [again[rank][0] == began[rank][0] for rank in range(4)] == [False, False, True, True], job.told()
    assert not any(job.report.steps_repeated.values()), job.told()
    assert len(job.joined(5)) == 2, "and leave again"
    assert (job.finals, job.report.exact) == ({undisturbed}, True), job.told()


@pytest.mark.slow
def test_when_no_copy_is_left_the_job_goes_on_from_its_newest_checkpoint(play: Any, undisturbed: str) -> None:
    """Both ranks are in the one rack, with which they die."""
    faults = [PlannedFault(FaultKind.KILL, Moment.STEP, rank=0, step=11)]
    job = play(size=2, racks=1, faults=faults, options={"checkpoint_every": 4})
    assert job.ended.lost_copies == 1, job.told()
    begun = {
        step for generation in range(2, job.ended.generations + 1) for _, _, step in job.joined(generation).values()
    }
    assert begun & {4, 8}, f"it resumes from a checkpoint: {job.told()}"
    assert (job.finals, job.report.exact) == ({undisturbed}, True), job.told()


def test_a_mistake_of_the_script_ends_its_own_process_alone_with_its_traceback(play: Any, undisturbed: str) -> None:
    job = play(size=2, faults=[PlannedFault(FaultKind.RAISE, Moment.FORWARD, rank=0, step=6)])
    first, second = job.joined(1), job.joined(2)
    assert second[1][0] == first[1][0], "the other rank kept its process"
    assert second[0][0] != first[0][0]
    assert "ChaosError: raised on purpose at forward of step 6 on rank 0" in job.told()
    assert (job.finals, job.report.exact) == ({undisturbed}, True), job.told()


@pytest.mark.parametrize(("mutant", "sentence"), all_but_first(MUTANTS.items(), 3), ids=list(MUTANTS))
def test_a_mistake_of_a_change_is_seen_before_it_counts(play: Any, mutant: str, sentence: str) -> None:
    options = {"mutant": mutant, "is_exact": False, "checkpoint_every": 100, "first_step_s": 0.1}
    job = play(size=2, resizes=[Resize(5, 3)], options=options)
    told = job.told()
    assert "StateDiffersError" in told, told
    assert sentence in told, told
    steps = {
        step for generation in range(2, job.ended.generations + 1) for _, _, step in job.joined(generation).values()
    }
    assert min(steps) >= 5, f"it begins at the planned change, {told}"
    assert max(steps) - min(steps) <= 1, f"and the job goes on from the last complete step: {told}"
    assert len(job.finals) == 1, "all ranks end with the same weights"
    assert job.report.exact, told


@pytest.mark.long("variants")
@pytest.mark.parametrize("launcher", [(), ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")])
def test_the_example_runs_without_an_agent(launcher: tuple[str, ...], tmp_path: Path) -> None:
    script = SCRIPTS / "in_memory" / "train.py"
    folders = [f"--checkpoint-dir={tmp_path / 'checkpoints'}", f"--sample-log-dir={tmp_path / 'samples'}"]
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, *launcher, str(script), *folders, "--epochs=2"]
    ended = subprocess.run(command, env=environment, timeout=PATIENCE_S, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "done: 48 steps" in ended.stdout
    assert audit(read_logs(tmp_path / "samples")).exact


EXAMPLES = {
    "in_memory": ["--epochs=1", "--print-every=1"],
    "lm": [
        "--dim=32",
        "--layers=1",
        "--heads=2",
        "--corpus-kib=256",
        "--global-batch=8",
        "--steps=24",
        "--min-step-time=0.02",
    ],
}


@pytest.mark.parametrize("example", all_but_first(EXAMPLES))
def test_an_example_lives_through_resizes_and_a_crash(
    example: str, tmp_path: Path, fork_server: TorchForkServer
) -> None:
    def train(name: str, **changes: Any) -> tuple[Ended, dict[int, float], str]:
        folder = tmp_path / name
        folder.mkdir()
        command = [str(SCRIPTS / example / "train.py"), *EXAMPLES[example]]
        command += [f"--checkpoint-dir={folder / 'checkpoints'}", f"--sample-log-dir={folder / 'samples'}"]
        ended = InMemoryJob(folder, fork_server, size=2, command=command, **changes).run(LIMIT_S)
        told = "\n".join([*ended.log, *(path.read_text() for path in sorted(folder.glob("output-*")))])
        assert ended.is_complete, told
        report = audit(read_logs(folder / "samples"))
        assert report.exact, told
        assert sum(report.steps_repeated.values()) <= ended.faults, told
        return ended, losses_of(folder / "samples"), told

    _, expected, _ = train("undisturbed")
    kill = PlannedFault(FaultKind.KILL, Moment.BACKWARD, rank=1, step=8)
    # Steps take milliseconds: those after which the job is resized leave time for it.
    slow = [PlannedFault(FaultKind.SLOW, Moment.STEP, rank=0, step=step, seconds=3) for step in (5, 13)]
    ended, losses, told = train("changed", resizes=[Resize(4, 4), Resize(12, 2)], faults=[kill, *slow])
    assert (ended.faults, ended.lost_copies) == (1, 0), told
    # The crash may fall into the resize and share its generation.
    assert ended.generations in (3, 4), told
    assert ended.processes == 5, "two to begin with, two that came, and one in place of the one that was killed"
    assert losses.keys() == expected.keys()
    if example == "lm":  # the other one reports what its rank sees
        assert losses == pytest.approx(expected, rel=1e-4), told


def losses_of(folder: Path) -> dict[int, float]:
    """Give the loss of every step, as the newest generation that completed it has it."""
    lines = [json.loads(line) for path in sorted(folder.iterdir()) for line in path.read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "done"}


def play_schedule(seed: int, folder: Path, fork_server: TorchForkServer, limit_s: float = LIMIT_S) -> Played:
    """Play what a seed says. Fails when the job does not end."""
    folder.mkdir()
    schedule = draw(seed)
    follows = schedule.newcomers_follow
    job = InMemoryJob(
        folder,
        fork_server,
        size=schedule.size,
        resizes=schedule.resizes,
        faults=schedule.faults,
        options={"first_step_s": 0.1} if follows else {},
        hang_s=2.0,
        newcomers_follow=follows,
        agents_begin=schedule.agents_begin,
    )
    return Played(folder, job.run(limit_s), f"seed {seed}: {schedule}")


def check_played(played: Played, expected: str) -> None:
    """Check that a job has ended as if nothing had happened."""
    assert played.finals == {expected}, f"other weights\n{played.told()}"
    assert played.report.exact, f"{played.report.sentence}\n{played.told()}"
    if not played.ended.lost_copies:
        assert not too_many_repeated(played), f"{too_many_repeated(played)}\n{played.told()}"


@pytest.mark.parametrize("part", range(4))  # twenty schedules, in parts that run side by side
def test_whatever_happens_the_job_ends_as_if_nothing_had(
    part: int, tmp_path: Path, fork_server: TorchForkServer, undisturbed: str
) -> None:
    played = [play_schedule(seed, tmp_path / str(seed), fork_server) for seed in range(5 * part, 5 * part + 5)]
    for each in some(played):
        check_played(each, undisturbed)
    assert any(each.is_in_memory for each in played)
