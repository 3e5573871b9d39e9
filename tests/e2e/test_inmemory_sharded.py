"""Resizes and recoveries in memory of sharded states (FSDP2, HSDP), with real worker processes: no bit differs."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.inmemory_evaluation import DIES_AT
from tests.e2e.inmemory_job import InMemoryJob, train_alone
from tests.e2e.inmemory_schedules import KINDS_AT, Played, Schedule, draw, place_of, steps_between_copies
from tests.e2e.inmemory_slots import Resize
from tests.e2e.inmemory_verdicts import may_have_lost_a_part, too_many_repeated
from tests.e2e.torch_fork_server import TorchForkServer
from tests.nonempty import some
from tests.patience import PATIENCE_S

from elastipod.chaos import FaultKind, Moment, PlannedFault

LIMIT_S = PATIENCE_S
SHARDED_WORKER = Path(__file__).with_name("inmemory_sharded_worker.py")
HSDP = {"replicate": -1, "shard": 2}


@pytest.fixture(scope="module")
def undisturbed(fork_server: TorchForkServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The digests of what a single process ends with, which nothing disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    train_alone(folder, fork_server, SHARDED_WORKER)
    return whole_state(folder)


@pytest.fixture
def play(tmp_path: Path, fork_server: TorchForkServer) -> Any:
    """Play a job to its end."""

    def run(**job: Any) -> Played:
        played = InMemoryJob(tmp_path, fork_server, worker=SHARDED_WORKER, **job).run(LIMIT_S)
        return Played(tmp_path, played)

    return run


def whole_state(folder: Path) -> dict[str, str]:
    """Put the parts that the ranks have left together, and give digests by key. Parts of replicas must be equal."""
    tensors: dict[str, dict[int, bytes]] = {}
    values = set()
    for path in sorted(folder.glob("final-*")):
        told = json.loads(path.read_text())
        values.add(json.dumps(sorted_values(json.loads(told["values"]))))
        for key, (start, raw) in told["tensors"].items():
            if raw:
                assert tensors.setdefault(key, {}).setdefault(start, bytes.fromhex(raw)) == bytes.fromhex(raw), key
    assert len(values) == 1
    digests = {"values": values.pop()}
    for key, pieces in sorted(tensors.items()):
        content = b""
        for start, raw in sorted(pieces.items()):
            assert start == len(content), f"{key} has a gap or an overlap at {start}"
            content += raw
        digests[key] = f"{len(content)} {hashlib.sha256(content).hexdigest()}"
    return digests


def sorted_values(value: Any) -> Any:
    """Give plain values in an order of their own: a checkpoint keeps another one than a script."""
    if isinstance(value, dict):
        return sorted((key, json.dumps(sorted_values(each))) for key, each in value.items())
    return [sorted_values(each) for each in value] if isinstance(value, list) else value


def assert_as_if_nothing_happened(job: Played, undisturbed: dict[str, str]) -> None:
    assert job.report.exact, job.told()
    assert whole_state(job.folder) == undisturbed, job.told()


@pytest.mark.parametrize(
    ("mesh", "sizes"),
    [
        pytest.param({"shard": -1}, (2, 5, 3), id="FSDP2"),
        pytest.param(HSDP, (2, 4, 2), id="HSDP", marks=pytest.mark.long("variants")),
    ],
)
def test_planned_changes_keep_processes_and_repeat_no_step(
    play: Any, undisturbed: dict[str, str], mesh: dict[str, int], sizes: tuple[int, int, int]
) -> None:
    job = play(size=sizes[0], resizes=[Resize(5, sizes[1]), Resize(12, sizes[2])], options={"mesh": mesh})
    worlds = [job.joined(generation) for generation in (1, 2, 3)]
    assert [len(world) for world in worlds] == list(sizes), job.told()
    assert worlds[0][0][0] == worlds[1][0][0] == worlds[2][0][0], "rank 0 is one process"
    assert job.ended.processes == max(sizes), job.told()
    assert not any(job.report.steps_repeated.values()), job.told()
    assert_as_if_nothing_happened(job, undisturbed)


@pytest.mark.long("variants")
def test_a_shard_group_that_is_whole_saves_the_state_of_one_that_lost_a_rank(
    play: Any, undisturbed: dict[str, str]
) -> None:
    job = play(size=4, faults=[PlannedFault(FaultKind.KILL, Moment.BACKWARD, rank=1, step=8)], options={"mesh": HSDP})
    first, second = job.joined(1), job.joined(2)
    assert (job.ended.generations, job.ended.faults) == (2, 1), job.told()
    assert [second[rank][0] == first[rank][0] for rank in range(4)] == [True, False, True, True], (
        "survivors kept theirs"
    )
    assert {step for _, _, step in second.values()} == {7}, "the step in work is computed again, no other"
    assert_as_if_nothing_happened(job, undisturbed)


@pytest.mark.long("variants")
def test_a_step_that_some_have_committed_is_completed_by_those_who_were_prepared(
    play: Any, undisturbed: dict[str, str]
) -> None:
    """Rank 0 dies when all are prepared. Whoever has heard so commits; the others complete the step without a world."""
    job = play(size=4, faults=[PlannedFault(FaultKind.KILL, Moment.APPLY, rank=0, step=8)], options={"mesh": HSDP})
    assert {step for _, _, step in job.joined(2).values()} == {8}, "no step is lost"
    assert_as_if_nothing_happened(job, undisturbed)


@pytest.mark.parametrize(
    "mesh", [pytest.param({"shard": -1}, id="FSDP2"), pytest.param(HSDP, id="HSDP", marks=pytest.mark.long("variants"))]
)
def test_a_scaler_and_a_loader_follow_the_steps_that_count(
    mesh: dict[str, int], play: Any, tmp_path: Path, fork_server: TorchForkServer
) -> None:
    """Steps beside the changes overflow, on one rank alone. Whoever dies among those who apply a step leaves it to them."""
    options = {"scaled": True, "loads": True}
    alone = tmp_path / "alone"
    alone.mkdir()
    train_alone(alone, fork_server, SHARDED_WORKER, options)
    told = json.loads(next(alone.glob("final-*")).read_text())["values"]
    assert '"_growth_tracker"' in told, "the scaler is part of what is compared"
    faults = [
        PlannedFault(FaultKind.KILL, Moment.APPLY, rank=1, step=16),
        PlannedFault(FaultKind.KILL, Moment.BACKWARD, rank=0, step=20),
    ]
    job = play(
        size=2,
        resizes=[Resize(5, 4), Resize(8, 2)],
        faults=faults,
        options={**options, "mesh": mesh, "copies": {"memory_bytes": 1 << 20}},
    )
    assert [len(job.joined(generation)) for generation in (1, 2, 3)] == [2, 4, 2], job.told()
    assert job.ended.faults == 2, job.told()
    assert not too_many_repeated(job), job.told()
    assert_as_if_nothing_happened(job, whole_state(alone))


@pytest.mark.long("variants")
@pytest.mark.parametrize("mesh", [{"shard": -1}, HSDP], ids=["FSDP2", "HSDP"])
def test_a_rank_that_dies_in_an_evaluation_costs_neither_the_others_nor_a_step(
    play: Any, undisturbed: dict[str, str], mesh: dict[str, int]
) -> None:
    options = {"mesh": mesh, "copies": {"memory_bytes": 1 << 20}, "evaluates": True}
    job = play(size=4, resizes=[Resize(14, 2)], options=options)
    first, second = job.joined(1), job.joined(2)
    assert [second[rank][0] == first[rank][0] for rank in range(4)] == [True, False, True, True], job.told()
    assert {step for _, _, step in second.values()} == {DIES_AT}, job.told()
    assert (len(job.joined(3)), job.ended.generations, job.ended.faults) == (2, 3, 1), job.told()
    assert not any(job.report.steps_repeated.values()), job.told()
    assert job.told().count(f"step {DIES_AT} not evaluated") == 3, job.told()
    assert_as_if_nothing_happened(job, undisturbed)


@pytest.mark.long("variants")
def test_survivors_whose_optimizer_takes_longer_than_teardown_may_keep_their_processes(
    play: Any, undisturbed: dict[str, str]
) -> None:
    faults = [PlannedFault(FaultKind.KILL, Moment.BEFORE_APPLY, rank=1, step=9)]
    job = play(size=3, faults=faults, options={"copies": {"memory_bytes": 1 << 20}, "alone_s": 6.0})
    first, second = job.joined(1), job.joined(2)
    assert [second[rank][0] == first[rank][0] for rank in range(3)] == [True, False, True], job.told()
    assert {step for _, _, step in second.values()} == {8}, job.told()
    assert_as_if_nothing_happened(job, undisturbed)


@pytest.mark.slow
def test_copies_in_another_failure_domain_survive_the_loss_of_a_rank(play: Any, undisturbed: dict[str, str]) -> None:
    faults = [PlannedFault(FaultKind.KILL, Moment.BACKWARD, rank=1, step=9)]
    options = {"copies": {"memory_bytes": 1 << 20, "every": 4}}
    job = play(size=3, faults=faults, options=options)
    assert {step for _, _, step in job.joined(2).values()} == {8}, f"the newest copied step: {job.told()}"
    assert_as_if_nothing_happened(job, undisturbed)


@pytest.mark.long("power-loss")
def test_the_loss_of_a_whole_rack_costs_the_steps_since_the_last_copy(play: Any, undisturbed: dict[str, str]) -> None:
    """Ranks 1 and 3 are in it, so a copy half-way round the ring would have gone with the original."""
    faults = [PlannedFault(FaultKind.KILL, Moment.BACKWARD, rank=1, step=9)]
    job = play(size=4, racks=2, faults=faults, options={"copies": {"memory_bytes": 1 << 20, "every": 4}})
    first, second = job.joined(1), job.joined(2)
    assert [second[rank][0] == first[rank][0] for rank in range(4)] == [True, False, True, False], job.told()
    assert {step for _, _, step in second.values()} == {8}, f"the newest copied step: {job.told()}"
    assert job.ended.generations == 2, job.told()
    assert_as_if_nothing_happened(job, undisturbed)


@pytest.mark.long("variants")
def test_a_rank_that_dies_while_a_shrink_is_under_way_takes_no_part_with_it(
    play: Any, undisturbed: dict[str, str]
) -> None:
    """The others have left, and the new world has made no copy yet."""
    fault = PlannedFault(FaultKind.KILL, Moment.FILLING, rank=1, from_generation=2)
    job = play(size=4, resizes=[Resize(8, 2)], faults=[fault], options={"copies": {"memory_bytes": 1 << 20}})
    assert min(step for _, _, step in job.joined(3).values()) >= 8, f"it goes on where it stopped: {job.told()}"
    assert not any(job.report.steps_repeated.values()), job.told()
    assert_as_if_nothing_happened(job, undisturbed)


@pytest.mark.long("variants")
@pytest.mark.parametrize("moment", [Moment.FILLING, Moment.VERIFYING])
def test_a_rank_that_is_stopped_before_the_world_trains_ends_no_other(
    play: Any, undisturbed: dict[str, str], moment: Moment
) -> None:
    """Nobody looks for it: the others give it up, say so, and are at the barrier long before their own limits end them."""
    fault = PlannedFault(FaultKind.STOP, moment, rank=1, from_generation=2)
    options = {"copies": {"memory_bytes": 1 << 20}}
    job = play(size=4, resizes=[Resize(8, 3)], faults=[fault], options=options, hang_s=1000, return_s=15)
    first, third = job.joined(1), job.joined(3)
    assert [third[rank][0] == first[rank][0] for rank in range(3)] == [True, False, True], job.told()
    assert "its process ends, so that another" not in job.told()
    assert min(step for _, _, step in third.values()) >= 8, f"it goes on where it stopped: {job.told()}"
    assert not any(job.report.steps_repeated.values()), job.told()
    assert_as_if_nothing_happened(job, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [pytest.param(1, id="one that stays"), pytest.param(3, id="one that leaves")])
def test_a_fault_in_a_hand_over_makes_members_of_those_who_were_to_leave(
    play: Any, undisturbed: dict[str, str], rank: int
) -> None:
    """They hold what they have not given away yet; they leave again once all have trained."""
    fault = PlannedFault(FaultKind.KILL, Moment.HAND_OVER, rank=rank)
    job = play(size=4, resizes=[Resize(8, 2)], faults=[fault], options={"copies": {"memory_bytes": 1 << 20}})
    first, second, third = (job.joined(generation) for generation in (1, 2, 3))
    assert [second[each][0] == first[each][0] for each in range(4)] == [each != rank for each in range(4)], job.told()
    assert len(third) == 2, job.told()
    assert job.report.steps_repeated.get(2, 0) <= 1, job.told()
    assert not job.report.steps_repeated.get(3, 0), job.told()
    assert_as_if_nothing_happened(job, undisturbed)


@pytest.mark.slow
def test_images_of_a_former_world_make_room_for_copies_within_the_budget(
    play: Any, undisturbed: dict[str, str]
) -> None:
    """Two generations in two ranks fit. With what four ranks kept, and what those that left handed over, they do not."""
    shards, whole = (
        60 * 32 * 4 * 3,
        2 * (3 * 8 + 3 * 4),
    )  # weights and moments; buffers and counts of steps, in two parts
    options = {"copies": {"memory_bytes": 2 * (shards + whole), "every": 4}}
    job = play(size=4, resizes=[Resize(6, 2)], options=options)
    assert "goes before the next copies are made" in job.told()
    assert "there are no copies" not in job.told()
    assert_as_if_nothing_happened(job, undisturbed)


@pytest.mark.slow
def test_without_copies_the_loss_of_a_rank_goes_back_to_a_checkpoint(play: Any, undisturbed: dict[str, str]) -> None:
    faults = [PlannedFault(FaultKind.KILL, Moment.BACKWARD, rank=1, step=9)]
    options = {"copies": {"memory_bytes": 1000}, "checkpoint_every": 4}
    job = play(size=3, faults=faults, options=options)
    assert "there are no copies of shards in this world: they would take" in job.told()
    assert {step for _, _, step in job.joined(2).values()} <= {4, 8}
    assert_as_if_nothing_happened(job, undisturbed)


@pytest.mark.parametrize("is_enough", [pytest.param(True, marks=pytest.mark.long("variants")), False])
def test_copies_of_a_state_that_grows_keep_to_the_budget(
    is_enough: bool, play: Any, tmp_path: Path, fork_server: TorchForkServer
) -> None:
    """Without moments the state is a third as large: they come with the first step of which the optimizer is not left out."""
    alone = tmp_path / "alone"
    alone.mkdir()
    options = {"optimizes_from": 6}
    train_alone(alone, fork_server, SHARDED_WORKER, options)
    rows, whole = (
        18 + 2 + 4,
        2 * (3 * 8 + 3 * 4),
    )  # of the largest of three parts, at most; buffers and counts of steps, in two parts
    with_moments = 2 * (2 * rows * 32 * 4 * 3 + whole)
    budget = {"memory_bytes": with_moments if is_enough else with_moments // 2, "every": 2}
    faults = [PlannedFault(FaultKind.KILL, Moment.BACKWARD, rank=1, step=9)]
    job = play(size=3, faults=faults, options={**options, "copies": budget, "checkpoint_every": 7})
    told = job.told()
    assert ("there are no more copies of shards in this world: they would take" in told) is not is_enough, told
    assert ("there are no copies of shards" in told) is not is_enough, (
        f"in the next world, which has moments already: {told}"
    )
    assert {step for _, _, step in job.joined(2).values()} == {8 if is_enough else 7}, told
    assert_as_if_nothing_happened(job, whole_state(alone))


@pytest.mark.long("variants")
def test_gradients_that_are_not_those_of_all_replicas_are_seen_before_they_count(
    play: Any, undisturbed: dict[str, str]
) -> None:
    options = {"mesh": HSDP, "mutant": True, "checkpoint_every": 100}
    job = play(size=2, resizes=[Resize(5, 4)], options=options)
    assert "StateDiffersError" in job.told()
    assert re.search(r"the reduced gradient of \S+ is not the mean over all ranks' samples on", job.told())
    begun = [step for number in (2, 3) for _, _, step in job.joined(number).values()]
    assert len(set(begun)) == 1, f"the job goes on from the last complete step: {job.told()}"
    assert_as_if_nothing_happened(job, undisturbed)


def play_schedule(seed: int, folder: Path, fork_server: TorchForkServer, limit_s: float = LIMIT_S) -> Played:
    """Play what a seed says, with HSDP or with FSDP2 and copies. Fails when the job does not end."""
    folder.mkdir()
    schedule = draw(seed, "sharded")
    options: dict[str, Any] = {"copies": {"memory_bytes": 1 << 20, "every": steps_between_copies(seed)}}
    at, _ = KINDS_AT[place_of(seed)]
    if seed % 2 and at not in (Moment.COPY, Moment.HAND_OVER):  # which HSDP does without where a replica is left
        schedule, options = in_groups_of_two(schedule), {**options, "mesh": HSDP}
    job = InMemoryJob(
        folder,
        fork_server,
        size=schedule.size,
        resizes=schedule.resizes,
        faults=schedule.faults,
        options=options,
        worker=SHARDED_WORKER,
        hang_s=2.0,
        agents_begin=schedule.agents_begin,
    )
    return Played(folder, job.run(limit_s), f"seed {seed}: {schedule} {options}")


def check_played(seed: int, played: Played, expected: dict[str, str]) -> None:
    """Check that a job has ended as if nothing had happened."""
    assert played.report.exact, f"{played.report.sentence}\n{played.told()}"
    assert whole_state(played.folder) == expected, f"another state\n{played.told()}"
    at, _ = KINDS_AT[place_of(seed)]
    if at is Moment.HAND_OVER:  # those who were to leave have what they did not give away
        assert played.is_in_memory or may_have_lost_a_part(played), f"one fault took a part along\n{played.told()}"
    if played.is_in_memory:
        too_many = too_many_repeated(played, most_after_a_crash=steps_between_copies(seed))
        assert not too_many, f"{too_many}\n{played.told()}"


def in_groups_of_two(schedule: Schedule) -> Schedule:
    return replace(
        schedule,
        size=2 * ((schedule.size + 1) // 2),
        resizes=tuple(replace(each, size=2 * ((each.size + 1) // 2)) for each in schedule.resizes),
    )


def test_whatever_happens_the_job_ends_as_if_nothing_had(
    tmp_path: Path, fork_server: TorchForkServer, undisturbed: dict[str, str]
) -> None:
    played = {seed: play_schedule(seed, tmp_path / str(seed), fork_server) for seed in range(3)}
    for seed, each in some(played.items()):
        check_played(seed, each, undisturbed)
    assert any(each.is_in_memory for each in played.values())
