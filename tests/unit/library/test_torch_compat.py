"""What the library uses of torch's private names: with those that this torch has, and with those of other versions, played."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from elastipod import torch_compat
from elastipod.torch_compat import (
    abort_and_forget_groups,
    abort_groups,
    accelerator_type,
    accelerators_of,
    await_devices,
    default_group_store,
    gradient_divide_factor,
    has_plain_names,
    names_ignored_by_ddp,
    names_in_checkpoints,
    number_groups_anew,
    release_mesh_groups,
    set_group_timeout,
    set_last_learning_rates,
    sharded_tensor,
    storage_info,
    without_compile_wrapper,
    wrapped_as_it_is,
)

C10D: Any = dist.distributed_c10d


def accelerator(kind: str | None, *, is_available: bool = True) -> SimpleNamespace:
    found = None if kind is None else SimpleNamespace(type=kind)
    return SimpleNamespace(is_available=lambda: is_available, current_accelerator=lambda: found)


@pytest.mark.parametrize(
    ("there", "has_cuda", "wanted"),
    [
        pytest.param(accelerator("xpu"), False, "xpu", id="another accelerator"),
        pytest.param(accelerator("cuda", is_available=False), True, "cpu", id="built for one that is not there"),
        pytest.param(accelerator(None), True, "cpu", id="none"),
        pytest.param(None, True, "cuda", id="an older torch with CUDA"),
        pytest.param(None, False, "cpu", id="an older torch without"),
    ],
)
def test_the_type_of_the_accelerator(monkeypatch: pytest.MonkeyPatch, there: Any, has_cuda: bool, wanted: str) -> None:
    if there is None:
        monkeypatch.delattr(torch, "accelerator")
    else:
        monkeypatch.setattr(torch, "accelerator", there)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    assert accelerator_type() == wanted


def test_an_older_torch_is_asked_for_each_kind_of_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "accelerator")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    assert accelerator_type() == "xpu"
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "npu")
    monkeypatch.setattr(torch, "npu", SimpleNamespace(is_available=lambda: True), raising=False)
    assert accelerator_type() == "npu"


def test_groups_are_aborted_and_forgotten_only_where_torch_can_and_there_are_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(C10D, "_abort_process_group", lambda *args: calls.append(args))
    abort_and_forget_groups()
    assert calls == []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    abort_and_forget_groups()
    assert calls == [()]  # no group: all of them together
    monkeypatch.delattr(C10D, "_abort_process_group")
    abort_and_forget_groups()
    assert calls == [()]


class Group:
    """A process group of which one backend groups its calls, as NCCL does."""

    def __init__(self, log: list[str], name: str, *, has_backend: bool = True) -> None:
        self._log, self._name, self._has_backend = log, name, has_backend

    def abort(self) -> None:
        self._log.append(self._name)

    def _get_backend(self, device: torch.device) -> Any:
        if not self._has_backend:
            raise RuntimeError("no backend for this device")
        begin, end = (lambda: self._log.append("begin")), (lambda: self._log.append("end"))
        return SimpleNamespace(_group_start=begin, _group_end=end)


@pytest.mark.parametrize(("has_backend", "expected"), [(True, ["begin", "two", "one", "end"]), (False, ["two", "one"])])
def test_all_groups_are_aborted_together_and_stay_known(
    monkeypatch: pytest.MonkeyPatch, has_backend: bool, expected: list[str]
) -> None:
    log: list[str] = []
    abort_groups()  # there is none
    groups = {Group(log, name, has_backend=has_backend): number for name, number in (("one", "1"), ("two", "2"))}
    monkeypatch.setattr(C10D, "_world", SimpleNamespace(pg_names=groups, default_pg=next(iter(groups))))
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=next(iter(groups))))
    abort_groups()
    assert log == expected
    assert len(groups) == 2


def test_keys_of_a_part_are_below_its_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    monkeypatch.setattr(C10D, "_get_default_store", lambda: store)
    default_group_store("part").set("key", "value")
    assert store.get("part/key") == b"value"
    monkeypatch.setattr(C10D, "_get_default_store", lambda: None)
    assert default_group_store("part") is None


def test_groups_are_numbered_from_nought_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(C10D._world, "group_count", 7)
    number_groups_anew()
    assert C10D._world.group_count == 0


@pytest.mark.parametrize("name", ["set_timeout", "_set_pg_timeout"])
def test_the_time_limit_of_collectives_is_set_by_the_name_that_there_is(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    given: list[timedelta] = []
    monkeypatch.delattr(C10D, "set_timeout", raising=False)
    monkeypatch.setattr(C10D, "_set_pg_timeout", None, raising=False)
    monkeypatch.setattr(C10D, name, given.append, raising=False)
    set_group_timeout(timedelta(seconds=3))
    assert given == [timedelta(seconds=3)]


class _WithHiddenBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("hidden", torch.zeros(1), persistent=False)


def test_ddp_sends_weights_only_where_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def wrap(model: nn.Module, **options: Any) -> nn.Module:
        asked.append(options)
        return model

    monkeypatch.setattr(torch_compat, "DistributedDataParallel", wrap)
    plain, hidden = nn.BatchNorm1d(2), _WithHiddenBuffer()
    assert wrapped_as_it_is(wrap, plain) is plain
    assert wrapped_as_it_is(partial(wrap, bucket_cap_mb=1), plain) is plain
    assert wrapped_as_it_is(wrap, hidden) is hidden
    assert wrapped_as_it_is(lambda model: wrap(model), plain) is plain
    assert asked == [{"init_sync": False}, {"bucket_cap_mb": 1, "init_sync": False}, {}, {}]


def test_a_ddp_without_the_option_is_wrapped_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrap(model: nn.Module) -> nn.Module:
        return nn.Sequential(model)

    monkeypatch.setattr(torch_compat, "DistributedDataParallel", wrap)
    model = nn.Linear(1, 1)
    assert [*wrapped_as_it_is(wrap, model).children()] == [model]


def sharded(**state: Any) -> Any:
    return SimpleNamespace(_get_fsdp_state=lambda: SimpleNamespace(**state))


@pytest.mark.parametrize(
    ("module", "factor"),
    [
        pytest.param(sharded(_fsdp_param_group=SimpleNamespace(gradient_divide_factor=2.0)), 2.0, id="one group"),
        pytest.param(sharded(_fsdp_param_group=None), None, id="no parameters"),
        pytest.param(sharded(_fsdp_param_groups=[SimpleNamespace(gradient_divide_factor=4.0)] * 2), 4.0, id="several alike"),
        pytest.param(sharded(_fsdp_param_groups=[SimpleNamespace(gradient_divide_factor=each) for each in (1.0, 2.0)]), None,
                     id="several that differ"),
        pytest.param(sharded(_fsdp_param_group=SimpleNamespace()), None, id="a torch without the factor"),
    ],
)  # fmt: skip
def test_the_factor_that_divides_gradients(module: Any, factor: float | None) -> None:
    assert gradient_divide_factor(module) == factor


def test_a_mesh_and_the_one_it_was_cut_from_let_their_groups_go() -> None:
    root = SimpleNamespace(_pg_registry={"all": 1})
    mesh = SimpleNamespace(_root_mesh=root, _pg_registry={"dp": 2})
    release_mesh_groups(mesh)
    assert (mesh._pg_registry, root._pg_registry) == ({}, {})
    release_mesh_groups(SimpleNamespace(_pg_registry={}))
    release_mesh_groups(SimpleNamespace())


def test_the_place_of_a_chunk_is_what_torchs_readers_expect() -> None:
    found = storage_info("__1_0.distcp", 64, 128)
    assert (found.relative_path, found.offset, found.length) == ("__1_0.distcp", 64, 128)


def test_names_are_those_of_the_model_inside() -> None:
    inside = nn.Linear(2, 2)
    wrapped: Any = torch.compile(inside, backend="eager")
    assert without_compile_wrapper(wrapped) is inside
    assert without_compile_wrapper(inside) is inside
    assert names_ignored_by_ddp(inside) == set()
    ddp: Any = DistributedDataParallel
    ddp._set_params_and_buffers_to_ignore_for_model(inside, ["bias"])
    assert names_ignored_by_ddp(inside) == {"bias"}


class Renaming(nn.Module):
    """As torch's FSDP extensions do it: one name stands for another."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def _fqn_modifiers(self) -> dict[str, str]:
        return {}


