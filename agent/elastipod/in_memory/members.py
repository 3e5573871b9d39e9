"""The members of a training state: what the script built, by name, as tensors and plain values."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from elastipod.checkpoint.live_objects import Stateful
from elastipod.checkpoint.value_codec import decode_value, encode_value
from elastipod.checkpoint.value_tree import join_tensors, split_tensors
from elastipod.in_memory.tensor_digests import digests_of_tensors
from elastipod.torch_compat import DTensor, forget_gradients, load_optimizer
from elastipod.value_words import kind_of

MODEL = "model"
_TRAINED = "(trained)"  # in the plain values: which parameters require gradients, a digit for each, by module
_LATER = object()
_STATE_KEYS = {"state", "param_groups"}  # of torch's optimizers; those around others may have states of their own kind
NOT_BUILT = "with mesh=, state.model and the other entries exist only inside the loop over state.steps()"


@runtime_checkable
class FollowsWorld(Protocol):
    """A member that reads data, such as a loader: it is told its place in each world, and its state is a position of all ranks.

    `State` calls `set_world` in each generation, once the member has the state of the step that the generation begins at. The state
    says the same on every rank after every step. `load_state_dict` may come at any time, and the next data follows from it. If it has
    `close()`, that is called when sharded state lets its members go, because the next generation builds others.
    """

    def set_world(self, rank: int, world_size: int) -> object: ...


@dataclass(frozen=True, slots=True)
class TensorShape:
    """What is known of a tensor of the state without its content."""

    key: str
    dtype: str
    sizes: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype.itemsize * torch.Size(self.sizes).numel()


@dataclass(frozen=True, slots=True)
class Content:
    """The state of all members at one moment. tensors: live ones, not copies, by key. values: all the rest, as JSON text.

    held: members of the rank that loads it which have this state already.
    """

    tensors: Mapping[str, torch.Tensor]
    values: str
    held: frozenset[str] = frozenset()

    def shapes(self) -> list[TensorShape]:
        return [TensorShape(key, _name(each.dtype), tuple(each.shape)) for key, each in self.tensors.items()]

    def copied(self, progress: Callable[[], None] = lambda: None) -> Content:
        """Give a copy in host memory, which later steps do not change. progress: is called after each tensor.

        An accelerator seldom has room for a state twice beside the first step of the new world.
        """
        copies: dict[str, torch.Tensor] = {}
        for key, tensor in self.tensors.items():
            copies[key] = tensor.to("cpu", copy=True)
            progress()
        return Content(copies, self.values)


class Members:
    """What `build` gave. model: without any wrapper. Names are kept in the order of `build`."""

    def __init__(self, built: object = _LATER) -> None:
        """Take what was built, or nothing yet. Raises TypeError, with what is expected, for something that is no state."""
        self._by_name: dict[str, Any] = {}
        self._not_optimized: list[nn.Parameter] = []  # parameters that no optimizer has, as they were found last
        self._when_built: list[Callable[[], None]] = []
        if built is not _LATER:
            self.take(built)

    def take(self, built: object) -> None:
        """Take over what `build` gave, in place of what there was. Raises TypeError as the constructor does."""
        by_name = _by_name(built)
        if not isinstance(by_name.get(MODEL), nn.Module):
            raise TypeError('build() returns no nn.Module under the name "model"')
        for name, member in by_name.items():
            if not isinstance(member, Stateful):
                raise TypeError(
                    f"build() returns {name}, which is {kind_of(member)}; each entry needs state_dict and load_state_dict"
                )
        self._by_name, self._not_optimized = by_name, []
        for action in self._when_built:
            action()

    def when_built(self, action: Callable[[], None]) -> None:
        """Call ``action`` whenever there are new members, and now if there are any."""
        self._when_built.append(action)
        if self:
            action()

    def clear(self) -> None:
        """Let all members go, until others are built. Those that read data are closed, if they can be.

        The garbage collector would end a loader's queues before it tells its worker processes to end, and then wait 5 s for each.
        """
        for member in self._by_name.values():
            close = getattr(member, "close", None) if isinstance(member, FollowsWorld) else None
            if close is not None:
                close()
        self._by_name, self._not_optimized = {}, []

    def __bool__(self) -> bool:
        return bool(self._by_name)

    @property
    def model(self) -> nn.Module:
        """The model. Raises AttributeError while none is built."""
        if not self:
            raise AttributeError(NOT_BUILT)
        model: nn.Module = self._by_name[MODEL]
        return model

    def __getitem__(self, name: str) -> Any:
        return self._by_name[name]

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def items(self) -> Iterator[tuple[str, Stateful]]:
        """Give names and members."""
        yield from self._by_name.items()

    def of_type(self, kind: type) -> list[Any]:
        """Give the members of a type, in the order of `build`."""
        return [member for member in self._by_name.values() if isinstance(member, kind)]

    @property
    def num_bytes(self) -> int:
        """The size of all parameters. An optimizer may keep a multiple of it, a new one keeps nothing yet."""
        return sum(each.nbytes for module in self.of_type(nn.Module) for each in module.parameters())

    def content(self) -> Content:
        """Give the present state. Raises ValueError for a value or a tensor that cannot be sent to another rank."""
        tensors: dict[str, torch.Tensor] = {}
        values = {name: split_tensors(member.state_dict(), name, tensors) for name, member in self._by_name.items()}
        check_can_be_sent(tensors)
        values[_TRAINED] = {
            name: "".join(str(int(each.requires_grad)) for each in member.parameters())
            for name, member in self._by_name.items()
            if isinstance(member, nn.Module)
        }
        return Content(tensors, encode_value(values, "state"))

    def load(self, content: Content) -> None:
        """Take over a state. Tensors that are the members' own already, filled in place, are not copied again."""
        values = decode_value(content.values)
        trained = values.pop(_TRAINED, {})
        if values.keys() != self._by_name.keys():
            raise ValueError(f"the state has members {sorted(values)}, and this script builds {sorted(self._by_name)}")
        with torch.no_grad():
            for name, member in self._by_name.items():
                if name in content.held:
                    continue
                state = join_tensors(values[name], content.tensors)
                if isinstance(member, torch.optim.Optimizer) and state.keys() >= _STATE_KEYS:
                    load_optimizer(member, state)
                else:
                    member.load_state_dict(state)
        self._train_only(trained)

    def _train_only(self, trained: Mapping[str, str]) -> None:
        """Let those parameters require gradients that did where the state comes from: a script may unfreeze some in the course of it."""
        for name, digits in trained.items():
            parameters = list(self._by_name[name].parameters())
            if len(parameters) != len(digits):
                raise ValueError(
                    f"{name} has {len(parameters)} parameters in this script, and {len(digits)} in the state"
                )
            for parameter, digit in zip(parameters, digits, strict=True):
                if parameter.requires_grad != (digit == "1"):
                    parameter.requires_grad_(digit == "1")

    def zero_grad(self, *, walks_modules: bool = True) -> None:
        """Drop all gradients, and what a GradScaler knows of them: an interrupted step must leave nothing to the next one.

        walks_modules: look for parameters that no optimizer has, which takes milliseconds for a thousand modules. Without it, those
        that were found last are taken.
        """
        optimized = [
            parameter
            for optimizer in self.of_type(torch.optim.Optimizer)
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]
        if walks_modules:
            known = set(map(id, optimized))
            every = (each for module in self.of_type(nn.Module) for each in module.parameters())
            self._not_optimized = [each for each in every if id(each) not in known]
        for parameter in (*optimized, *self._not_optimized):
            parameter.grad = None
        for scaler in self.of_type(torch.amp.GradScaler):
            forget_gradients(scaler)

    def sharded_keys(self) -> frozenset[str]:
        """Give those keys of `digests` that are of tensors of which this rank holds a part."""
        _, tensors = self._in_common()
        return frozenset(
            key
            for key, tensor in tensors.items()
            if isinstance(tensor, DTensor) and not all(each.is_replicate() for each in tensor.placements)
        )

    def uncompared(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Give those of these members' tensors that `digests` leaves out. tensors: by their keys in `content`."""
        of_modules: dict[str, torch.Tensor] = {}
        parameters = set()
        for name, member in self._by_name.items():
            if isinstance(member, nn.Module):
                split_tensors(member.state_dict(), name, of_modules)
                parameters |= {_memory_of(each) for each in member.parameters()}
        # By their memory: a wrapper's part of a parameter's name may be missing in the state, as with torch's checkpoint_wrapper.
        compared = {key for key, each in of_modules.items() if _memory_of(each) in parameters}
        prefixes = tuple(
            f"{name}."
            for name, member in self._by_name.items()
            if _is_replicated(member) and not isinstance(member, nn.Module)
        )
        return {key: each for key, each in tensors.items() if key not in compared and not key.startswith(prefixes)}

    def own_keys(self, keys: Iterable[str]) -> frozenset[str]:
        """Give those keys that are of members whose state may be their rank's own (`own_digests`)."""
        prefixes = tuple(f"{name}." for name, member in self._by_name.items() if not _is_replicated(member))
        return frozenset(key for key in keys if key.startswith(prefixes))

    def digests(
        self, known: Mapping[str, str] | None = None, progress: Callable[[], None] = lambda: None
    ) -> dict[str, str]:
        """Give a checksum of every tensor and of all values that replicas have in common, by key.

        known: of tensors that need not be read again. progress: called after each tensor.
        Buffers are left out: DDP lets them differ between replicas. So are members of other kinds than those of torch that do not
        follow the world, since their state may be its rank's own (`own_digests`).
        """
        found, tensors = self._in_common()
        return found | digests_by_key(tensors, known or {}, progress)

    def _in_common(self) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
        """Give what `digests` covers: the digests of plain values by member, and tensors, parameters under the names of their module."""
        shared: dict[str, Stateful] = {name: member for name, member in self._by_name.items() if _is_replicated(member)}
        tensors: dict[str, torch.Tensor] = {}
        found = {
            name: _digest_of_values(encode_value(split_tensors(member.state_dict(), name, tensors), name))
            for name, member in shared.items()
            if not isinstance(member, nn.Module)
        }
        for name, member in shared.items():
            if isinstance(member, nn.Module):
                tensors |= {f"{name}.{key}": value.detach() for key, value in member.named_parameters()}
        return found, tensors

    def own_digests(self) -> dict[str, str]:
        """Give a checksum of the plain values of each member whose state may be its rank's own, by name.

        It is empty for values that cannot be sent to another rank; `content` names them.
        """
        return {name: digest for name, (digest, _) in self.own_versions().items()}

    def own_versions(self) -> dict[str, tuple[str, list[int]]]:
        """Give, for each member whose state may be its rank's own, a checksum of its plain values and the versions of its tensors.

        A version changes with each operation that is in place, and no tensor is read for it. The checksum is as for `own_digests`.
        """
        found: dict[str, tuple[str, list[int]]] = {}
        for name, member in self._by_name.items():
            if not _is_replicated(member):
                tensors: dict[str, torch.Tensor] = {}
                digest = ""
                with suppress(ValueError):
                    digest = _digest_of_values(encode_value(split_tensors(member.state_dict(), name, tensors), name))
                found[name] = digest, [tensor._version for tensor in tensors.values()]
        return found


def check_can_be_sent(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError, which names the first of them, for tensors that are no plain memory, so no rank can fill another one's."""
    for key, tensor in tensors.items():
        kind = _kind_without_plain_memory(tensor)
        if kind:
            raise ValueError(
                f"{key} is {kind}, which ranks cannot send to each other; make it a dense tensor with memory of its own, or leave it "
                "out of the state, for a buffer with persistent=False"
            )


def _kind_without_plain_memory(tensor: torch.Tensor) -> str:
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout is not torch.strided:
        return "a sparse tensor"
    if tensor.is_quantized:
        return "a quantized tensor"
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        return "an expanded tensor, whose elements share memory"
    return ""


def held_members(own: str, told: str, lacking: Iterable[str]) -> frozenset[str]:
    """Give the members whose plain values are those that another rank told, and of whose tensors none is lacking.

    own, told: values of `Content`. lacking: keys of tensors. Raises ValueError for what is no JSON object.
    """
    values, others = (_texts_of_values(text) for text in (own, told))
    incomplete = tuple(lacking)
    return frozenset(
        name
        for name, text in others.items()
        if name != _TRAINED
        and values.get(name) == text
        and not any(key == name or key.startswith(f"{name}.") for key in incomplete)
    )


def _texts_of_values(text: str) -> dict[str, str]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("the values of a state are not by member")
    return {name: json.dumps(value) for name, value in found.items()}


def digest_of(digests: Mapping[str, str]) -> str:
    """Give one digest of many."""
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def digests_by_key(
    tensors: Mapping[str, torch.Tensor],
    known: Mapping[str, str] = MappingProxyType({}),
    progress: Callable[[], None] = lambda: None,
) -> dict[str, str]:
    """Give the digest of each tensor, in the order of the tensors; those on one device are computed together.

    progress: called after each tensor.
    """
    unknown: dict[torch.device, list[str]] = {}
    for key, tensor in tensors.items():
        if key not in known:
            unknown.setdefault(tensor.device, []).append(key)
    computed: dict[str, str] = {}
    for keys in unknown.values():
        computed.update(zip(keys, digests_of_tensors([_local(tensors[key]) for key in keys], progress), strict=True))
    return {key: computed[key] if key in computed else known[key] for key in tensors}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _memory_of(tensor: torch.Tensor) -> tuple[torch.device, int]:
    local = _local(tensor.detach())
    return local.device, local.data_ptr()


@lru_cache(maxsize=8)  # most values are those of the time before
def _digest_of_values(text: str) -> str:
    """Give a digest that does not depend on the order of keys, which differs between a state that was loaded and one that was not."""
    values = json.loads(text, object_hook=_with_sorted_pairs)
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _with_sorted_pairs(value: dict[str, Any]) -> dict[str, Any]:
    """Sort the pairs of a dictionary whose keys are not all texts, as the texts of the keys, of which optimizers have thousands."""
    if "__pairs__" in value:
        value["__pairs__"].sort(key=_text_of_key)
    return value


def _text_of_key(pair: list[Any]) -> str:
    """Give what is first in the text of a pair."""
    key = pair[0]
    return f"{key}," if type(key) is int else f"{json.dumps(key)},"


def empty_like_shape(shape: TensorShape, device: torch.device) -> torch.Tensor:
    """Give memory for a tensor of the state."""
    return torch.empty(shape.sizes, dtype=getattr(torch, shape.dtype), device=device)


def _by_name(built: object) -> dict[str, Any]:
    if isinstance(built, Mapping):
        return {str(name): member for name, member in built.items()}
    if isinstance(built, tuple) and 1 <= len(built) <= 3:
        return dict(zip((MODEL, "optimizer", "scheduler"), built, strict=False))
    raise TypeError(
        f"build() returns {kind_of(built)}; it must return (model, optimizer), (model, optimizer, scheduler), or a "
        'dictionary of everything with state_dict, the model under "model"'
    )


def _is_replicated(member: Stateful) -> bool:
    torch_kinds = (nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
    return isinstance(member, (*torch_kinds, FollowsWorld))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
