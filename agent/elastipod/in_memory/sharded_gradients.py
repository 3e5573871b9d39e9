"""The gradients of a model that `fully_shard` has divided: each rank's own before they are reduced, and its shard of the reduced ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from elastipod.in_memory.parts import part_of, shape_of
from elastipod.torch_compat import DTensor, FSDPModule, gradient_divide_factor, gradient_reduce_dtype


def is_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard` has divided any of the model."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def watch_whole_parameters(model: nn.Module, watch: Callable[[str, nn.Parameter], Iterable[Any]]) -> Callable[[], None]:
    """Call ``watch`` once with each parameter that is used, whole, and its name; give a function that removes the hooks it returned.

    FSDP2 puts whole parameters in the place of its shards while a module runs that it has divided, so they are found as that begins. The
    gradients of their hooks are this rank's own. The modules inside have no hooks: they may have been compiled without, and the code
    for them would not run new ones. Parameters of a divided module whose forward hooks do not run are not seen.
    """
    seen: dict[int, nn.Parameter] = {}  # held, so that no other parameter gets the same id
    handles: list[Any] = []

    def see(inside: list[tuple[str, nn.Module]]) -> None:
        for prefix, module in inside:
            for name, parameter in module.named_parameters(recurse=False):
                is_whole = parameter.requires_grad and not isinstance(parameter, DTensor)
                if is_whole and id(parameter) not in seen:
                    seen[id(parameter)] = parameter
                    handles.extend(watch(f"{prefix}{name}", parameter))

    inside = _inside_divided(model)
    see(inside.pop(None, []))
    for module, places in inside.items():
        assert module is not None
        begins = torch.compiler.disable(lambda *_, places=places: see(places))  # type: ignore[no-untyped-call]
        handles.append(module.register_forward_pre_hook(begins))

    def end() -> None:
        for handle in handles:
            handle.remove()
        seen.clear()

    return end


def _inside_divided(model: nn.Module) -> dict[nn.Module | None, list[tuple[str, nn.Module]]]:
    """Give all modules, with what the names of their parameters begin with, by the one that was divided with their parameters.

    None for those outside of all that were divided.
    """
    owners: dict[str, nn.Module | None] = {}
    found: dict[nn.Module | None, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():  # outer ones first
        outer = owners[name.rpartition(".")[0]] if name else None
        is_divided = isinstance(module, FSDPModule)
        owner = owners[name] = module if is_divided else outer
        found.setdefault(owner, []).append((f"{name}." if name else "", module))
    return found


def reduced_elements(parameter: nn.Parameter, elements: torch.Tensor) -> torch.Tensor:
    """Give elements of the whole gradient, float64 on the host: those in this rank's shard, nan for the others.

    All of them are nan for a parameter that the mesh has whole on each rank: who reduces its gradient, and how, is not known here.

    elements: their places in the flattened tensor.
    """
    found = torch.full((len(elements),), torch.nan, dtype=torch.float64, device="cpu")
    whole = parameter.detach()
    if not isinstance(whole, DTensor):
        return found if parameter.grad is None else parameter.grad.detach().flatten()[elements].double().cpu()
    shape, mesh = shape_of("", whole), whole.device_mesh
    if shape.dim is None:
        return found
    start, stop = shape.rows(part_of(mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)))
    places = list(torch.unravel_index(elements.cpu(), whole.shape))
    is_own = (places[shape.dim] >= start) & (places[shape.dim] < stop)
    if not bool(is_own.any()):
        return found
    gradient: Any = parameter.grad
    places[shape.dim] = places[shape.dim] - start
    own = tuple(place[is_own] for place in places)
    found[is_own] = 0.0 if gradient is None else gradient.detach().to_local()[own].double().cpu()
    return found


def reduced_in(model: nn.Module) -> dict[str, torch.dtype | None]:
    """Give the type that each parameter's gradient is added up and reduced in, by name; None for that of the gradient itself."""
    found: dict[str, torch.dtype | None] = {}
    for prefix, module in model.named_modules():  # outer ones first, so the innermost that is sharded has the last word
        inside = module.named_parameters(prefix)
        if isinstance(module, FSDPModule):
            dtype = gradient_reduce_dtype(module)
            found.update((name, dtype) for name, _ in inside)
    return found


def divisor_of(model: nn.Module, world_size: int) -> float | None:
    """Give what the sum of the ranks' gradients is divided by; None where that is not the same for all of the model."""
    factors = {gradient_divide_factor(module) for module in model.modules() if isinstance(module, FSDPModule)}
    if len(factors) != 1:
        return None
    return factors.pop() or float(world_size)
