"""Everything that the library uses of torch beyond its stable public names, in one place.

Public names that moved between torch 2.4 and today, and the few private ones that have no public equivalent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import OptState
from torch.nn.parallel import DistributedDataParallel as DistributedDataParallel
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

try:
    from torch.distributed.fsdp import FSDPModule as FSDPModule
    from torch.distributed.tensor import DTensor as DTensor
except ImportError:  # torch 2.4 and 2.5
    from torch.distributed._composable.fsdp import FSDPModule as FSDPModule  # type: ignore[attr-defined]
    from torch.distributed._tensor import DTensor as DTensor  # type: ignore[attr-defined]

if TYPE_CHECKING:
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    StorageInfo: TypeAlias = _StorageInfo


def default_group_store(prefix: str) -> Any:
    """Give the default process group's store (a PrefixStore for keys below ``prefix``), None for a backend without one (MPI)."""
    store = dist.distributed_c10d._get_default_store()
    return None if store is None else dist.distributed_c10d.PrefixStore(prefix, store)


def accelerator_type() -> str:
    """Give the type of this machine's accelerator as meshes name it, or ``cpu``."""
    accelerator = getattr(torch, "accelerator", None)  # torch 2.6
    if accelerator is None:
        return next((kind for kind in ("cuda", *_other_kinds_than_cuda()) if _is_available(kind)), "cpu")
    found = accelerator.current_accelerator() if accelerator.is_available() else None
    return "cpu" if found is None else str(found.type)


def device_errors() -> tuple[type[RuntimeError], ...]:
    """Give the types of errors of a rank's own device.

    After an AcceleratorError, which torch has from 2.8 on, nothing runs on the device in this process any more.
    """
    return (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))


def accelerators_of(model: nn.Module) -> set[torch.device]:
    """Give the devices, but for the host, that a model's gradients are reduced on: FSDP2 may keep its parameters on the host."""
    found = {each.device for each in model.parameters()}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            found.add(state._device)
    return {each for each in found if each.type != "cpu"}


def await_devices(accelerators: Iterable[torch.device]) -> None:
    """Return once what this thread has queued on these devices has run, such as the collectives that gradients come from."""
    for each in current_streams(accelerators):
        each.synchronize()


def current_streams(accelerators: Iterable[torch.device]) -> list[Any]:
    """Give what this thread queues its work in on these devices; any thread can call `synchronize` of each to await that work."""
    found = []
    for each in accelerators:
        functions: Any = getattr(torch, each.type, None)
        if hasattr(functions, "current_stream"):
            found.append(functions.current_stream(each))
        elif hasattr(functions, "synchronize"):  # one stream for all
            found.append(functions)
    return found