COMPILED: Any = torch.compile(nn.Linear(2, 2), backend="eager")  # the default one takes seconds to load


@pytest.mark.parametrize(
    ("model", "is_plain"),
    [
        pytest.param(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), True, id="plain"),
        pytest.param(nn.ModuleDict({"module": nn.Linear(2, 2)}), True, id="a child that is called module"),
        pytest.param(COMPILED, False, id="compiled"),
        pytest.param(nn.ModuleList([COMPILED]), False, id="compiled in part"),
        pytest.param(nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2))), False, id="activations are checkpointed"),
        pytest.param(nn.Sequential(Renaming()), False, id="names are modified"),
    ],
)
def test_names_in_checkpoints_are_those_that_torch_gives(model: nn.Module, is_plain: bool) -> None:
    assert has_plain_names(model) is is_plain
    found = names_in_checkpoints(model, [name for name, _ in (*model.named_parameters(), *model.named_buffers())])
    assert sorted(found.values()) == sorted(get_model_state_dict(model))
    assert sorted(found.values()) == sorted(found) if is_plain else "_orig_mod" not in "".join(found.values())


def test_a_wrapper_of_ddp_is_not_in_the_names() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        wrapped = DistributedDataParallel(nn.Linear(2, 2))
        assert not has_plain_names(wrapped)
        assert names_in_checkpoints(wrapped, ["module.weight"]) == {"module.weight": "weight"}
    finally:
        dist.destroy_process_group()


