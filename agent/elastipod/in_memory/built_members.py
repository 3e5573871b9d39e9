"""What `build` returned, checked once: mistakes that would train nothing, or fail much later with words of torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from elastipod.checkpoint.value_tree import split_tensors
from elastipod.in_memory.members import MODEL, Members, check_can_be_sent
from elastipod.in_memory.sharded_gradients import is_sharded
from elastipod.torch_compat import DistributedDataParallel, without_compile_wrapper
from elastipod.value_words import first_of

log = logging.getLogger(__name__)

MAX_TOLD = 3  # parameters by name
# What torch says when a model is wrapped or sharded before there is a process group.
_NEEDS_GROUP = ("Default process group has not been initialized", "using env:// rendezvous")


def build_bare(build: Callable[..., object]) -> object:
    """Call ``build`` where there is no process group. Raises TypeError, in place of torch's error, where it needs one."""
    try:
        return build()
    except (ValueError, RuntimeError) as error:
        if not any(text in str(error) for text in _NEEDS_GROUP):
            raise
        raise TypeError(
            "build() must not need a process group: return the bare model, and pass wrap=DistributedDataParallel or mesh= to State"
        ) from error


def check_built(members: Members, *, has_mesh: bool, applies: bool, taken: Collection[str]) -> None:
    """Raise TypeError for members that cannot be trained, ValueError for a name of State's own or a tensor that cannot be sent.

    has_mesh: they are built over a mesh. applies: the script's own function applies the gradients. taken: names of State's own.
    """
    for name, _ in members.items():
        if name != MODEL and name in taken:
            raise ValueError(f"build() returns an entry named {name!r}, which State has already; use another name")
    if not has_mesh:
        _check_bare(members.model)
    _check_tensors(members)
    _check_optimizers(members, "after fully_shard, which replaces them" if has_mesh else "from model.parameters()")
    if not applies and not _has_optimizer(members) and any(each.requires_grad for each in members.model.parameters()):
        raise TypeError(
            "build() returns no optimizer, so the model would not be trained; return one, or pass apply= to State"
        )


def warn_untrained(members: Members) -> None:
    """Name the parameters that require gradients and that no optimizer has. They may be frozen later, or changed by the script."""
    known = _optimized(members)
    if not known:
        return
    names = [name for name, each in members.model.named_parameters() if each.requires_grad and id(each) not in known]
    if names:
        log.warning(
            "no optimizer of build() trains %d parameters that require gradients: %s",
            *(len(names), first_of(names, MAX_TOLD)),
        )


def _check_bare(model: nn.Module) -> None:
    if isinstance(without_compile_wrapper(model), DistributedDataParallel):
        raise TypeError("build() must return the bare model; pass wrap=DistributedDataParallel to State")
    if is_sharded(model):
        raise TypeError("build() returns a model that fully_shard has sharded; pass mesh= to State")


def _check_tensors(members: Members) -> None:
    """Raise ValueError for a tensor of a module that cannot be sent: with one rank, training would go well until another one comes."""
    tensors: dict[str, torch.Tensor] = {}
    for name, member in members.items():
        if isinstance(member, nn.Module):
            split_tensors(member.state_dict(), name, tensors)
    check_can_be_sent(tensors)


def _check_optimizers(members: Members, how: str) -> None:
    """Raise TypeError for an optimizer of other parameters than the model's: it would train nothing."""
    own = {id(parameter) for module in members.of_type(nn.Module) for parameter in module.parameters()}
    for name, member in members.items():
        if isinstance(member, torch.optim.Optimizer) and not _parameters_of(member) <= own:
            raise TypeError(f"build() returns {name}, which has parameters that are not the model's; make it {how}")


def _optimized(members: Members) -> set[int]:
    return set[int]().union(*map(_parameters_of, members.of_type(torch.optim.Optimizer)))


def _parameters_of(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _has_optimizer(members: Members) -> bool:
    """Whether anything can train the model: also an optimizer that is none of torch's, which the script runs in the step's block."""
    others = (LRScheduler, nn.Module)
    return any(callable(getattr(each, "step", None)) and not isinstance(each, others) for _, each in members.items())
