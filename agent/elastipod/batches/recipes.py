"""HyperPod's elastic recipes: `elastic_policy`, and `scale_config`, which overrides the recipe at a size.

Takes the mapping that a YAML loader gives; it reads no files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elastipod.batches.batch_plan import BatchPlan, UnevenBatch, plan_batch
from elastipod.errors import RecipeError

_POLICY = "elastic_policy"
_SCALES = "scale_config"
_ARGUMENTS = ("training_config", "training_args")


@dataclass(frozen=True, slots=True)
class ElasticRecipe:
    """A recipe. base: without the elastic blocks. scales: overrides by size. nodes: the sizes, in nodes, that it may train at."""

    base: Mapping[str, Any]
    scales: Mapping[int, Mapping[str, Any]]
    nodes: tuple[int, ...]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ElasticRecipe:
        """Read a recipe. Raises RecipeError with the path of the field.

        The sizes are those of `scale_config` within min_nodes and max_nodes; without `scale_config`, every increment between
        them; for a recipe that is not elastic, `trainer.num_nodes`.
        """
        config = _mapping(config, "the recipe")
        policy = _mapping(config.get(_POLICY) or {}, _POLICY)
        scales = {
            _positive_int(key, f"{_SCALES} key"): _mapping(value, f"{_SCALES}.{key}")
            for key, value in _mapping(config.get(_SCALES) or {}, _SCALES).items()
        }
        base = {name: value for name, value in config.items() if name not in (_POLICY, _SCALES)}
        is_elastic = policy.get("is_elastic") or False
        if not isinstance(is_elastic, bool):
            raise RecipeError(f"{_POLICY}.is_elastic is {is_elastic!r}; it must be true or false")
        if not is_elastic:
            nodes = _mapping(base.get("trainer") or {}, "trainer").get("num_nodes", 1)
            return cls(base, scales, (_positive_int(nodes, "trainer.num_nodes"),))
        least = _positive_int(policy.get("min_nodes", 1), f"{_POLICY}.min_nodes")
        most = _positive_int(policy.get("max_nodes", least), f"{_POLICY}.max_nodes")
        if least > most:
            raise RecipeError(f"{_POLICY}.min_nodes is {least} but max_nodes is {most}; raise one or lower the other")
        step = policy.get("replica_increment_step")
        if step is not None and scales:
            raise RecipeError(
                f"{_POLICY}.replica_increment_step and {_SCALES} exclude each other; leave one of them out"
            )
        step = _positive_int(1 if step is None else step, f"{_POLICY}.replica_increment_step")
        sizes = tuple(
            sorted(size for size in scales if least <= size <= most) if scales else range(least, most + 1, step)
        )
        if not sizes:
            raise RecipeError(
                f"no size of {_SCALES} ({', '.join(map(str, sorted(scales)))}) is within min_nodes {least} and max_nodes {most}"
            )
        return cls(base, scales, sizes)

    def at(self, nodes: int) -> dict[str, Any]:
        """Give the recipe of a size, with its overrides merged in at every depth. Raises RecipeError for another size."""
        if nodes not in self.nodes:
            raise RecipeError(f"{nodes} nodes is no size of this recipe; it has {', '.join(map(str, self.nodes))}")
        return _merged(self.base, self.scales.get(nodes, {}))

    def batch_at(self, nodes: int, ranks_per_node: int, *, model_parallel: int = 1) -> BatchPlan:
        """Give the batch plan of a size: `train_batch_size` over all ranks, at most `micro_train_batch_size` in a pass.

        An `uneven_batch` block is checked and applied. Raises RecipeError, and BatchSizeError with sizes that work.
        """
        arguments: Mapping[str, Any] = self.at(nodes)
        for name in _ARGUMENTS:
            arguments = _mapping(arguments.get(name) or {}, ".".join(_ARGUMENTS))
        path = ".".join(_ARGUMENTS)
        global_batch = _positive_int(arguments.get("train_batch_size"), f"{path}.train_batch_size")
        micro_batch = arguments.get("micro_train_batch_size")
        return plan_batch(
            global_batch,
            nodes * ranks_per_node,
            max_micro_batch=None
            if micro_batch is None
            else _positive_int(micro_batch, f"{path}.micro_train_batch_size"),
            uneven_batch=UnevenBatch.from_config(_mapping(arguments.get("uneven_batch") or {}, f"{path}.uneven_batch")),
            model_parallel=model_parallel,
        )


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in over.items():
        was = merged.get(name)
        merged[name] = _merged(was, value) if isinstance(was, Mapping) and isinstance(value, Mapping) else value
    return merged


def _mapping(value: Any, path: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise RecipeError(f"{path} is {value!r}; it must be a block of names and values")
    return value


def _positive_int(value: Any, path: str) -> int:
    """Give ``value`` as an int of at least 1; a YAML key may be quoted. Raises RecipeError."""
    try:
        number = int(value) if isinstance(value, int | str) and not isinstance(value, bool) else 0
    except ValueError:
        number = 0
    if number < 1:
        raise RecipeError(f"{path} is {value!r}; it must be a whole number of at least 1")
    return number
