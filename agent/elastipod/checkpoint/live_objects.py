"""The live objects of a training: what a checkpoint is made of and loaded into.

A model, optimizer or schedule that is given alone has the name "" and no name in a checkpoint either; several have names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch

from elastipod.checkpoint.pipeline_stages import WHOLE_MODEL, PipelineStage
from elastipod.errors import CheckpointError
from elastipod.fsdp1 import refuse_fsdp1
from elastipod.torch_compat import names_in_checkpoints


@runtime_checkable
class Stateful(Protocol):
    """Anything that returns its state as a dictionary and loads it, as schedules, GradScaler and loaders do."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object: ...


Scheduler = Stateful
ModelOrModels: TypeAlias = "torch.nn.Module | Mapping[str, torch.nn.Module] | Sequence[torch.nn.Module]"
OptimizerOrOptimizers: TypeAlias = (
    "torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | Sequence[torch.optim.Optimizer]"
)
SchedulerOrSchedulers: TypeAlias = "Scheduler | Mapping[str, Scheduler] | Sequence[Scheduler] | None"


@dataclass(frozen=True)
class LiveObjects:
    """The objects of one save or load by name, "" for one that was given alone. Without optimizers, only weights are loaded."""

    models: Mapping[str, torch.nn.Module]
    optimizers: Mapping[str, torch.optim.Optimizer] = field(default_factory=dict)
    schedulers: Mapping[str, Scheduler] = field(default_factory=dict)
    stateful: Mapping[str, Stateful] = field(default_factory=dict)
    stage: PipelineStage = WHOLE_MODEL

    @classmethod
    def of(
        cls,
        model: ModelOrModels,
        optimizer: OptimizerOrOptimizers,
        scheduler: SchedulerOrSchedulers = None,
        stateful: Mapping[str, Stateful] | None = None,
        stage: PipelineStage = WHOLE_MODEL,
    ) -> LiveObjects:
        """Give names to what a caller passed: its own, or numbers for a sequence. stage: of a pipeline, which this rank holds.

        Raises TypeError for something of another kind, ValueError for a name that a checkpoint cannot hold, and CheckpointError for a
        parameter that two optimizers train.
        """
        found = cls.of_models(model, stage)
        optimizers = _named(optimizer, torch.optim.Optimizer, "optimizer")
        schedulers = {} if scheduler is None else _named(scheduler, Stateful, "scheduler")
        if stateful is not None and not isinstance(stateful, Mapping):
            raise TypeError(f'stateful is a {type(stateful).__name__}; give names, as in stateful={{"scaler": scaler}}')
        others = _named(stateful, Stateful, "stateful") if stateful else {}
        _check_disjoint(optimizers)
        return cls(found.models, optimizers, stage.own_names(schedulers), others, stage)

    @classmethod
    def of_models(cls, model: ModelOrModels, stage: PipelineStage = WHOLE_MODEL) -> LiveObjects:
        """Give names to models, for their weights alone. Raises as `of`, and FrameworkError for a model that FSDP1 wraps."""
        models = _named(model, torch.nn.Module, "model")
        for each in models.values():
            refuse_fsdp1(each)
        return cls(models, stage=stage)

    @property
    def is_weights_only(self) -> bool:
        return not self.optimizers

    @cached_property
    def parameter_names(self) -> Mapping[torch.nn.Parameter, str]:
        """The names of the optimizers' parameters, as in checkpoints, whatever wraps the models.

        Kept, since each look walks through all modules. Raises CheckpointError for an optimizer of other models.
        """
        own = set[torch.nn.Parameter]().union(*map(_parameters_of, self.optimizers.values()))
        named: dict[torch.nn.Parameter, str] = {}
        for model_name, model in self.models.items():
            parameters = {name: each for name, each in model.named_parameters() if each in own}
            for name, saved in names_in_checkpoints(model, parameters).items():
                named.setdefault(parameters[name], prefix_of(model_name) + saved)  # models may share parameters
        if strangers := len(own) - len(named):
            raise CheckpointError(
                f"{strangers} parameters of the optimizer are not the model's; make the optimizer from model.parameters(), after the "
                "model was sharded (fully_shard) or otherwise given new parameters"
            )
        return named


def prefix_of(name: str) -> str:
    """Return what stands before the keys of a named object; nothing for one that was given alone."""
    return f"{name}." if name else ""


def key_of(kind: str, name: str) -> str:
    """Return the key of a named object of a kind; that of the kind for one that was given alone."""
    return f"{kind}.{name}" if name else kind


def _named(given: object, kind: Any, argument: str) -> dict[str, Any]:
    if isinstance(given, kind):
        return {"": given}
    if isinstance(given, Mapping):
        objects = dict(given)
    elif isinstance(given, list | tuple):
        objects = {str(number): each for number, each in enumerate(given)}
    else:
        raise TypeError(f"{argument} is a {type(given).__name__}; {_expected(kind, argument)}")
    if not objects:
        raise TypeError(f"{argument} is empty; {_expected(kind, argument)}")
    for name, each in objects.items():
        if not isinstance(name, str) or not name or "." in name:
            raise ValueError(f"{argument} has the name {name!r}; a name is a text without dots")
        if not isinstance(each, kind):
            raise TypeError(f"{argument}[{name!r}] is a {type(each).__name__}; {_expected(kind, argument)}")
    return objects


def _expected(kind: type, argument: str) -> str:
    what = "object with state_dict and load_state_dict" if kind is Stateful else f"torch {kind.__name__}"
    return f"give one {what}, a sequence, or a mapping by name" if argument != "stateful" else f"each is one {what}"


def _parameters_of(optimizer: torch.optim.Optimizer) -> set[torch.nn.Parameter]:
    return {parameter for group in optimizer.param_groups for parameter in group["params"]}


def _check_disjoint(optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
    """A checkpoint has one state for each parameter, by the parameter's name."""
    owners: dict[torch.nn.Parameter, str] = {}
    for name, optimizer in optimizers.items():
        for parameter in _parameters_of(optimizer):
            if parameter in owners:
                raise CheckpointError(
                    f"the optimizers {owners[parameter]!r} and {name!r} have a parameter of shape {list(parameter.shape)} in common; "
                    "give each parameter to one of them"
                )
            owners[parameter] = name