def test_the_last_learning_rates_are_what_a_schedule_gives() -> None:
    schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1), 1)
    set_last_learning_rates(schedule, (0.25, 0.5))
    assert schedule.get_last_lr() == [0.25, 0.5]


@pytest.mark.parametrize(
    ("kind", "has_streams", "awaited"),
    [("gpu", True, ["stream of gpu"]), ("gpu", False, ["all of gpu"]), ("unknown", False, [])],
)
def test_a_device_without_streams_is_awaited_as_a_whole(
    monkeypatch: pytest.MonkeyPatch, kind: str, has_streams: bool, awaited: list[str]
) -> None:
    done: list[str] = []

    def stream(device: Any) -> SimpleNamespace:
        return SimpleNamespace(synchronize=lambda: done.append(f"stream of {device.type}"))

    module = SimpleNamespace(
        synchronize=lambda: done.append("all of gpu"), **({"current_stream": stream} if has_streams else {})
    )
    monkeypatch.setattr(torch, "gpu", module, raising=False)
    device: Any = SimpleNamespace(type=kind)
    await_devices([device])
    assert done == awaited


def test_parameters_that_are_kept_on_the_host_get_gradients_from_an_accelerator() -> None:
    """As with FSDP2 and CPUOffloadPolicy."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        model: Any = nn.Sequential(nn.Linear(2, 2))
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        assert accelerators_of(model) == set()
        model._get_fsdp_state()._device = torch.device("cuda", 1)
        assert accelerators_of(model) == {torch.device("cuda", 1)}
    finally:
        dist.destroy_process_group()
    assert accelerators_of(nn.Linear(1, 1)) == set()
    assert accelerators_of(nn.Linear(1, 1, device="meta")) == {torch.device("meta")}


@pytest.mark.parametrize("mesh_of", ["cpu", "cuda"])
def test_a_part_of_a_tensor_stays_where_it_lies(mesh_of: str) -> None:
    """With FSDP2 and CPUOffloadPolicy the mesh is of an accelerator, and the whole state on the host."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        local, mesh = torch.arange(6.0).reshape(3, 2), DeviceMesh(mesh_of, [0])
        made: Any = sharded_tensor(local, mesh, [Shard(0)], torch.Size((3, 2)))
        assert made.to_local().data_ptr() == local.data_ptr()
        assert (made.shape, made.stride(), made.placements, made.requires_grad) == ((3, 2), (2, 1), (Shard(0),), False)
        parameter: Any = nn.Parameter(sharded_tensor(torch.ones(3, 2), mesh, [Shard(0)], torch.Size((3, 2))))
        optimizer = torch.optim.SGD([parameter], momentum=0.5)
        options = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": {0: {"momentum_buffer": made}}, "param_groups": options})
        kept: Any = optimizer.state[parameter]["momentum_buffer"]
        assert kept.to_local().data_ptr() == local.data_ptr(), "nor does the optimizer move it"
    finally:
        dist.destroy_process_group()
