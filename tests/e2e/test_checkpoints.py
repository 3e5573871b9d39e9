"""Checkpoints from world to world: other sizes, other ways of sharding, other memories, killed and replaced writers, S3."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.e2e.rank_worlds import Cases
from tests.long_runs import LongRun
from tests.nonempty import every, some
from tests.slow import all_but_first

if TYPE_CHECKING:
    from tests.e2e.s3_server import S3Server

PIPELINES = [[0, 1, 2, 3], [3, 2, 1, 0], [3, 1], [3, 4, 1, 5], [1, 6, 7, 3, 8, 9]]  # by world, the node of each rank


@pytest.fixture(scope="module")
def cases() -> Iterator[Cases]:
    running = Cases("tests.e2e.checkpoint_cases")
    yield running
    running.close()


@pytest.mark.parametrize(
    ("case", "path"),
    [
        pytest.param(
            "reshard",
            [["plain", 1], ["ddp", 2], ["fsdp", 4], ["hsdp", 4], ["ddp", 3], ["fsdp", 2]],
            id="sharded",
            marks=pytest.mark.long("variants"),
        ),
        pytest.param("reshard", [["ddp", 2], ["plain", 1], ["ddp", 3]], id="replicated"),
        pytest.param(
            "reshard, in teams", [["fsdp", 6], ["hsdp", 4], ["ddp", 5]], id="in teams", marks=pytest.mark.slow
        ),
    ],
)
def test_one_state_goes_through_every_way_of_sharding(
    cases: Cases, tmp_path: Path, case: str, path: list[list[Any]]
) -> None:
    worlds = cases.run(case, tmp_path, path)
    before = ""
    for number, ((_, size), ranks) in enumerate(zip(some(path), worlds, strict=True)):
        resumes, loaded, saved, noises = zip(*ranks, strict=True)
        assert set(loaded) == {before}, path[number]
        if number:
            assert list(resumes) == [[2 * number, path[number - 1][1], {"s": 2 * number}]] * int(size)
        (before,) = set(saved)
        assert len(set(map(tuple, noises))) == size, "each rank has random numbers of its own"


@pytest.mark.slow
@pytest.mark.parametrize(
    "in_memory",
    [pytest.param(False, id="durable", marks=pytest.mark.long("variants")), pytest.param(True, id="memory")],
)
def test_what_has_no_optimizer_state_yet_has_none_in_any_world(cases: Cases, tmp_path: Path, in_memory: bool) -> None:
    path = [["ddp", 2], ["ddp", 2], ["fsdp", 4], ["fsdp", 4], ["hsdp", 4]]
    path += [["ddp", 4]] if in_memory else [["plain", 1], ["fsdp", 3]]
    worlds = cases.run("partial state", tmp_path, path, in_memory)
    unused = ["unused.bias", "unused.weight"]
    for number, ranks in enumerate(some(worlds)):
        assert every(rank == ranks[0] for rank in ranks), path[number]
        loaded, saved, _ = ranks[0]
        assert saved[1:] == [*([] if number else ["experts.1.bias", "experts.1.weight"]), *unused]
        if number:
            _, before, further = worlds[number - 1][0]
            assert loaded == [2 * number, "memory" if in_memory else "durable", before], path[number]
            if path[number] == path[number - 1]:
                assert saved == further, "training went on to the last bit"


@pytest.mark.slow
@pytest.mark.parametrize(
    "in_memory",
    [pytest.param(False, id="durable"), pytest.param(True, id="memory", marks=pytest.mark.long("variants"))],
)
def test_several_models_and_optimizers_go_through_every_way_of_sharding(
    cases: Cases, tmp_path: Path, in_memory: bool
) -> None:
    path = [["ddp", 2], ["fsdp", 3], ["fsdp", 2], ["ddp", 3], ["plain", 1]]
    path = path[:3] if in_memory else path
    before = ""
    for number, ranks in enumerate(some(cases.run("members", tmp_path, path, in_memory))):
        resumes, loaded, saved = zip(*ranks, strict=True)
        assert set(loaded) == {before}, path[number]
        if number:
            assert set(map(tuple, resumes)) == {(2 * number, "memory" if in_memory else "durable")}
        (before,) = set(saved)


def test_ranks_that_hold_different_things_are_refused_when_they_save(cases: Cases, tmp_path: Path) -> None:
    first, second = cases.run("stages", tmp_path)
    assert first == second
    stages, moments, saved = first
    assert (
        "rank 1 lacks model.stage0.bias, model.stage0.weight, which rank 0 has; for stages of a pipeline pass" in stages
    )
    assert "rank 0 lacks optimizer.state.weight.momentum_buffer, which rank 1 has; " in moments
    assert saved == "saved"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "tp", "in_memory"),
    [
        pytest.param(PIPELINES, 1, False, id="durable"),
        pytest.param(PIPELINES, 1, True, id="memory", marks=pytest.mark.long("variants")),
        pytest.param(
            [range(4), range(8), range(4)], 2, False, id="with tensor parallelism", marks=pytest.mark.long("variants")
        ),
    ],
)
def test_a_pipeline_goes_on_with_more_and_fewer_replicas_of_each_stage(
    cases: Cases, tmp_path: Path, nodes: list[Sequence[int]], tp: int, in_memory: bool
) -> None:
    path = [list(ranks) for ranks in nodes]
    before = ["", ""]
    for number, ranks in enumerate(some(cases.run("pipeline", tmp_path, path, in_memory, tp))):
        found, loaded, saved = zip(*ranks, strict=True)
        if number:
            assert set(map(tuple, found)) == {("memory" if in_memory else "durable", 2 * number)}, number
        half = len(ranks) // 2
        assert [set(loaded[:half]), set(loaded[half:])] == [{before[0]}, {before[1]}], number
        (before[0],), (before[1],) = set(saved[:half]), set(saved[half:])
        assert before[0] != before[1]
    (step, total), lacking = cases.run("pipeline, whole", tmp_path)
    assert (step, total > 0) == (2 * len(path), True)
    assert (
        "it also has model.layers.1.bias, model.layers.1.seen, model.layers.1.weight, which this model has not"
        in lacking
    )


@pytest.mark.slow
def test_stages_of_the_same_names_are_refused_and_layers_may_move_between_stages(cases: Cases, tmp_path: Path) -> None:
    first, second = cases.run("pipeline, refused", tmp_path)
    assert first == second
    same_names, saved, lacking, moved = first
    assert (
        "the pipeline stages 0 and 1 both have layers.0.bias, layers.0.seen, layers.0.weight; let each stage keep"
        in same_names
    )
    assert saved == "saved"
    assert "it also has model.layers.2.bias, model.layers.2.seen, model.layers.2.weight and " in lacking
    assert moved == "loaded 1"


@pytest.mark.long("variants")
@pytest.mark.parametrize("case", all_but_first(["memory", "memory, in teams"]))
def test_memory_of_nodes_outlives_processes_and_one_node(cases: Cases, tmp_path: Path, case: str) -> None:
    told = cases.run(case, tmp_path)
    fresh = ["memory", 4, told["saved"]]
    assert told["restarted"] == [fresh] * 4
    assert told["one image damaged"] == [fresh] * 4, "another node has a copy"
    assert told["one node lost"] == [fresh] * 4
    assert told["shrunk to two"] == [fresh] * 2
    assert [each[:2] for each in told["both keepers lost"]] == [["durable", 2]] * 4


def test_replicated_state_is_kept_once_per_node_and_sent_to_newcomers(cases: Cases, tmp_path: Path) -> None:
    told = cases.run("replicas", tmp_path)
    (digest, _), _ = told["saved"]
    assert [files for _, files in told["saved"]] == [2, 2], "two slots, and no copies of what others have anyway"
    assert told["grown to four"] == [["memory", 3, digest]] * 4


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.long("variants")), 3])
def test_a_flipped_bit_of_one_replica_does_not_live_on(cases: Cases, tmp_path: Path, size: int) -> None:
    told = cases.run("flipped", tmp_path, size)
    wanted = ["memory", 4, told["saved"][1]] if size == 3 else ["memory", 2, told["saved"][0]]
    assert [each[:3] for each in told["resumed"]] == [wanted] * size
    which = "rank 1" if size == 3 else "ranks 0-1"
    assert f"what {which} saved differs from the other replicas, and is not used" in told["resumed"][0][3]


# -- writers that are killed, replaced, or out of room -----------------------------------------------------------------


@pytest.mark.parametrize("in_memory", all_but_first([False, True]), ids=["durable", "memory"])
def test_kills_at_random_instants_of_a_save(cases: Cases, tmp_path: Path, seed: int, in_memory: bool) -> None:
    told = cases.run("kills", tmp_path, 6, seed, in_memory)
    assert told["resumed"] == 6
    assert told["last"] > 0


@pytest.mark.slow
def test_a_partitioned_writer_is_shut_out(cases: Cases, tmp_path: Path, seed: int) -> None:
    assert cases.run("partition", tmp_path, 4, seed)["fenced"] == 4


def test_what_fails_on_one_rank_is_raised_on_all_and_the_world_goes_on(cases: Cases, tmp_path: Path) -> None:
    first, second = cases.run("failing rank", tmp_path)
    assert first == second
    state, copy, memory, log, look, fill, there = first
    for said in (state, copy, log):
        assert said == "rank 1: rank 1 has had enough"
    assert memory == "done", "it is durable"
    assert "rank 1: " in look
    assert "cannot be read at the moment" in look
    assert fill.startswith("rank 1: ")
    assert fill.endswith("rank 1 has had enough")
    assert there == "[6, 5]"


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [pytest.param("lost ranks", marks=pytest.mark.long("variants")), "lost ranks, in teams"]
)
def test_a_rank_that_is_lost_in_a_save_costs_that_save_and_nothing_else(
    cases: Cases, tmp_path: Path, case: str
) -> None:
    told = cases.run(case, tmp_path)
    silent = "rank 2 ended, or was silent for 6 s"
    for heard in told["heard"]:
        assert heard == [
            ["slow", "saved", "in time"],
            ["stopped while it writes", silent, "in time"],
            ["fails while copies travel", "rank 2: OSError: its network card is gone", "in time"],
            ["stopped while copies travel", silent, "in time"],
            ["all well", "saved", "in time"],
            ["killed while copies travel", silent, "in time"],
        ]
    assert told["resumed"] == [[5, 5.0]] * 3, "nothing of what was given up"
    assert told["lost in a load"] == [silent.replace("rank 2", "rank 1")] * 2


@contextmanager
def small_file_system(folder: Path, size: str) -> Iterator[None]:
    """Have a file system of this size in the place of an empty folder."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.slow
