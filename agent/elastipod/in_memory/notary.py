"""The notary: the first step after every change of the world is checked before it counts.

Compared are, over all ranks: samples of each gradient with a float64 sum of the ranks' own gradients, the samples of data that were
trained with those that the plan has, the place of the step with the steps and samples that were trained before, the random state
with the one that the step and the rank imply, and, after the step, the digests of all replicas. Later steps cost nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from elastipod.checkpoint.rng import rank_seed
from elastipod.data import Batch, ElasticBatches
from elastipod.gradients import observe_reduced_gradients
from elastipod.in_memory.exchange import all_texts
from elastipod.in_memory.members import MODEL
from elastipod.in_memory.memory_state import lost_world
from elastipod.in_memory.own_gradients import Noted, OwnGradients, on_host
from elastipod.in_memory.sharded_gradients import (
    divisor_of,
    is_sharded,
    reduced_elements,
    reduced_in,
    watch_whole_parameters,
)
from elastipod.rank_ranges import format_ranks
from elastipod.torch_compat import DistributedDataParallel, run_after_backward, without_compile_wrapper

SAMPLED_TENSORS = 4096
SAMPLES_PER_TENSOR = 4
MAX_COUNTED = 1 << 16  # samples of a global batch that are looked at one by one
OTHER_ROUNDINGS = 4  # in one reduction, beside its additions: the division, and conversions to another type and back
LEAST_TOLERANCE = 2.0**-17  # of the sizes of all passes' gradients: float32 loses no more in any order of 128 additions
COMPILED_PART = "_orig_mod."  # of the names of parameters of a compiled module
COMPRESSED = 0.05  # what a communication hook may differ by, since it may compress
COMPRESSED_STEP = 2.0**-24  # and in each rounding, as it may reduce in float16, which has no smaller numbers


@dataclass(frozen=True, slots=True)
class _Sampled:
    """Elements of one parameter."""

    name: str
    parameter: nn.Parameter
    elements: torch.Tensor


@dataclass(frozen=True, slots=True)
class Trained:
    """What this rank's state has come to. step: that it holds. samples: of the job up to it; None on a rank that has not trained it."""

    step: int
    samples: int | None = None


