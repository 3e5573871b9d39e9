"""The state of optimizers by parameter name, whichever of them trains the parameter.

Several optimizers are written as torch's `get_state_dict` writes them: one state for all parameters, and the groups of all
optimizers one after the other. So a checkpoint has no names of optimizers, and they may be divided in another way when it is loaded.
A parameter that never had a gradient has no state yet. A checkpoint holds none for it, and a resume leaves it without.
Neither a save nor a load creates state, because a first step with such state differs from one without.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from elastipod.checkpoint.live_objects import LiveObjects
from elastipod.errors import CheckpointError
from elastipod.torch_compat import load_optimizer

StatePath = tuple[str | int, ...]

OPTIMIZER, STATE, GROUPS, PARAMS = "optimizer", "state", "param_groups", "params"
_SHARED_OPTIONS = {"initial_lr", "param_names", PARAMS}  # added to any optimizer by schedulers and by torch


class SavedState(Protocol):
    """What is known of a saved state before its tensors are read."""

    metadata: Metadata

    def value(self, key: str) -> Any:
        """Return a plain value."""


def optimizer_state(live: LiveObjects) -> dict[str, Any]:
    """Return state and options, named as torch's `get_state_dict` does, of the parameters that have state.

    Raises CheckpointError for an optimizer of other models, or with state of something that is no parameter.
    """
    named = live.parameter_names
    states: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for optimizer in live.optimizers.values():
        own = optimizer.state_dict()
        numbered = [named[parameter] for group in optimizer.param_groups for parameter in group[PARAMS]]
        if strange := [key for key in own[STATE] if not isinstance(key, int)]:
            raise CheckpointError(f"the optimizer keeps state under {strange[0]!r}, which is no parameter of the model")
        states |= {numbered[number]: dict(state) for number, state in own[STATE].items() if state}
        groups += [{**group, PARAMS: [numbered[number] for number in group[PARAMS]]} for group in own[GROUPS]]
    return {STATE: states, GROUPS: groups}


def runs_no_collective(optimizers: Iterable[torch.optim.Optimizer]) -> bool:
    """Return whether `state_to_fill` surely runs on one rank alone: torch's own optimizers, except those that are distributed."""
    return all(type(each).__module__.startswith("torch.optim.") for each in optimizers)


def refuse_needed_closure(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Raise CheckpointError for an optimizer whose state no resume could create, because its step needs a closure (LBFGS)."""
    for optimizer in optimizers:
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise CheckpointError(
                f"the optimizer is a {type(optimizer).__name__}, whose step needs a closure, so no resume could create its state; use "
                "another optimizer, or keep the weights yourself"
            )


def state_to_fill(
    state: Mapping[str, Any], live: LiveObjects, saved: Metadata, *, strict: bool = True
) -> dict[str, Any]:
    """Return memory for exactly the state and the tensors of options that were saved; the optimizers are not changed.

    state: of `optimizer_state`. strict: if not, a parameter whose saved state is of another kind gets none. May run collectives of
    the optimizers, so all ranks call it.
    """
    wanted: dict[str, set[str]] = {}
    for path in _paths(saved):
        if path[:2] == (OPTIMIZER, STATE):
            wanted.setdefault(str(path[2]), set()).add(str(path[3]))
    names = live.parameter_names
    kept = {name: own for name, own in state[STATE].items() if name in wanted}
    for optimizer in live.optimizers.values():
        own = {parameter: names[parameter] for group in optimizer.param_groups for parameter in group[PARAMS]}
        lacking = [parameter for parameter, name in own.items() if name in wanted and name not in kept]
        room = initial_state(optimizer, lacking)
        kept |= {own[parameter]: made for parameter, made in room.items()}
    if not strict:
        kept = {name: own for name, own in kept.items() if {*map(str, own)} == wanted[name]}
    options: dict[str, dict[str, torch.Tensor]] = {}
    for key, path in (saved.planner_data or {}).items():
        entry = saved.state_dict_metadata[key]
        if tuple(path[:2]) == (OPTIMIZER, GROUPS) and isinstance(entry, TensorStorageMetadata):
            room_of = torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
            options.setdefault(str(path[2]), {})[str(path[3])] = room_of
    return {STATE: kept, GROUPS: options} if options else {STATE: kept}


def describe_other_optimizer(live: LiveObjects, source: SavedState) -> str | None:
    """Return a sentence if missing state means that another optimizer saved this, None if it may mean "none yet"."""
    have = {str(path[2]) for path in _paths(source.metadata) if path[:2] == (OPTIMIZER, STATE)}
    saved = saved_groups(source)
    group_of = {name: group for group in saved for name in group[PARAMS]}
    for group in optimizer_state(live)[GROUPS]:
        for name in group[PARAMS]:
            if name in have:
                continue
            if name not in group_of:
                return f"its optimizer had no parameter {name}"
            foreign = sorted(group_of[name].keys() - group.keys() - _SHARED_OPTIONS)
            missing = sorted(group.keys() - group_of[name].keys() - _SHARED_OPTIONS)
            if foreign and missing:
                return f"it was saved by another kind of optimizer, with the option {foreign[0]} where this one has {missing[0]}"
    return None


def saved_groups(source: SavedState, filled: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """Return the saved groups, of all optimizers. filled: state of `state_to_fill`; without it, options that are tensors are None."""
    groups: dict[str, dict[str, Any]] = {}
    tensors: Mapping[str, Any] = (filled or {}).get(GROUPS, {})
    for key, path in (source.metadata.planner_data or {}).items():
        if tuple(path) == (OPTIMIZER, GROUPS):  # one value, the layout of torch before 2.5
            return list(source.value(key))
        if tuple(path[:2]) == (OPTIMIZER, GROUPS):
            number, option = str(path[2]), str(path[3])
            is_tensor = isinstance(source.metadata.state_dict_metadata[key], TensorStorageMetadata)
            value = tensors.get(number, {}).get(option) if is_tensor else source.value(key)
            groups.setdefault(number, {})[option] = value
    return list(groups.values())


def load_optimizers(state: Mapping[str, Any], groups: Collection[Mapping[str, Any]], live: LiveObjects) -> None:
    """Load the state of `state_to_fill` and the groups of `saved_groups`. A parameter without state has none afterwards."""
    named = live.parameter_names
    options_of = {name: group for group in groups for name in group[PARAMS]}
    for optimizer in live.optimizers.values():
        numbered: dict[int, Any] = {}
        own_groups: list[dict[str, Any]] = []
        first = 0
        for group in optimizer.param_groups:
            names = [named[parameter] for parameter in group[PARAMS]]
            options: Mapping[str, Any] = next((options_of[name] for name in names if name in options_of), {})
            own_groups.append({**group, **options, PARAMS: list(range(first, first + len(names)))})
            numbered |= {first + at: state[STATE][name] for at, name in enumerate(names) if name in state[STATE]}
            first += len(names)
        load_optimizer(optimizer, {STATE: numbered, GROUPS: own_groups})


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
    refuse_needed_closure([optimizer])
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
if hasattr(torch.optim, "Muon"):  # torch 2.9
    _MOMENTS = {**_MOMENTS, torch.optim.Muon: {"momentum_buffer": lambda group: True}}