@pytest.mark.needs_root
def test_a_full_disk_ends_no_training(cases: Cases, tmp_path: Path) -> None:
    with small_file_system(tmp_path, "4m"):
        told = cases.run("full disk", tmp_path)
    for rank in told["ranks"]:
        first, second, third = rank["said"]
        assert (first, third) == ("saved", "saved")
        assert "cannot write the checkpoint of step 2" in second
        assert "No space left on device; make room there or keep fewer, the earlier checkpoints are untouched" in second
        assert rank["there"] == [[1], [1], [3]]
        assert [name for name in rank["left"] if name.startswith(".tmp")] == [], "what was begun gives its room back"
    assert [rank["heard"].count("step 2 is not saved: ") for rank in told["ranks"]] == [1, 0], "rank 0 tells it, once"


@pytest.mark.needs_root
def test_without_room_in_memory_it_goes_to_disk_alone(cases: Cases, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    with small_file_system(small, "400k"):
        first, second = cases.run("small memory", tmp_path, str(small))
    assert [resumed for resumed, _ in first] == [None, None]
    assert [resumed for resumed, _ in second] == [[1, "durable"], [1, "durable"]]
    for (_, heard), (_, other) in (first, second):
        assert heard.count("no checkpoints are kept in memory, because there is not enough memory for 2 of them") == 1
        assert other == ""


@pytest.mark.long("save-kill")
@pytest.mark.timeout(3600)
def test_many_kills(cases: Cases, tmp_path: Path, seed: int, long_run: LongRun) -> None:
    for number, tier in enumerate(("durable", "memory")):
        folder = tmp_path / tier
        folder.mkdir()
        told = cases.run("kills", folder, 150, seed + number, tier == "memory")
        long_run.count(**{f"kills_{tier}": told["resumed"]})
        long_run.detail(**{f"resumed_from_{tier}": told["tiers"]})
    told = cases.run("partition", tmp_path / "partition", 100, seed)
    long_run.count(partitions=told["fenced"])


# -- object stores -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    from tests.e2e.s3_server import s3_server  # needs the local cluster's Python, which is newer than the library's

    with s3_server(tmp_path_factory.mktemp("s3")) as running:
        (running.folder / "bucket").mkdir()
        yield running


@pytest.fixture(scope="module")
def s3fs() -> str:
    """The folder that has s3fs."""
    from tests.peers import peer_python

    (packages,) = (peer_python("s3").parents[1] / "lib").glob("python*/site-packages")
    return str(packages)


@pytest.mark.long("variants")
def test_worlds_of_several_sizes_share_a_bucket(cases: Cases, server: S3Server, s3fs: str, tmp_path: Path) -> None:
    told = cases.run("bucket worlds", tmp_path, server.options, s3fs)
    (_, _, digest, path, there), _ = told["two"]
    assert path == "s3://bucket/jobs/lm/step-0000000003-gen-000001"
    assert there == [3, 2]
    assert [each[:2] for each in told["three"]] == [[3, digest]] * 3
    assert told["three"][0][4] == [6, 5, 3]


@pytest.mark.slow
def test_a_replaced_generation_cannot_commit_to_a_bucket(
    cases: Cases, server: S3Server, s3fs: str, tmp_path: Path
) -> None:
    said = cases.run("bucket fences", tmp_path, server.options, s3fs)
    assert said.pop("claimed while it wrote").startswith("FencedError: generation 2 has taken over s3://bucket/between")
    assert "another writer was there first" in said.pop("claimed after its last look")
    assert said.pop("what is there then") == "[]"
    assert said.pop("begins late").startswith("FencedError")
    assert said.pop("what is left") == "['.claims']"
    assert said.pop("its own commit repeated") == "done"
    assert "another writer was there first" in said.pop("another commit")
    assert "is itself one checkpoint" in said.pop("foreign")
    assert not said


@pytest.mark.slow
def test_damage_in_a_bucket_is_passed_over_and_keys_are_not_told(cases: Cases, server: S3Server, s3fs: str) -> None:
    told = cases.run("bucket trouble", server.folder.parent, server.options, s3fs)
    assert told["resumed"] == 1
    assert "skipping a damaged checkpoint: s3://bucket/trouble/" in told["heard"]
    by_server, by_us = told["refused"]
    assert by_server.startswith(f"this process, of user {os.geteuid()}, may not write in s3://bucket/trouble")
    assert by_us == "give the credentials for s3://bucket/trouble in storage_options, not in its address"
    for secret in (server.secret, server.key, "password", "another-secret"):
        assert secret not in told["heard"] + by_server + by_us
