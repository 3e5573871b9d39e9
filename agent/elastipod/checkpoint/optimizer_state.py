"""The optimizer's state by parameter name.

A parameter that never had a gradient has no state yet. A checkpoint holds none for it, and a resume leaves it without.
Neither a save nor a load creates state, because a first step with such state differs from one without.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.metadata import Metadata

from elastipod.errors import CheckpointError
from elastipod.torch_compat import qualified_names

StatePath = tuple[str | int, ...]

OPTIMIZER, STATE, GROUPS, PARAMS = "optimizer", "state", "param_groups", "params"
_SHARED_OPTIONS = {"initial_lr", "param_names", PARAMS}  # added to any optimizer by schedulers and by torch


class SavedState(Protocol):
    """What is known of a saved state before its tensors are read."""

    metadata: Metadata

    def value(self, key: str) -> Any:
        """Return a plain value."""


def optimizer_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return state and options, named as torch's `get_state_dict` does, of the parameters that have state.

    Raises CheckpointError for an optimizer of another model, or with state of something that is no parameter.
    """
    named = _names(model, optimizer)
    own = optimizer.state_dict()
    numbered = [named[parameter] for group in optimizer.param_groups for parameter in group[PARAMS]]
    if strange := [key for key in own[STATE] if not isinstance(key, int)]:
        raise CheckpointError(f"the optimizer keeps state under {strange[0]!r}, which is no parameter of the model")
    return {
        STATE: {numbered[number]: dict(state) for number, state in own[STATE].items() if state},
        GROUPS: [{**group, PARAMS: [numbered[number] for number in group[PARAMS]]} for group in own[GROUPS]],
    }


def state_to_fill(
    state: Mapping[str, Any], model: torch.nn.Module, optimizer: torch.optim.Optimizer, saved: Metadata
) -> dict[str, Any]:
    """Return the optimizer's state with memory for exactly what was saved; the optimizer itself is not changed.

    state: of `optimizer_state`. May run collectives of the optimizer, so all ranks call it.
    """
    wanted = {str(path[2]) for path in _paths(saved) if path[:2] == (OPTIMIZER, STATE)}
    named = {name: parameter for parameter, name in _names(model, optimizer).items()}
    lacking = [named[name] for name in sorted(wanted - state[STATE].keys()) if name in named]
    room = initial_state(optimizer, lacking)
    kept = {name: own for name, own in state[STATE].items() if name in wanted}
    kept |= {name: room[parameter] for name, parameter in named.items() if parameter in room}
    return {STATE: kept, GROUPS: state[GROUPS]}


def describe_other_optimizer(state: Mapping[str, Any], source: SavedState) -> str | None:
    """Return a sentence if missing state means that another optimizer saved this, None if it may mean "none yet".

    state: of `optimizer_state`.
    """
    have = {str(path[2]) for path in _paths(source.metadata) if path[:2] == (OPTIMIZER, STATE)}
    groups = list(enumerate(state[GROUPS]))
    lacking = [name for _, group in groups for name in group[PARAMS] if name not in have]
    if not lacking:
        return None
    saved_options, saved_names = _saved_groups(source)
    if unknown := [name for name in lacking if name not in saved_names]:
        return f"its optimizer had no parameter {unknown[0]}"
    live_options = {option for _, group in groups for option in group}
    foreign = sorted(saved_options - live_options - _SHARED_OPTIONS)
    missing = sorted(live_options - saved_options - _SHARED_OPTIONS)
    if foreign and missing:
        return (
            f"it was saved by another kind of optimizer, with the option {foreign[0]} where this one has {missing[0]}"
        )
    return None