def copy_together(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy tensors of one device and type, with as few kernels as can be."""
    with torch.no_grad():
        torch._foreach_copy_(targets, sources)


def with_host(backend: str) -> str:
    """Give a backend that carries tensors in host memory too: with gloo, where it carries an accelerator's alone, as NCCL does."""
    if ":" in backend:
        return backend if "cpu:" in backend else f"cpu:gloo,{backend}"
    devices = dist.Backend.backend_capability.get(backend.lower(), ["cpu"])
    return backend if "cpu" in devices else ",".join(["cpu:gloo", *(f"{device}:{backend}" for device in devices)])


def seed_torch(seed: int) -> None:
    """Seed torch's generators, as `torch.manual_seed` does, at a cost that is right for each step.

    That one formats the stack for each kind of device that this process does not use, which takes longer than all else here.
    """
    if _has_other_devices_than_cuda():
        torch.manual_seed(seed)
        return
    if _has_cuda():
        torch.cuda.manual_seed_all(seed)
    torch.default_generator.manual_seed(seed)


@cache
def _has_cuda() -> bool:
    return bool(torch.cuda.is_available())  # counts the devices each time


@cache
def _has_other_devices_than_cuda() -> bool:
    return any(map(_is_available, _other_kinds_than_cuda()))


def _other_kinds_than_cuda() -> tuple[str, ...]:
    return ("mps", "xpu", "mtia", torch._C._get_privateuse1_backend_name())


def _is_available(kind: str) -> bool:
    module = getattr(torch, kind, None)
    if module is None:
        return False
    is_available = getattr(module, "is_available", None) or getattr(
        getattr(torch.backends, kind, None), "is_available", None
    )
    return is_available is None or bool(is_available())  # a module that does not tell may have one


def set_group_timeout(timeout: timedelta) -> None:
    """Set how long a collective of the default process group may take from now on."""
    named = getattr(dist.distributed_c10d, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    named(timeout)


def number_groups_anew() -> None:
    """Let the default process group that is built next have the same name on all ranks, which torch's keys in a store begin with.

    torch numbers groups, and begins again when the default group is destroyed. A rank whose try to build it failed has none to destroy,
    would go on counting, and would never meet a rank that had got as far as to destroy one.
    """
    dist.distributed_c10d._world.group_count = 0


def watch_new_groups(around: Callable[[], AbstractContextManager[None]]) -> Callable[[], None]:
    """Enter ``around`` while a process group is built, by any code; give a function that ends this.

    torch has no public hook for it, and all of its functions that build a group call this one.
    """
    c10d: Any = dist.distributed_c10d
    build = c10d._new_process_group_helper

    @wraps(build)
    def watched(*arguments: Any, **options: Any) -> Any:
        with around():
            return build(*arguments, **options)

    def end() -> None:
        if c10d._new_process_group_helper is watched:
            c10d._new_process_group_helper = build

    c10d._new_process_group_helper = watched
    return end


def can_abort_groups() -> bool:
    """Whether torch can abort a process group (torch 2.6): only that ends collectives that an accelerator runs for a lost peer."""
    return hasattr(dist.ProcessGroup, "abort")


def abort_groups() -> None:
    """Abort the collectives of all process groups together, from any thread. Does little with gloo.

    Does nothing where `can_abort_groups` is False; `State` then keeps no process whose groups would need it.

    torch still knows the groups afterwards, so later collectives fail as well. Its own abort forgets them: a rank that is on its way to
    a collective would then look like a single process, and would go on without the others.
    """
    default = dist.group.WORLD
    if default is None or not can_abort_groups():
        return
    names = dict(dist.distributed_c10d._world.pg_names)
    with _aborted_together(default):
        for group in sorted(names, key=lambda each: names[each], reverse=True):  # in torch's own order
            group.abort()


@contextmanager
def _aborted_together(group: Any) -> Iterator[None]:
    """Begin and end a group of NCCL's calls, without which the aborts of several communicators can wait for each other."""
    try:
        backend = group._get_backend(torch.device(accelerator_type()))
    except RuntimeError:  # none for the accelerator
        backend = None
    begin, end = (getattr(backend, name, lambda: None) for name in ("_group_start", "_group_end"))
    begin()
    try:
        yield
    finally:
        end()


def abort_and_forget_groups() -> None:
    """Abort all process groups, and let torch forget them, as `destroy_process_group` does. Does nothing before torch 2.6."""
    abort = getattr(dist.distributed_c10d, "_abort_process_group", None)
    if abort is not None and dist.is_initialized():
        abort()


def ends_groups_without_lock() -> bool:
    """Whether a process group ends without Python's lock (torch 2.8), so that another one can be built meanwhile."""
    return torch.__version__ >= "2.8"  # compared as versions


def gloo_backends() -> list[Any]:
    """Give gloo's part of each process group that torch knows of, which has the connections and threads.

    A caller that keeps them keeps a group's end from blocking. Before torch 2.8, a group ends with Python's lock held and waits for a
    thread of gloo that may be waiting for this lock, to free the tensors of its last collective. A backend never held the lock there.
    """
    backends = []
    for group in dist.distributed_c10d._world.pg_map:
        with suppress(RuntimeError):  # a group without a backend for CPUs
            backends.append(group._get_backend(torch.device("cpu")))
    return backends


def run_after_backward(action: Callable[[], None]) -> None:
    """Run ``action`` at the end of the backward pass that is under way, after what was queued so before."""
    torch.autograd.Variable._execution_engine.queue_callback(action)


def wrapped_as_it_is(wrap: Callable[..., nn.Module], model: nn.Module) -> nn.Module:
    """Wrap a model that is the same on all ranks already: DDP then need not send all of rank 0's weights to the others.

    It does so all the same where ``wrap`` is not DDP itself (or a partial of it), and for buffers that are in no state_dict.
    """
    buffers = {name for name, _ in model.named_buffers()}
    is_known = not buffers or buffers <= model.state_dict().keys()
    if is_known and getattr(wrap, "func", wrap) is DistributedDataParallel:
        with suppress(TypeError):  # a torch whose DDP has no such option
            return wrap(model, init_sync=False)
    return wrap(model)


def detach_reducer(model: nn.Module) -> None:
    """Take DDP's hooks off the parameters, so that another DDP can wrap them while somebody still holds this one.

    A process group closes its connections when the last reference to it is gone. DDP is part of reference cycles and would keep the
    group until Python next collects garbage; a peer that waits for this rank in a collective of gloo would wait as long.
    """
    for each in model.modules():  # DDP may be inside what torch.compile or the script has wrapped around it
        if isinstance(each, DistributedDataParallel) and "reducer" in each.__dict__:
            each.reducer._remove_autograd_hooks()
            for name in ("reducer", "logger", "process_group"):
                each.__dict__.pop(name, None)


def gradient_divide_factor(module: FSDPModule) -> float | None:
    """Give what `set_gradient_divide_factor` has set for a module that is sharded; None where gradients are averaged."""
    factors = {getattr(group, "gradient_divide_factor", None) for group in _shard_groups(module)}
    return factors.pop() if len(factors) == 1 else None


def gradient_reduce_dtype(module: FSDPModule) -> torch.dtype | None:
    """Give the type that a module's MixedPrecisionPolicy has gradients reduced in; None where they keep their own."""
    state: Any = module._get_fsdp_state()
    dtype: torch.dtype | None = state._mp_policy.reduce_dtype
    return dtype


def _shard_groups(module: FSDPModule) -> list[Any]:
    """Give the groups of parameters of one module that is sharded; torch 2.4 to 2.9 have one, later ones several."""
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def release_shard_groups(model: nn.Module) -> None:
    """Take the process groups out of what `fully_shard` has left in a model that is not used any more.

    As for `detach_reducer`: a group's connections close with the last reference to it, and a graph that a script still holds leads to
    this model.
    """
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        for group in _shard_groups(module):
            for info in filter(None, (vars(group).get("mesh_info"), vars(group).get("post_forward_mesh_info"))):
                release_mesh_groups(info.mesh)
                for name, value in list(vars(info).items()):
                    if isinstance(value, dist.ProcessGroup):
                        setattr(info, name, None)
            vars(group).clear()  # also collectives that were interrupted
        state: Any = module._get_fsdp_state()
        vars(state.__dict__.get("_comm_ctx", _Nothing())).clear()


class _Nothing:
    """Has no attributes."""


def release_mesh_groups(mesh: Any) -> None:
    """Take the process groups out of a mesh that is not used any more. Before torch 2.10 a mesh knows them by name only."""
    for each in (mesh, getattr(mesh, "_root_mesh", None)):
        if each is not None:
            getattr(each, "_pg_registry", {}).clear()


def sharded_tensor(local: torch.Tensor, mesh: Any, placements: Sequence[Any], sizes: torch.Size) -> DTensor:
    """Give a DTensor of which this rank has ``local``, wherever that lies.

    `DTensor.from_local` would move it to an accelerator that the mesh is of, also where FSDP2 keeps the state on the host.
    """
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    described = TensorMeta(sizes, torch.empty(sizes, device="meta").stride(), local.dtype)
    return DTensor(local, DTensorSpec(mesh, tuple(placements), tensor_meta=described), requires_grad=False)


def drop_sharding_caches() -> None:
    """Forget how operations on DTensors were divided: the results name meshes of a former world, which equal those of a new one."""
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    clear = getattr(propagator.propagate_op_sharding, "cache_clear", None)
    if clear is not None:
        clear()
    clear_native = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear_native is not None:
        clear_native()


def storage_info(file: str, first_byte: int, num_bytes: int) -> StorageInfo:
    """Give what the metadata of torch's checkpoints says about the place of a chunk."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # imports much that only checkpoints need

    return _StorageInfo(file, first_byte, num_bytes)


def has_plain_names(model: nn.Module) -> bool:
    """Whether torch's checkpoints name parameters and buffers as ``model.state_dict()`` does, because nothing wraps a module of it.

    torch walks from the model to each tensor to find that out, which takes more time than the copy of a small model.
    """
    wrappers = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
    return not any(
        isinstance(each, DistributedDataParallel)
        or hasattr(each, "_fqn_modifiers")
        or not wrappers.isdisjoint(each._modules)
        for each in model.modules()
    )


def names_in_checkpoints(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Give the name that torch's checkpoints use for each of these parameters or buffers, whatever wraps the model."""
    if has_plain_names(model):
        return {name: name for name in names}
    from torch.distributed.checkpoint.state_dict import _get_fqns

    return {name: next(iter(_get_fqns(model, name))) for name in names}


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load a state as `state_dict` gave it. torch gives what it loads the type of the parameters, which rounds; this puts it back."""
    optimizer.load_state_dict(dict(state))
    numbers = [each for group in state["param_groups"] for each in group["params"]]
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        kept = optimizer.state.get(parameter, {})
        for name, given in state["state"].get(number, {}).items():
            now = kept.get(name)
            if isinstance(given, torch.Tensor) and isinstance(now, torch.Tensor) and given.dtype != now.dtype:
                kept[name] = given.to(now.device)


def names_ignored_by_ddp(module: nn.Module) -> set[str]:
    """Give the parameters and buffers that DDP was told not to keep equal over the ranks."""
    return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def without_compile_wrapper(model: nn.Module) -> nn.Module:
    """Give the module that torch.compile wrapped, or ``model`` itself."""
    original: nn.Module = getattr(model, "_orig_mod", model)
    return original


def set_last_learning_rates(schedule: LRScheduler, rates: Sequence[object]) -> None:
    """Set what ``schedule.get_last_lr()`` gives."""
    schedule._last_lr = list(rates)  # type: ignore[arg-type]  # floats, or the tensors of a compiled optimizer


def epochs_of(schedule: LRScheduler) -> list[int]:
    """Give numbers that each `step` of a schedule raises: its epoch, or those of the schedules that a ChainedScheduler steps."""
    if isinstance(schedule, ChainedScheduler):  # it has no epoch of its own
        return [epoch for each in schedule._schedulers for epoch in epochs_of(each)]
    return [int(schedule.last_epoch)]


def scale_updates(scaler: torch.amp.GradScaler) -> int:
    """Give a number that each `update` of a GradScaler raises. A look at the scale itself would await the device."""
    if not scaler.is_enabled():  # it has none of the attributes below
        return 0
    scale: torch.Tensor | None = scaler._scale
    return 0 if scale is None else scale._version


def is_unscaled(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Whether the gradients of an optimizer are unscaled in this step already: a second `unscale_` raises, and nothing public tells."""
    return scaler._per_optimizer_states[id(optimizer)]["stage"] is not OptState.READY


def forget_gradients(scaler: torch.amp.GradScaler) -> None:
    """Let a GradScaler forget that gradients of a step were unscaled, as its `update` does at the end of the step.

    It has no public call for a step that is broken off; since torch 1.6 the states are in this dictionary, by optimizer.
    """
    if scaler.is_enabled():
        scaler._per_optimizer_states.clear()
