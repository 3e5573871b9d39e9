"""Elastic recipes of the documents: sizes, overrides at every depth, batches that sum up."""

from __future__ import annotations

from typing import Any

import pytest

from elastipod.batches.recipes import ElasticRecipe
from elastipod.errors import BatchSizeError, RecipeError

# The documents' own sample, with eight ranks on a node.
RECIPE: dict[str, Any] = {
    "trainer": {"num_nodes": 1, "devices": 8},
    "training_config": {"training_args": {"train_batch_size": 128, "micro_train_batch_size": 16, "max_len": 4096}},
    "elastic_policy": {"is_elastic": True, "min_nodes": 1, "max_nodes": 3},
    "scale_config": {
        2: {
            "trainer": {"num_nodes": 2},
            "training_config": {"training_args": {"micro_train_batch_size": 8, "learning_rate": 0.0004}},
        },
        "3": {
            "trainer": {"num_nodes": 3},
            "training_config": {
                "training_args": {
                    "learning_rate": 0.0004,
                    "uneven_batch": {
                        "use_uneven_batch": True,
                        "num_dp_groups_with_small_batch_size": 16,
                        "small_local_batch_size": 5,
                        "large_local_batch_size": 6,
                    },
                }
            },
        },
        16: {"trainer": {"num_nodes": 16}},
    },
}


def changed(**parts: Any) -> dict[str, Any]:
    return {**RECIPE, **parts}


def test_a_size_overrides_what_it_names_and_keeps_the_rest() -> None:
    recipe = ElasticRecipe.from_config(RECIPE)
    assert recipe.nodes == (2, 3), "sizes of scale_config within the bounds"
    two = recipe.at(2)
    assert two["trainer"] == {"num_nodes": 2, "devices": 8}
    assert two["training_config"]["training_args"] == {
        "train_batch_size": 128,
        "micro_train_batch_size": 8,
        "max_len": 4096,
        "learning_rate": 0.0004,
    }
    assert "elastic_policy" not in two
    assert RECIPE["trainer"]["num_nodes"] == 1, "the recipe itself stays as it was"


def test_batches_of_the_sizes_sum_up() -> None:
    recipe = ElasticRecipe.from_config(RECIPE)
    two, three = recipe.batch_at(2, 8), recipe.batch_at(3, 8)
    assert (two.local_sizes, two.micro_batch, two.passes) == ((8,) * 16, 8, 1)
    assert (three.local_sizes, three.passes) == ((5,) * 16 + (6,) * 8, 1)
    with pytest.raises(BatchSizeError, match=r"16 x 5 \+ 0 x 6 = 80 samples, but the global batch is 128"):
        recipe.batch_at(3, 16, model_parallel=3)


@pytest.mark.parametrize(
    ("policy", "nodes"),
    [
        pytest.param(
            {"is_elastic": True, "min_nodes": 2, "max_nodes": 7, "replica_increment_step": 2}, (2, 4, 6), id="steps"
        ),
        pytest.param({"is_elastic": True, "min_nodes": 3}, (3,), id="no maximum"),
        pytest.param({"is_elastic": False, "min_nodes": 3}, (1,), id="not elastic"),
        pytest.param(None, (1,), id="no policy"),
    ],
)
def test_sizes_without_a_scale_config(policy: dict[str, Any] | None, nodes: tuple[int, ...]) -> None:
    assert ElasticRecipe.from_config(changed(elastic_policy=policy, scale_config=None)).nodes == nodes


POLICY = RECIPE["elastic_policy"]


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        (
            {"elastic_policy": {**POLICY, "replica_increment_step": 1}},
            "replica_increment_step and scale_config exclude",
        ),
        ({"elastic_policy": {**POLICY, "min_nodes": 4}}, "elastic_policy.min_nodes is 4 but max_nodes is 3"),
        ({"elastic_policy": {**POLICY, "min_nodes": 0}}, "elastic_policy.min_nodes is 0; it must be a whole number"),
        ({"elastic_policy": {**POLICY, "min_nodes": True}}, "elastic_policy.min_nodes is True"),
        ({"elastic_policy": {**POLICY, "max_nodes": 1}}, r"no size of scale_config \(2, 3, 16\) is within min_nodes 1"),
        ({"elastic_policy": {**POLICY, "is_elastic": "true"}}, "is_elastic is 'true'; it must be true or false"),
        ({"elastic_policy": 3}, "elastic_policy is 3; it must be a block"),
        ({"scale_config": {"two": {}}}, "scale_config key is 'two'; it must be a whole number"),
        ({"scale_config": {2: 5}}, "scale_config.2 is 5; it must be a block"),
    ],
)
def test_a_recipe_that_cannot_be_meant_is_refused_with_the_field(parts: dict[str, Any], text: str) -> None:
    with pytest.raises(RecipeError, match=text):
        ElasticRecipe.from_config(changed(**parts))


def test_a_size_that_is_not_there_and_a_batch_that_is_not_there_are_refused() -> None:
    with pytest.raises(RecipeError, match="4 nodes is no size of this recipe; it has 2, 3"):
        ElasticRecipe.from_config(RECIPE).at(4)
    with pytest.raises(RecipeError, match=r"training_config.training_args.train_batch_size is None"):
        ElasticRecipe.from_config(changed(training_config={})).batch_at(2, 8)