def apply_optimizer_state(saved: Mapping[str, Any], model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load state and options, as from `optimizer_state`. A parameter without state in them has none afterwards."""
    named = _names(model, optimizer)
    state: dict[int, Any] = {}
    groups: list[dict[str, Any]] = []
    first = 0
    for group in optimizer.param_groups:
        names = [named[parameter] for parameter in group[PARAMS]]
        options: Mapping[str, Any] = next((each for each in saved[GROUPS] if names and names[0] in each[PARAMS]), {})
        groups.append({**group, **options, PARAMS: list(range(first, first + len(names)))})
        state |= {first + at: saved[STATE][name] for at, name in enumerate(names) if name in saved[STATE]}
        first += len(names)
    optimizer.load_state_dict({STATE: state, GROUPS: groups})


def initial_state(
    optimizer: torch.optim.Optimizer, parameters: Collection[torch.nn.Parameter]
) -> dict[torch.nn.Parameter, dict[str, Any]]:
    """Return the state that a first step creates for parameters, with undefined values; the optimizer is not changed.

    For Adam, AdamW and SGD it is allocated here. Other optimizers make a step with zero gradients, as torch does for all, which
    costs several times as much as the load, also in memory.
    """
    if not parameters:
        return {}
    names = _MOMENTS.get(type(optimizer))
    if names is None:
        return _after_first_step(optimizer, parameters)
    wanted = set(parameters)
    made: dict[torch.nn.Parameter, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        for parameter in wanted.intersection(group[PARAMS]):
            kept = [name for name, is_kept in names.items() if is_kept(group)]
            if kept:
                made[parameter] = _empty_state(parameter, kept, group)
    return made


def _empty_state(parameter: torch.nn.Parameter, names: Iterable[str], group: Mapping[str, Any]) -> dict[str, Any]:
    state = {
        name: torch.empty_like(parameter, requires_grad=False, memory_format=torch.preserve_format) for name in names
    }
    if "exp_avg" in state:
        is_fused = bool(group.get("fused"))
        is_wide = torch.get_default_dtype() == torch.float64 and not is_fused
        device = parameter.device if is_fused or group.get("capturable") else None
        state["step"] = torch.zeros((), dtype=torch.float64 if is_wide else torch.float32, device=device)
    return state


def _after_first_step(
    optimizer: torch.optim.Optimizer, parameters: Collection[torch.nn.Parameter]
) -> dict[torch.nn.Parameter, dict[str, Any]]:
    """Make a step with zero gradients and learning rates, on a second optimizer that shares only the parameters."""
    every = [parameter for group in optimizer.param_groups for parameter in group[PARAMS]]
    gradients = [parameter.grad for parameter in every]
    second: torch.optim.Optimizer = object.__new__(type(optimizer))
    vars(second).update(vars(optimizer))
    vars(second).pop("step", None)  # a scheduler may have wrapped the first one's
    vars(second).update(_optimizer_step_pre_hooks=OrderedDict(), _optimizer_step_post_hooks=OrderedDict())
    second.state = defaultdict(dict)
    second.param_groups = [{**group, **_zero_learning_rate(group)} for group in optimizer.param_groups]
    try:
        for parameter in every:
            parameter.grad = None
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        second.step(closure=None)
    finally:
        for parameter, gradient in zip(every, gradients, strict=True):
            parameter.grad = gradient
    return {parameter: dict(second.state[parameter]) for parameter in parameters if second.state.get(parameter)}


def _zero_learning_rate(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with which a step leaves the weights unchanged."""
    if "lr" not in group:
        return {}
    return {"lr": torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0}


def _names(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[torch.nn.Parameter, str]:
    """Return the names of the optimizer's parameters, as in checkpoints, whatever wraps the model."""
    own = {parameter for group in optimizer.param_groups for parameter in group[PARAMS]}
    named = {
        parameter: next(iter(qualified_names(model, name)))
        for name, parameter in model.named_parameters()
        if parameter in own
    }
    if strangers := len(own) - len(named):
        raise CheckpointError(
            f"{strangers} parameters of the optimizer are not the model's; make the optimizer from model.parameters(), after the "
            "model was sharded (fully_shard) or otherwise given new parameters"
        )
    return named


def _saved_groups(source: SavedState) -> tuple[set[str], set[str]]:
    """Return the option names and parameter names of all saved groups."""
    options: set[str] = set()
    names: set[str] = set()
    for key, path in (source.metadata.planner_data or {}).items():
        if tuple(path) == (OPTIMIZER, GROUPS):  # one value, the layout of torch before 2.5
            for group in source.value(key):
                options |= set(group)
                names |= set(group[PARAMS])
        elif tuple(path[:2]) == (OPTIMIZER, GROUPS):
            options.add(str(path[3]))
            if path[3] == PARAMS:
                names |= set(source.value(key))
    return options, names


def _paths(saved: Metadata) -> list[StatePath]:
    return [tuple(path) for path in (saved.planner_data or {}).values()]


_ADAM: Mapping[str, Callable[[Mapping[str, Any]], bool]] = {
    "exp_avg": lambda group: True,
    "exp_avg_sq": lambda group: True,
    "max_exp_avg_sq": lambda group: bool(group["amsgrad"]),
}
_MOMENTS: Mapping[type, Mapping[str, Callable[[Mapping[str, Any]], bool]]] = {
    torch.optim.Adam: _ADAM,
    torch.optim.AdamW: _ADAM,
    torch.optim.SGD: {"momentum_buffer": lambda group: bool(group["momentum"])},
}
