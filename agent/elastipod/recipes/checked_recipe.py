"""Contradictions in a recipe, found before anything is submitted: every size must have a configuration and a batch.

`ElasticRecipe` reads what HyperPod's launcher reads, and is as lenient. A recipe that is rendered is held to more, because
what is wrong with it would only show at the first resize.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any

from elastipod.batches.batch_plan import UnevenBatch
from elastipod.batches.recipes import ElasticRecipe
from elastipod.errors import BatchSizeError, RecipeError

_ARGUMENTS = "training_config.training_args"


@dataclass(frozen=True, slots=True)
class ElasticTimes:
    """What `elastic_policy` says beside the sizes, in seconds; None: not set. graceful: workers save before a resize."""

    scaling_s: int | None
    graceful_s: int | None
    graceful: bool


@dataclass(frozen=True, slots=True)
class CheckedRecipe:
    """A recipe without contradictions.

    is_elastic: whether its size may change. start: nodes at the first start. times: None for a recipe of fixed size.
    warnings: sentences for the user.
    """

    recipe: ElasticRecipe
    is_elastic: bool
    start: int
    times: ElasticTimes | None
    warnings: tuple[str, ...]


def check_recipe(config: Mapping[str, Any], *, ranks_per_node: int, model_parallel: int = 1) -> CheckedRecipe:
    """Read a whole recipe and check every size. ranks_per_node: workers in each pod. model_parallel: ranks of one model group.

    Raises RecipeError or BatchSizeError: one sentence with the field and what would work.
    """
    _check_composed(config)
    recipe = ElasticRecipe.from_config(config)
    policy: Mapping[str, Any] = config.get("elastic_policy") or {}
    if not policy.get("is_elastic"):
        (nodes,) = recipe.nodes
        _check_groups(nodes, ranks_per_node, model_parallel)
        fixed = ElasticRecipe(recipe.base, {}, recipe.nodes)
        _check_batch(fixed, nodes, ranks_per_node, model_parallel)
        return CheckedRecipe(fixed, False, nodes, None, ())
    times = _times(policy)
    if recipe.scales:
        _check_bounds_have_configs(policy, recipe)
    _check_same_folder(recipe)
    for nodes in recipe.nodes:
        _check_number_of_nodes(recipe, nodes)
        _check_number_of_ranks(recipe, nodes, ranks_per_node)
        _check_groups(nodes, ranks_per_node, model_parallel)
        _check_batch(recipe, nodes, ranks_per_node, model_parallel)
    return CheckedRecipe(recipe, True, _start(recipe), times, tuple(_warnings(recipe)))


def _check_composed(config: Mapping[str, Any]) -> None:
    defaults = config.get("defaults") or []
    if not isinstance(defaults, list):
        raise RecipeError(f"defaults is {defaults!r}; it must be a list, such as [_self_]")
    others = [entry for entry in defaults if entry != "_self_"]
    if others:
        raise RecipeError(
            f"defaults names {', '.join(map(str, others[:3]))}, which Hydra merges into the recipe; render the merged recipe, as the "
            "launcher prints it with --cfg job --package recipes"
        )


def _times(policy: Mapping[str, Any]) -> ElasticTimes:
    graceful = policy.get("use_graceful_shutdown", True)
    if not isinstance(graceful, bool):
        raise RecipeError(f"elastic_policy.use_graceful_shutdown is {graceful!r}; it must be true or false")
    return ElasticTimes(_seconds(policy, "scaling_timeout"), _seconds(policy, "graceful_shutdown_timeout"), graceful)


def _seconds(policy: Mapping[str, Any], name: str) -> int | None:
    value = policy.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise RecipeError(f"elastic_policy.{name} is {value!r}; it must be a whole number of seconds, at least 0")
    return value


def _check_bounds_have_configs(policy: Mapping[str, Any], recipe: ElasticRecipe) -> None:
    """Every size that the recipe names must have its own block: the job would otherwise start without one, or never reach it."""
    known = ", ".join(map(str, sorted(recipe.scales)))
    for name in ("min_nodes", "max_nodes"):
        nodes = policy.get(name)
        if nodes is not None and int(nodes) not in recipe.scales:
            raise RecipeError(
                f"elastic_policy.{name} is {nodes}, but scale_config has no block for {nodes} nodes; add scale_config.{nodes}, "
                f"or set {name} to one of {known}"
            )
    nodes = _num_nodes(recipe.base)
    if nodes is not None and recipe.nodes[0] <= nodes <= recipe.nodes[-1] and nodes not in recipe.nodes:
        raise RecipeError(
            f"trainer.num_nodes is {nodes}, but scale_config has no block for {nodes} nodes; add scale_config.{nodes}, or start "
            f"with one of {', '.join(map(str, recipe.nodes))}"
        )


def _check_same_folder(recipe: ElasticRecipe) -> None:
    for nodes in recipe.nodes:
        if _arguments(recipe.at(nodes)).get("override_training_dir") is False:
            raise RecipeError(
                f"{_ARGUMENTS}.override_training_dir is false at {nodes} nodes, so that a start after a resize would write to a "
                "new folder and not find its checkpoints; set it to true, or leave it out"
            )


def _check_number_of_nodes(recipe: ElasticRecipe, nodes: int) -> None:
    stated = _block(recipe.scales.get(nodes, {}), "trainer").get("num_nodes", nodes)
    if stated != nodes:
        raise RecipeError(
            f"scale_config.{nodes}.trainer.num_nodes is {stated!r}, but its key is {nodes}; set it to {nodes}, or leave it out"
        )


def _check_number_of_ranks(recipe: ElasticRecipe, nodes: int, ranks_per_node: int) -> None:
    stated = _block(recipe.scales.get(nodes, {}), "trainer").get("devices", ranks_per_node)
    if stated != ranks_per_node:
        raise RecipeError(
            f"scale_config.{nodes}.trainer.devices is {stated!r}, but each node has {ranks_per_node} workers at every size; leave it out"
        )


def _check_groups(nodes: int, ranks_per_node: int, model_parallel: int) -> None:
    if nodes * ranks_per_node % model_parallel:
        every = model_parallel // gcd(model_parallel, ranks_per_node)
        raise RecipeError(
            f"{_nodes(nodes)} with {ranks_per_node} ranks each form no whole model groups of {model_parallel}; allow multiples of "
            f"{every} nodes only"
        )


def _check_batch(recipe: ElasticRecipe, nodes: int, ranks_per_node: int, model_parallel: int) -> None:
    """Check the batch of a size, if the recipe states one. HyperPod's trainers divide it evenly unless told otherwise."""
    arguments = _arguments(recipe.at(nodes))
    if arguments.get("train_batch_size") is None:
        return
    try:
        plan = recipe.batch_at(nodes, ranks_per_node, model_parallel=model_parallel)
    except BatchSizeError as error:
        raise BatchSizeError(f"at {_nodes(nodes)} with {ranks_per_node} ranks each, {error}") from error
    is_planned = UnevenBatch.from_config(_block(arguments, "uneven_batch")) is not None
    if not plan.is_even and not is_planned:
        small, large = min(plan.local_sizes), max(plan.local_sizes)
        raise BatchSizeError(
            f"{_ARGUMENTS}.train_batch_size {plan.global_batch} does not divide by the {plan.data_parallel} data-parallel ranks "
            f"of {_nodes(nodes)}; add uneven_batch {{use_uneven_batch: true, num_dp_groups_with_small_batch_size: "
            f"{plan.local_sizes.count(small)}, small_local_batch_size: {small}, large_local_batch_size: {large}}} to "
            f"scale_config.{nodes}.{_ARGUMENTS}, or take {nodes} out of the sizes"
        )