class Notary:
    """Watches one step on one rank. Begun before the passes of the step; `problems` is asked before its gradients are applied."""

    def __init__(self, model: nn.Module, wrapped: nn.Module, *, seed: int) -> None:
        """model: without its wrapper. seed: the same on all ranks; it chooses the elements."""
        wrapped = without_compile_wrapper(wrapped)
        self._ddp = wrapped if isinstance(wrapped, DistributedDataParallel) else None
        self._sampled = _sample(model, seed)
        self._stop_watching: Callable[[], object] = lambda: None
        self._reduced: torch.Tensor | None = None
        self.samples: int | None = None  # of the job before this step, as a rank knows that has trained up to it
        self._divisor = 0.0
        self._is_queued = False
        self._random = _digest(torch.get_rng_state())
        self._sharded = model if is_sharded(model) else None
        self._unseen = set(range(len(self._sampled))) if self._sharded is not None else set()
        self._unreduced: set[int] = set()  # parameters with a pass since FSDP2 last reduced their gradient
        reduced = {} if self._sharded is None else reduced_in(model)
        self._own = OwnGradients(
            [Noted(len(each.elements), each.parameter.dtype, reduced.get(each.name)) for each in self._sampled]
        )
        # By parameter: its elements, and whether nothing is left of the passes before.
        self._held: dict[int, tuple[torch.Tensor, bool]] = {}
        self._watch_own(model)
        self._stop_observing = observe_reduced_gradients(self._announced)

    def close(self) -> None:
        """Take the hooks away."""
        self._stop_watching()
        self._stop_observing()

    def _watch_own(self, model: nn.Module) -> None:
        if self._sharded is not None:
            places = {each.name: at for at, each in enumerate(self._sampled)}

            def watch(name: str, parameter: nn.Parameter) -> list[Any]:
                at = places.get(name)
                return [] if at is None else self._watch(at, parameter)

            self._stop_watching = watch_whole_parameters(model, watch)
            return
        handles = [handle for at, each in enumerate(self._sampled) for handle in self._watch(at, each.parameter)]
        self._stop_watching = lambda: [handle.remove() for handle in handles]

    def _watch(self, at: int, parameter: nn.Parameter) -> list[Any]:
        return [
            parameter.register_hook(partial(self._hold, at)),  # type: ignore[no-untyped-call]
            parameter.register_post_accumulate_grad_hook(partial(self._note_held, at)),  # type: ignore[no-untyped-call]
        ]

    def problems(self, batch: Batch, plan: ElasticBatches, random_step: int, trained: Trained) -> list[str]:
        """Give what is wrong, the same on every rank; nothing when all is well. Collective. Raises WorldLost.

        random_step: the step that random states are derived from. trained: before this step, by this rank. Sets `samples`.
        """
        with lost_world("the first step after the change could not be checked"):
            facts = {
                "step": batch.step,
                "after": trained.step,
                "samples": trained.samples,
                "count": len(batch.indices),
                "sum": _sum(batch.indices) if batch.global_size <= MAX_COUNTED else 0,
                "random": self._random,
                "reduced": self._reduced is not None,
                "wrong": self._wrong_gradient(),
            }
            told = [json.loads(text) for text in all_texts(json.dumps(facts))]
        self.samples = next((each["samples"] for each in told if each["samples"] is not None), None)
        found = [*_wrong_data(told, batch, plan), *_wrong_place(told, batch), *_wrong_random(told, random_step)]
        reduced = [bool(each["reduced"]) for each in told]
        if not all(reduced):  # a script that reduces by itself and does not announce it, unless only some ranks do
            return [*found, *(["gradients were reduced on some ranks only"] if any(reduced) else [])]
        wrong = [str(each["wrong"]) for each in told]
        for sentence in sorted({each for each in wrong if each}):
            found.append(f"{sentence} on {format_ranks([rank for rank, each in enumerate(wrong) if each == sentence])}")
        if any(wrong) and self._ddp is not None:
            found[-1] += "; use state.model inside the block"
        return found

    def _wrong_gradient(self) -> str:
        """Name the first parameter whose reduced gradient is not that of all ranks; empty if there is none. Collective.

        Empty on a rank that does not know when its gradients were reduced.
        """
        # What a rank has not seen, such as in a module that runs without its hooks, is no number in the sum, so that it is compared on
        # none: the others' gradients alone do not tell what was reduced.
        told = self._own.told(self._unseen)
        if dist.is_initialized() and told.numel():
            dist.all_reduce(told)
        if self._reduced is None:
            return ""
        expected, size, rounding = told / self._divisor
        compresses = self._ddp is not None and bool(getattr(self._ddp, "_comm_hooks", None))
        allowed = (COMPRESSED if compresses else LEAST_TOLERANCE) * size + rounding
        if compresses:
            allowed += COMPRESSED_STEP * (dist.get_world_size() + OTHER_ROUNDINGS)
        is_wrong = ((self._reduced - expected).abs() > allowed) & self._reduced.isfinite()
        if not bool(is_wrong.any()):
            return ""
        first = int(is_wrong.nonzero()[0]) // SAMPLES_PER_TENSOR
        name = f"{MODEL}.{self._sampled[first].name.replace(COMPILED_PART, '')}"
        return f"the reduced gradient of {name} is not the mean over all ranks' samples"

    def _hold(self, at: int, gradient: torch.Tensor | None) -> None:
        """Hold what autograd has computed until it is accumulated: with `autograd.grad`, which calls this too, it never is."""
        self._held.pop(at, None)
        if gradient is None or gradient.is_sparse:  # None: a function has given this parameter no gradient
            return
        elements = gradient.detach().take(self._sampled[at].elements)
        self._held[at] = elements, self._own.has_passes(at) and self._is_dropped(at)

    def _note_held(self, at: int, _: torch.Tensor) -> None:
        held = self._held.pop(at, None)
        if held is None:
            return
        elements, drops = held
        self._unseen.discard(at)
        if drops:
            self._own.drop(at)
        self._own.add(at, elements)
        self._unreduced.add(at)
        if (self._ddp is not None or self._sharded is not None) and not self._is_queued:
            self._is_queued = True
            # DDP and FSDP2 end their reduction in a callback of their own, which is queued in this backward pass; one queued from
            # a callback runs after it.
            run_after_backward(lambda: run_after_backward(self._reduced_by_torch))

    def _is_dropped(self, at: int) -> bool:
        """Whether nothing is left of the gradients of the passes before the one that is under way."""
        sampled = self._sampled[at]
        gradient = sampled.parameter.grad
        if self._sharded is not None:
            # FSDP2 keeps what it has not reduced yet elsewhere, and clearing the shards' gradients does not clear that. A shard of zeros
            # tells nothing: the shards of other ranks may have other numbers, and all ranks have to drop the same passes.
            return gradient is None and at not in self._unreduced
        # Where the elements are zero, nothing of them goes into the reduction, whatever the rest of the gradient is.
        return gradient is None or not (gradient.is_sparse or bool(gradient.detach().take(sampled.elements).any()))

    def _reduced_by_torch(self) -> None:
        self._is_queued = False
        self._unreduced = {at for at in self._unreduced if self._sampled[at].parameter.grad is None}
        world_size = dist.get_world_size()
        numbers = range(len(self._sampled))
        is_reduced = [
            at not in self._unreduced if self._ddp is None else self._ddp.require_backward_grad_sync for at in numbers
        ]
        self._own.reduced(world_size + OTHER_ROUNDINGS, is_reduced)
        divisor = float(world_size) if self._sharded is None else divisor_of(self._sharded, world_size)
        if divisor is not None:
            self._read(divisor)

    def _announced(self, divisor: float) -> None:
        self._ddp = None  # a script that announces reduces by itself; DDP has only passed gradients through
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        self._own.announced(world_size + OTHER_ROUNDINGS)
        self._read(divisor)

    def _read(self, divisor: float) -> None:
        self._divisor = divisor
        read = _elements_of if self._sharded is None else reduced_elements
        self._reduced = on_host([read(each.parameter, each.elements) for each in self._sampled])


