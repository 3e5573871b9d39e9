"""Refusals of data, batches and recipes, as whole sentences: the field, what it is, and what would work."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastipod import worker_file
from elastipod.batches.batch_plan import plan_batch
from elastipod.batches.learning_rate import BatchScaledRate, rate_factor
from elastipod.batches.recipes import ElasticRecipe
from elastipod.data import BatchSplit, ElasticBatches, tokens_command
from elastipod.data.batch_cache import BatchCache
from elastipod.data.loader import ElasticLoader
from elastipod.data.mixture import Mixture
from elastipod.data.plan_check import check_in_store
from elastipod.data.shards import Shards
from elastipod.data.token_format import TokenHeader, read_header
from elastipod.data.tokens import TokenFile, TokenWindows
from elastipod.errors import DataError, RecipeError
from elastipod.json_records import JsonError, parse
from elastipod.recipes.checked_recipe import check_recipe
from elastipod.recipes.present_config import present_config
from elastipod.recipes.recipe_command import main as recipe
from elastipod.recipes.render import RenderOptions, render
from elastipod.shuffle import Shuffle

PLAN = ElasticBatches(20, 8, seed=1)
ELASTIC: dict[str, Any] = {"is_elastic": True, "min_nodes": 1, "max_nodes": 4}
SCALES: dict[int, Any] = {1: {}, 2: {}, 4: {}}


def checked(**config: Any) -> object:
    return check_recipe({"elastic_policy": ELASTIC, "scale_config": SCALES, **config}, ranks_per_node=8)


class Compared:
    """A store in which another process came first."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        return b"7" if key.startswith("rank/") else desired.encode()


SCHEDULE: Any = SimpleNamespace()
MESH: Any = object()