def _start(recipe: ElasticRecipe) -> int:
    """Give the size of the first start: `trainer.num_nodes`, or the nearest size below it, but at least the smallest."""
    wanted = _num_nodes(recipe.base) or recipe.nodes[0]
    return max((nodes for nodes in recipe.nodes if nodes <= wanted), default=recipe.nodes[0])


def _warnings(recipe: ElasticRecipe) -> list[str]:
    batches = {nodes: _arguments(recipe.at(nodes)).get("train_batch_size") for nodes in recipe.nodes}
    if len(set(batches.values())) < 2:
        return []
    said = ", ".join(f"{_nodes(nodes)}: {batch}" for nodes, batch in batches.items())
    return [
        f"{_ARGUMENTS}.train_batch_size is not the same at every size ({said}); a resize will change the loss curve"
    ]


def _num_nodes(config: Mapping[str, Any]) -> int | None:
    nodes = _block(config, "trainer").get("num_nodes")
    if nodes is not None and (not isinstance(nodes, int) or isinstance(nodes, bool) or nodes < 1):
        raise RecipeError(f"trainer.num_nodes is {nodes!r}; it must be a whole number of at least 1")
    return nodes


def _arguments(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return _block(_block(config, "training_config"), "training_args")


def _block(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = config.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise RecipeError(f"{name} is {value!r}; it must be a block of names and values")
    return value


def _nodes(number: int) -> str:
    return "1 node" if number == 1 else f"{number} nodes"
