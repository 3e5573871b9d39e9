"""Where a recipe starts, which sizes and times its job gets, and what is told about them."""

from __future__ import annotations

from typing import Any

import pytest

from elastipod.errors import BatchSizeError, RecipeError
from elastipod.recipes.checked_recipe import ElasticTimes, check_recipe
from elastipod.recipes.render import RenderOptions, render

OPTIONS = RenderOptions(name="job", image="i", script=("s",), ranks_per_node=8)
SCALES: dict[int, Any] = {2: {}, 4: {}, 8: {}}


def config(policy: dict[str, Any], scales: dict[int, Any] | None = None, **blocks: Any) -> dict[str, Any]:
    return {"elastic_policy": {"is_elastic": True, **policy}, "scale_config": scales, **blocks}


def policy_of(policy: dict[str, Any], scales: dict[int, Any] | None = None) -> dict[str, Any]:
    _, job = render(check_recipe(config(policy, scales), ranks_per_node=8), OPTIONS)
    found: dict[str, Any] = job["spec"]["elasticPolicy"]
    return found


@pytest.mark.parametrize(
    ("policy", "scales", "wanted"),
    [
        ({"min_nodes": 3}, None, {"minReplicas": 3, "maxReplicas": 3, "replicaIncrementStep": 1}),
        ({"min_nodes": 2, "max_nodes": 3}, None, {"minReplicas": 2, "maxReplicas": 3, "replicaIncrementStep": 1}),
        (
            {"min_nodes": 2, "max_nodes": 9, "replica_increment_step": 3},
            None,
            {"minReplicas": 2, "maxReplicas": 8, "replicaIncrementStep": 3},
        ),
        (
            {"min_nodes": 2, "max_nodes": 8, "scaling_timeout": 0, "graceful_shutdown_timeout": 0},
            SCALES,
            {
                "minReplicas": 2, "maxReplicas": 8, "replicaDiscreteValues": [2, 4, 8],
                "scalingTimeoutInSeconds": 0, "gracefulShutdownTimeoutInSeconds": 0,
            },
        ),
        (
            {"min_nodes": 4, "max_nodes": 4, "use_graceful_shutdown": False, "graceful_shutdown_timeout": 60},
            SCALES,
            {"minReplicas": 4, "maxReplicas": 4, "replicaDiscreteValues": [4], "gracefulShutdownTimeoutInSeconds": 0},
        ),
    ],
)  # fmt: skip
def test_the_policy_of_the_job_says_what_the_recipe_says(
    policy: dict[str, Any], scales: dict[int, Any] | None, wanted: dict[str, Any]
) -> None:
    assert policy_of(policy, scales) == wanted


@pytest.mark.parametrize(("wanted", "start"), [(None, 2), (1, 2), (2, 2), (4, 4), (8, 8), (9, 8), (99, 8)])
def test_a_job_starts_at_its_size_or_the_next_smaller_one(wanted: int | None, start: int) -> None:
    blocks = {} if wanted is None else {"trainer": {"num_nodes": wanted}}
    found = check_recipe(config({"min_nodes": 2, "max_nodes": 8}, SCALES, **blocks), ranks_per_node=8)
    assert (found.start, found.is_elastic, found.warnings) == (start, True, ())
    assert found.times == ElasticTimes(None, None, graceful=True)


def test_a_recipe_of_fixed_size_has_no_times_and_no_other_sizes() -> None:
    policy = {"is_elastic": False, "scaling_timeout": "ignored"}
    found = check_recipe(
        {"trainer": {"num_nodes": 3}, "elastic_policy": policy, "scale_config": SCALES}, ranks_per_node=8
    )
    assert (found.start, found.is_elastic, found.times, found.warnings) == (3, False, None, ())
    assert (found.recipe.nodes, found.recipe.scales) == ((3,), {})


@pytest.mark.parametrize(
    ("model_parallel", "every"), [(3, 3), (12, 3), (16, 2), (32, 4)],
)  # fmt: skip
def test_sizes_of_whole_model_groups_are_named(model_parallel: int, every: int) -> None:
    with pytest.raises(RecipeError) as refused:
        check_recipe({"trainer": {"num_nodes": 1}}, ranks_per_node=8, model_parallel=model_parallel)
    assert str(refused.value) == (
        f"1 node with 8 ranks each form no whole model groups of {model_parallel}; allow multiples of {every} nodes only"
    )
    check_recipe({"trainer": {"num_nodes": every}}, ranks_per_node=8, model_parallel=model_parallel)


def test_uneven_parts_are_refused_with_the_block_that_allows_them() -> None:
    arguments = {"training_args": {"train_batch_size": 20}}
    with pytest.raises(BatchSizeError) as refused:
        check_recipe(config({"min_nodes": 1, "max_nodes": 1}, {1: {}}, training_config=arguments), ranks_per_node=8)
    assert str(refused.value) == (
        "training_config.training_args.train_batch_size 20 does not divide by the 8 data-parallel ranks of 1 node; add uneven_batch "
        "{use_uneven_batch: true, num_dp_groups_with_small_batch_size: 4, small_local_batch_size: 2, large_local_batch_size: 3} to "
        "scale_config.1.training_config.training_args, or take 1 out of the sizes"
    )


def test_batches_that_differ_by_size_are_warned_of() -> None:
    scales = {1: {}, 2: {"training_config": {"training_args": {"train_batch_size": 32}}}}
    blocks = {"training_config": {"training_args": {"train_batch_size": 16}}}
    assert check_recipe(config({"max_nodes": 2}, scales, **blocks), ranks_per_node=8).warnings == (
        "training_config.training_args.train_batch_size is not the same at every size (1 node: 16, 2 nodes: 32); a resize will change "
        "the loss curve",
    )