REFUSALS: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: plan_batch(8, 2, dp_mesh=MESH), TypeError, "give either world_size or dp_mesh"),
    (lambda: plan_batch(8, dp_mesh=MESH, model_parallel=2), TypeError, "model_parallel is in dp_mesh already; leave it out"),
    (lambda: rate_factor("cubic", 1, 1), ValueError, "rule is 'cubic'; there are constant, linear, square-root"),  # type: ignore[arg-type]
    (lambda: rate_factor("linear", 0, 64), ValueError, "global_batch is 0 and base_batch 64; both must be at least 1"),
    (lambda: rate_factor("linear", 64, 0), ValueError, "global_batch is 64 and base_batch 0; both must be at least 1"),
    (
        lambda: BatchScaledRate.apply(SCHEDULE),
        TypeError,
        "the rate of a SimpleNamespace cannot be scaled; write the schedule as a function of the step, in "
        "LambdaLR(optimizer, lambda step: schedule(step) * rate.factor(step))",
    ),
    (
        lambda: ElasticRecipe.from_config({"elastic_policy": {**ELASTIC, "max_nodes": 1}, "scale_config": {4: {}, 2: {}}}),
        RecipeError,
        "no size of scale_config (2, 4) is within min_nodes 1 and max_nodes 1",
    ),
    (
        lambda: ElasticRecipe.from_config({"elastic_policy": ELASTIC, "scale_config": SCALES}).at(3),
        RecipeError,
        "3 nodes is no size of this recipe; it has 1, 2, 4",
    ),
    (lambda: BatchSplit.of(2, (0, 0)), ValueError, "local_sizes must not be negative, and some rank must have samples"),
    (lambda: BatchSplit.of(2, (3, -1)), ValueError, "local_sizes must not be negative, and some rank must have samples"),
    (
        lambda: ElasticBatches.over([1], 3),  # type: ignore[arg-type]
        TypeError,
        "a list is no source with an order of its own (Shards, Mixture); of a dataset it is ElasticBatches(len(dataset), global_batch)",
    ),
    (
        lambda: ElasticBatches(20, 8, seed=2).resumed(PLAN.state_dict(1)),
        DataError,
        "the data position was saved with seed 1, but now it is 2; resume with the same data, or start from the beginning",
    ),
    (lambda: PLAN.iterate(0, 1, "x"), TypeError, "start_step is 'x'; it must be a whole number"),  # type: ignore[arg-type]
    (lambda: PLAN.iterate(0, "x"), TypeError, "world_size is 'x'; it must be a whole number"),  # type: ignore[arg-type]
    (lambda: ElasticBatches(20, 3, epochs="x"), TypeError, "epochs is 'x'; it must be a whole number"),  # type: ignore[arg-type]
    (lambda: Shards([1], lanes="x"), TypeError, "lanes is 'x'; it must be a whole number"),  # type: ignore[arg-type]
    (lambda: Shards([1], lanes=1, seed="x"), TypeError, "seed is 'x'; it must be a whole number"),  # type: ignore[arg-type]
    (lambda: Shards([1, "x"], lanes=1), TypeError, "the length of shard 1 is 'x'; it must be a whole number"),  # type: ignore[list-item]
    (lambda: Shards([0], lanes=1), ValueError, "lengths must contain at least one sample, and no shard can have a negative length"),
    (
        lambda: ElasticLoader[Any](iter([1]), PLAN, rank=0, world_size=1, micro_batch=2),  # type: ignore[arg-type]
        DataError,
        "a list_iterator does not give samples by index, so a resize could not divide them; for data that is read sequentially use "
        "Shards and a ShardReader, or StreamLanes",
    ),
    (
        lambda: ElasticLoader[Any](range(20), PLAN, rank=0, world_size=1, micro_batch=2, in_order=False),  # type: ignore[arg-type]
        DataError,
        "in_order=False gives passes the data of other passes; leave it out",
    ),
    (lambda: loaded_late(), DataError, "a data position can be loaded before the first batch only; make a new loader"),
    (
        lambda: Mixture({"a": 1, "b": 2}, {"b": 1, "c": 1}, samples=2),
        ValueError,
        "sources are a, b, but there are weights for b, c",
    ),
    (lambda: Mixture({"a": 1}, {"a": 1}, samples="x"), TypeError, "samples is 'x'; it must be a whole number"),  # type: ignore[arg-type]
    (lambda: Mixture({"a": 1}, {"a": 1}, samples=1, seed="x"), TypeError, "seed is 'x'; it must be a whole number"),  # type: ignore[arg-type]
    (
        lambda: Mixture({"a": 1, "b": 1}, {"a": 1, "b": 1}, samples=1),
        ValueError,
        "samples is 1; with these weights it must be whole rounds of 2, such as 2 or 4",
    ),
    (
        lambda: check_in_store(Compared(), {"seed": 1}, 2, 3),
        DataError,
        "the processes of ranks 7 and 3 would both train on the samples of rank 2; give each its own global rank, not its local one",
    ),
    (lambda: Shuffle(20, 0, 0)[-1], IndexError, "position -1 is outside an epoch of 20 samples"),
    (lambda: parse(TokenHeader, "[" * 200_000), JsonError, "the record is nested too deeply"),
    (
        lambda: checked(defaults=["base", "_self_", {"a": "b"}, "c", "d"]),
        RecipeError,
        "defaults names base, {'a': 'b'}, c, which Hydra merges into the recipe; render the merged recipe, as the launcher prints it "
        "with --cfg job --package recipes",
    ),
    (
        lambda: checked(trainer={"num_nodes": 3}),
        RecipeError,
        "trainer.num_nodes is 3, but scale_config has no block for 3 nodes; add scale_config.3, or start with one of 1, 2, 4",
    ),
    (
        lambda: checked(training_config={"training_args": {"override_training_dir": False}}),
        RecipeError,
        "training_config.training_args.override_training_dir is false at 1 nodes, so that a start after a resize would write to a new "
        "folder and not find its checkpoints; set it to true, or leave it out",
    ),
    (
        lambda: render(checked(), options("A_b")),  # type: ignore[arg-type]
        RecipeError,
        "the name of the job is 'A_b'; it must be at most 63 lower-case letters, digits and '-', beginning and ending with a letter or "
        "digit: give one with --name",
    ),
]  # fmt: skip


def options(name: str) -> RenderOptions:
    return RenderOptions(name=name, image="i", script=("s",), ranks_per_node=8)


def loaded_late() -> None:
    with ElasticLoader[Any](range(20), PLAN, rank=0, world_size=1, micro_batch=8) as loader:  # type: ignore[arg-type]
        next(iter(loader))
        loader.load_state_dict(PLAN.state_dict(1))


@pytest.mark.parametrize(("act", "kind", "text"), [pytest.param(*each, id=each[2][:30]) for each in REFUSALS])
def test_a_refusal_is_a_whole_sentence(act: Callable[[], object], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as refused:
        act()
    assert str(refused.value) == text


def test_names_of_jobs_have_their_longest_length() -> None:
    found: Any = checked()
    render(found, options("a" * 63))
    with pytest.raises(RecipeError, match=f"^the name of the job is '{'a' * 64}'"):
        render(found, options("a" * 64))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"a: [", "it is not YAML at line 1: expected the node content, but found '<stream end>'"),
        (b"a: 1\nb: *c\n", "it is not YAML at line 2: found undefined alias 'c'"),
        (b"a: \xff", "it cannot be read: 'utf-8' codec can't decode byte 0xff in position 3: invalid start byte"),
        (b"[]", "it holds no recipe; a recipe is a block with trainer, training_config and elastic_policy"),
        (b"trainer: {devices: 2}", "run.name is missing; add it, or give the job a name with --name"),
        (
            b"trainer: {devices: true}",
            "trainer.devices is True; set it to the ranks of a node, or give --ranks-per-node",
        ),
        (b"trainer: {devices: 0}", "trainer.devices is 0; set it to the ranks of a node, or give --ranks-per-node"),
        (b"trainer: 3", "trainer.devices is None; set it to the ranks of a node, or give --ranks-per-node"),
        (None, "it cannot be read: No such file or directory"),
    ],
)
def test_a_recipe_that_cannot_be_rendered_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: bytes | None, told: str
) -> None:
    file = tmp_path / "recipe.yaml"
    if text is not None:
        file.write_bytes(text)
    assert recipe(["render", str(file), "--image=i", "--script=s"]) == 1
    assert capsys.readouterr() == ("", f"elastipod recipe: {file}: {told}\n")