def _sample(model: nn.Module, seed: int) -> list[_Sampled]:
    generator = torch.Generator().manual_seed(seed)
    named = [(name, each) for name, each in model.named_parameters() if each.requires_grad and each.numel()]
    stride = -(-len(named) // SAMPLED_TENSORS) or 1
    return [
        _Sampled(
            name,
            each,
            torch.randint(each.numel(), (SAMPLES_PER_TENSOR,), generator=generator, device="cpu").to(each.device),
        )
        for name, each in named[::stride]
    ]


def _elements_of(parameter: nn.Parameter, elements: torch.Tensor) -> torch.Tensor:
    """Give elements of the gradient; zeros where there is none, and nan for a sparse one, which is not compared."""
    gradient = parameter.grad
    if gradient is None or gradient.is_sparse:
        missing = 0.0 if gradient is None else torch.nan
        return torch.full((len(elements),), missing, dtype=parameter.dtype, device=parameter.device)
    return gradient.detach().take(elements)


def _wrong_data(told: list[dict[str, Any]], batch: Batch, plan: ElasticBatches) -> list[str]:
    steps = [each["step"] for each in told]
    if len(set(steps)) > 1:
        return [f"the ranks are at different steps: {steps}"]
    whole = plan.batch(batch.step, 0, 1).indices
    is_same = sum(each["count"] for each in told) == len(whole)
    if is_same and batch.global_size <= MAX_COUNTED:
        is_same = sum(each["sum"] for each in told) % _MODULUS == _sum(whole)
    return [] if is_same else [f"the ranks' samples together are not the batch of step {batch.step}"]


def _wrong_place(told: list[dict[str, Any]], batch: Batch) -> list[str]:
    """Compare the place of the step in the job with what the ranks remember: the plan would not tell a batch that all of them skip."""
    if len({each["step"] for each in told}) > 1:
        return []
    states = {int(each["after"]) for each in told}
    if states != {batch.step - 1}:
        return [f"step {batch.step} is trained with the state after step {', '.join(map(str, sorted(states)))}"]
    before = batch.samples_seen - batch.global_size
    known = {int(each["samples"]) for each in told if each["samples"] is not None}
    if known <= {before}:
        return []
    return [f"step {batch.step} begins after {before} samples, and {', '.join(map(str, sorted(known)))} were trained"]


def _wrong_random(told: list[dict[str, Any]], random_step: int) -> list[str]:
    wrong = [
        rank
        for rank, each in enumerate(told)
        if each["random"] != _digest(torch.Generator().manual_seed(rank_seed(random_step, rank)).get_state())
    ]
    return [f"the random state is not that of its step on {format_ranks(wrong)}"] if wrong else []


_MODULUS = 1 << 61


def _sum(indices: Sequence[int]) -> int:
    """Give a number that does not depend on the order of the samples, and differs when one is another."""
    return sum((index + 1) * 0x9E3779B97F4A7C15 ^ (index * index) for index in indices) % _MODULUS


def _digest(state: torch.Tensor) -> str:
    return hashlib.sha256(bytes(state.tolist())).hexdigest()