def test_a_size_without_a_configuration_is_told_with_those_that_have_one(tmp_path: Path) -> None:
    for nodes in (10, 2):
        (tmp_path / f"config-n{nodes}.yaml").touch()
    with pytest.raises(RecipeError) as refused:
        present_config(tmp_path, environ={"NNODES": "3"})
    assert str(refused.value) == (
        f"{tmp_path}/config-n3.yaml does not exist; the sizes with a configuration are 2, 10, so add 3 to scale_config and render "
        "the recipe again, or take it out of the sizes of the job"
    )
    for text in ("0", "02", "+2", " 2"):
        with pytest.raises(RecipeError) as refused:
            present_config(tmp_path, environ={"NNODES": text})
        assert str(refused.value) == (
            f"NNODES is '{text}'; start the script with hyperpodrun, which sets it to the number of pods"
        )


def test_the_folder_of_configurations_is_where_the_job_mounts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NNODES", raising=False)
    with pytest.raises(
        RecipeError, match=r"^NNODES is ''; start the script with hyperpodrun, which sets it to the number of pods$"
    ):
        present_config()
    with pytest.raises(RecipeError, match=r"^/config holds neither config-n3\.yaml nor config\.yaml; mount"):
        present_config(environ={"NNODES": "3"})


def test_a_cache_that_gets_no_batch_says_what_it_waits_for(tmp_path: Path) -> None:
    cache = BatchCache(tmp_path, is_loader=False, wait_s=0)
    with pytest.raises(DataError) as refused:
        next(cache.iterate(PLAN, lambda batch: pytest.fail("it loads"), rank=0, world_size=1))
    assert str(refused.value) == (
        f"no {tmp_path}/batch-000000001-0-8.tensors within 0 s: the loading rank of this group is not running, is on another node, or "
        "has another plan"
    )


def told(act: Callable[[], object]) -> str:
    with pytest.raises(DataError) as refused:
        act()
    return str(refused.value)


def test_token_files_that_cannot_be_used_are_told(tmp_path: Path) -> None:
    out, text = tmp_path / "out", tmp_path / "text"
    text.touch()
    assert told(lambda: tokens_command.build(out, [text])) == "the texts contain no tokens; nothing was written"
    text.write_text("abc")
    tokens_command.build(out, [text])
    short = told(lambda: TokenWindows(TokenFile(out), 3))
    assert short == f"{out} has 3 tokens, not enough for one window of 3 and a target"
    there = told(lambda: tokens_command.build(out, [text]))
    assert there == f"{out} exists; name another file, or replace it with --force"
    ends = [told(partial(tokens_command.build, tmp_path / "new", [text], end_of_document=end)) for end in (256, -1)]
    assert ends == [f"the token {end} for ends of documents is not below the vocabulary of 256" for end in (256, -1)]
    with open(out, "ab") as file:
        file.write(b"x")
    assert told(lambda: read_header(out)) == (
        f"the token file {out} has 68 bytes, but its 3 tokens take 67: it was cut off or changed; build it again"
    )


def test_folders_without_texts_are_all_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    assert tokens_command.main(["build", str(tmp_path / "out"), *map(str, folders)]) == 1
    assert capsys.readouterr().err == f"elastipod tokens: there are no files in {tmp_path}/a, {tmp_path}/b\n"
    assert tokens_command.main(["build", str(tmp_path / "out"), str(tmp_path / "c")]) == 1
    assert capsys.readouterr().err == f"elastipod tokens: {tmp_path}/c does not exist\n"


def test_a_worker_file_needs_little_endian(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "byteorder", "big")
    with pytest.raises(worker_file.WorkerFileError, match=r"^the worker file needs a little-endian machine$"):
        worker_file.WorkerFile.create(tmp_path / "file", 1)
    with pytest.raises(worker_file.WorkerFileError, match=r"^the worker file needs a little-endian machine$"):
        worker_file.WorkerFile.open(tmp_path / "file")
    assert os.listdir(tmp_path) == []
