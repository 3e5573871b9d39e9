"""The members of a state: taken apart into tensors and values, put together in another process, compared."""

from __future__ import annotations

import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.in_memory.models import train, trained
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel

from elastipod.errors import CheckpointError
from elastipod.in_memory.durable_tier import DurableTier
from elastipod.in_memory.members import Content, Members, digest_of, held_members


@pytest.mark.parametrize("steps_of_receiver", [0, 2])
def test_a_rank_that_takes_over_the_state_goes_on_with_the_same_bits(steps_of_receiver: int) -> None:
    donor, receiver = trained(3), trained(steps_of_receiver, seed=1)
    assert digest_of(receiver.digests()) != digest_of(donor.digests())
    receiver.load(donor.content().copied())
    assert receiver.digests() == donor.digests()
    for members in (donor, receiver):
        train(members, 2)
    assert receiver.digests() == donor.digests()
    assert torch.equal(next(receiver["ema"].parameters()), next(donor["ema"].parameters()))


class Keeps32(torch.optim.Optimizer):
    """Keeps a sum in 32 bits, whatever its parameters have."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # as torch's own, without a result
        for group in self.param_groups:
            for each in group["params"]:
                kept = self.state[each].setdefault("sum", torch.zeros(each.shape))
                kept += each.grad
                each.data -= group["lr"] * kept


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        pytest.param(Keeps32, torch.bfloat16, id="sums in 32 bits"),
        pytest.param(torch.optim.NAdam, torch.bfloat16, id="a product in 32 bits"),
        pytest.param(torch.optim.NAdam, torch.float64, id="a product in fewer bits than the parameters"),
        pytest.param(torch.optim.ASGD, torch.bfloat16, id="rates in 32 bits"),
    ],
)
def test_what_an_optimizer_keeps_in_another_type_than_its_parameters_is_not_rounded(kind: Any, dtype: Any) -> None:
    def built(steps: int) -> Members:
        torch.manual_seed(1)
        model = nn.Linear(3, 2).to(dtype)
        members = Members((model, kind([{"params": [model.bias]}, {"params": [model.weight]}])))
        for _ in range(steps):
            for each in model.parameters():
                each.grad = torch.randn_like(each)
            members["optimizer"].step()
        return members

    donor, receiver = built(3), built(0)
    receiver.load(donor.content().copied())
    assert receiver.digests() == donor.digests()
    kept = donor.content().tensors
    assert {key: each.dtype for key, each in receiver.content().tensors.items()} == {
        key: each.dtype for key, each in kept.items()
    }


class Lookahead(torch.optim.SGD):
    """Has a state of its own kind, as optimizers around other optimizers do."""

    def state_dict(self) -> dict[str, Any]:
        return {"fast": super().state_dict(), "slow": {"steps": 3}}

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict["fast"])


def test_an_optimizer_may_have_a_state_of_its_own_kind() -> None:
    model = nn.Linear(2, 1)
    members = Members((model, Lookahead(model.parameters(), lr=0.1)))
    members.load(members.content().copied())


def test_a_copy_is_not_changed_by_later_steps() -> None:
    members = trained(2)
    before, image = members.digests(), members.content().copied()
    train(members, 1)
    assert members.digests() != before
    members.load(image)
    assert members.digests() == before


def test_a_digest_sees_every_tensor_and_value_but_not_buffers() -> None:
    members = trained(2)
    before = members.digests()
    next(members.model.buffers()).add_(1)
    assert members.digests() == before, "replicas may differ in their buffers"
    members["optimizer"].param_groups[0]["lr"] *= 2
    assert [key for key, value in members.digests().items() if value != before[key]] == ["optimizer"]
    next(iter(members["optimizer"].state.values()))["exp_avg"].view(-1)[0] += 1
    changed = [key for key, value in members.digests().items() if value != before[key]]
    assert changed == ["optimizer", "optimizer.state.0.exp_avg"]


def with_buffer(buffer: torch.Tensor, *, persistent: bool = True) -> Members:
    model = nn.Linear(2, 1)
    model.register_buffer("mask", buffer, persistent=persistent)
    return Members((model, torch.optim.SGD(model.parameters())))


UNSENDABLE = {
    "a sparse tensor": lambda: torch.eye(3).to_sparse(),
    "an expanded tensor, whose elements share memory": lambda: torch.zeros(1).expand(3),
    "a nested tensor": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "a quantized tensor": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("kind", UNSENDABLE)
def test_a_tensor_that_no_rank_can_fill_is_named(kind: str) -> None:
    buffer = UNSENDABLE[kind]()
    with pytest.raises(ValueError, match=f"^model.mask is {kind}, which ranks cannot send to each other; make it"):
        with_buffer(buffer).content()
    with_buffer(buffer, persistent=False).content()


def test_one_element_may_be_expanded_and_a_view_may_have_any_order() -> None:
    for buffer in (torch.arange(3).expand((1, -1)), torch.ones(3, 2).t(), torch.zeros(0).expand(0)):
        assert "model.mask" in with_buffer(buffer).content().tensors


@pytest.mark.parametrize(
    ("built", "said"),
    [
        pytest.param(None, r"^build\(\) returns None; it must return \(model, optimizer\)", id="nothing"),
        pytest.param(3, r"^build\(\) returns an int; it must return", id="a number"),
        pytest.param({"net": nn.Linear(1, 1)}, 'under the name "model"', id="no model"),
        pytest.param(
            (nn.Linear(1, 1), object()),
            r"^build\(\) returns optimizer, which is an object; each entry needs state_dict and load_state_dict$",
            id="a member without state",
        ),
    ],
)
def test_what_is_no_state_is_refused(built: object, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        Members(built)


@pytest.mark.parametrize(
    ("told", "lacking", "held"),
    [
        pytest.param({"a": {"x": 1}, "b": [2]}, [], {"a", "b"}, id="all is the same"),
        pytest.param({"a": {"x": 1}, "b": [2]}, ["b.0", "c"], {"a"}, id="a tensor lacks"),
        pytest.param({"a": {"x": 1}, "b": [2]}, ["a"], {"b"}, id="a member that is one tensor lacks"),
        pytest.param({"a": {"x": 1}, "b": [2]}, ["ab.0"], {"a", "b"}, id="a tensor of a longer name lacks"),
        pytest.param({"a": {"x": 1}, "b": [3]}, [], {"a"}, id="a value differs"),
        pytest.param({"a": {"x": True}, "b": [2.0]}, [], set(), id="values of other types"),
        pytest.param({"a": {"x": 1}, "c": [2]}, [], {"a"}, id="another member"),
    ],
)
def test_what_a_rank_holds_of_another_ones_state_is_known_by_member(told: Any, lacking: list[str], held: Any) -> None:
    own = json.dumps({"a": {"x": 1}, "b": [2]})
    assert held_members(own, json.dumps(told), lacking) == held


def test_values_that_are_not_by_member_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^the values of a state are not by member$"):
        held_members("{}", "[1]", [])


def test_members_that_a_rank_holds_are_not_loaded() -> None:
    members, loaded = trained(1), trained(2).content()
    before = members.digests()
    members.load(replace(loaded, held=frozenset(dict(members.items()))))
    assert members.digests() == before
    members.load(loaded)
    assert members.digests() == trained(2).digests() != before


def layers(frozen: str = "", num: int = 2) -> Members:
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(num)))
    teacher = nn.Linear(1, 1).requires_grad_("t" not in frozen)
    for index, layer in enumerate(model):
        layer.requires_grad_(str(index) not in frozen)
    return Members({"model": model, "teacher": teacher})


def frozen_in(members: Members) -> list[str]:
    modules = nn.ModuleDict({name: members[name] for name, _ in members.items()})
    return [name for name, each in modules.named_parameters() if not each.requires_grad]


@pytest.mark.parametrize("own", ["", "01t"])
def test_which_parameters_are_trained_belongs_to_the_state(own: str) -> None:
    """A script that unfreezes layers later builds them frozen, on each newcomer, and in each world where the state is sharded."""
    donor, receiver = layers("1"), layers(own)
    donor["model"][1].bias.requires_grad_(True)
    receiver.load(donor.content().copied())
    assert frozen_in(receiver) == frozen_in(donor) == ["model.1.weight"]
    receiver.load(replace(layers("t").content(), held=frozenset({"model", "teacher"})))
    assert frozen_in(receiver) == ["teacher.weight", "teacher.bias"], "also of what it has already"


def test_a_state_of_another_number_of_parameters_is_refused() -> None:
    content = layers().content()
    with pytest.raises(ValueError, match="model has 4 parameters in this script, and 6 in the state"):
        layers().load(replace(content, values=content.values.replace('"1111"', '"111111"')))


def test_a_state_of_other_members_is_refused() -> None:
    members = trained(0)
    with pytest.raises(ValueError, match="this script builds"):
        members.load(Content({}, "{}"))


def test_a_state_from_a_checkpoint_has_the_digests_that_it_was_saved_with(tmp_path: Path) -> None:
    saved, loaded = trained(3), trained(0, seed=1)
    tier = DurableTier(tmp_path / "checkpoints", saved, keep=2)
    tier.save(3, {}, None, waits=True)
    tier.close(None)
    other = DurableTier(tmp_path / "checkpoints", loaded, keep=2)
    resume = other.load()
    other.close(None)
    assert resume is not None
    assert loaded.digests() == saved.digests()
    for members in (saved, loaded):
        train(members, 2)
    assert loaded.digests() == saved.digests()


def test_a_checkpoint_of_two_optimizers_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    def built(seed: int) -> Members:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
        optimizers = {
            "matrices": torch.optim.SGD([each for each in model.parameters() if each.ndim == 2], lr=0.1, momentum=0.9),
            "others": torch.optim.AdamW([each for each in model.parameters() if each.ndim == 1], lr=0.1),
        }
        schedules = {f"rate of {name}": torch.optim.lr_scheduler.StepLR(each, 2) for name, each in optimizers.items()}
        return Members({"model": model, "ema": AveragedModel(model), **optimizers, **schedules})

    saved, loaded = built(0), built(1)
    train(saved, 3)
    tier = DurableTier(tmp_path / "checkpoints", saved, keep=2)
    tier.save(3, {}, None, waits=True)
    tier.close(None)
    other = DurableTier(tmp_path / "checkpoints", loaded, keep=2)
    assert other.load() is not None
    other.close(None)
    assert loaded.digests() == saved.digests()
    for members in (saved, loaded):
        train(members, 2)
    assert loaded.digests() == saved.digests()


def test_a_parameter_of_two_optimizers_is_refused_before_training() -> None:
    model = nn.Linear(2, 2)
    built = {"model": model, "first": torch.optim.SGD([model.weight]), "second": torch.optim.SGD(model.parameters())}
    with pytest.raises(CheckpointError, match="'first' and 'second' have a parameter of shape"):
        DurableTier("checkpoints", Members(built), keep=2)


def test_a_generation_that_resumed_from_memory_may_save_below_its_own_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A fault repeats a step whose checkpoint is written already."""
    members = trained(3)
    first = DurableTier(tmp_path / "checkpoints", members, keep=2)
    assert first.load() is None
    first.save(9, {}, None, waits=True)
    first.close(None)
    first.save(9, {}, None, waits=True)  # of the next generation, which never loaded
    first.close(None)
    assert caplog.messages == []


def test_an_interrupted_step_leaves_nothing_to_the_next_one() -> None:
    """Neither gradients of another member or of parameters that only an optimizer has, nor what the GradScaler knows of them."""
    model, critic, loose = nn.Linear(2, 1), nn.Linear(2, 1), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([*model.parameters(), loose], lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    members = Members(
        {"model": model, "critic": critic, "optimizer": optimizer, "optimizer_of_critic": torch.optim.SGD(critic.parameters()),
         "scaler": scaler}
    )  # fmt: skip
    parameters = [*model.parameters(), *critic.parameters(), loose]
    for _ in range(2):
        loss = model(torch.ones(2)) + critic(torch.ones(2)) + loose.sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        assert [parameter.grad is None for parameter in parameters] == [False] * len(parameters)
        members.zero_grad()
        assert [parameter.grad is None for parameter in parameters] == [True] * len(parameters)


def test_the_modules_are_walked_through_once_for_parameters_that_no_optimizer_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A walk through a thousand modules takes milliseconds, and gradients are dropped at each step."""
    model, critic = nn.Linear(2, 1), nn.Linear(2, 1)
    members = Members({"model": model, "critic": critic, "optimizer": torch.optim.SGD(model.parameters())})
    parameters = [*model.parameters(), *critic.parameters()]
    members.zero_grad()
    (model(torch.ones(2)) + critic(torch.ones(2))).backward()
    monkeypatch.setattr(nn.Module, "named_modules", lambda *_, **__: pytest.fail("walked through"))
    members.zero_grad(walks_modules=False)
    assert [parameter.grad is None for parameter in parameters] == [True] * len(parameters)


def test_members_that_were_let_go_are_held_by_nobody() -> None:
    members = Members({"model": nn.Linear(2, 1)})
    members.zero_grad()
    parameter = weakref.ref(members.model.weight)
    members.take({"model": nn.Linear(2, 1)})
    assert parameter() is None


def test_members_that_read_data_are_closed_when_they_are_let_go() -> None:
    """Others are the script's: it may use them elsewhere."""
    closed: list[str] = []

    class Reader:
        def __init__(self, name: str) -> None:
            self.close = lambda: closed.append(name)

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    class Follower(Reader):
        def set_world(self, rank: int, world_size: int) -> None:
            pass

    class WithoutClose(Follower):
        def __init__(self) -> None:
            pass

    built = {"model": nn.Linear(1, 1), "one": Reader("one"), "two": Follower("two"), "three": WithoutClose()}
    members = Members(built)
    members.clear()
    assert closed == ["two"]
    assert not members


def test_what_no_digest_covers_is_named() -> None:
    """Buffers, and members of other kinds than those of torch; a tied weight is covered under both of its names."""

    class Loader:
        def state_dict(self) -> dict[str, Any]:
            return {"order": torch.arange(3)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError(state)

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.norm = nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2)
            self.b.weight = self.a.weight

    model = Tied()
    optimizer = torch.optim.Adam(model.parameters())
    model.norm(model.b(model.a(torch.rand(4, 2)))).sum().backward()
    optimizer.step()
    members = Members({"model": model, "optimizer": optimizer, "loader": Loader()})
    content = members.content()
    found = members.uncompared(content.tensors)
    buffers = [f"model.norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")]
    assert list(found) == [*buffers, "loader.order"]
    assert not set(found) & set(members.digests())
    for sharded in ("optimizer.state.0.exp_avg", "model.b.weight", "model.a.weight"):
        assert sharded in content.tensors


def test_a_parameter_whose_name_in_the_state_is_another_one_is_compared_all_the_same() -> None:
    """`checkpoint_wrapper` takes its own part of the name out of `state_dict()`, and not out of `named_parameters()`."""
    model = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)), nn.BatchNorm1d(2))
    members = Members({"model": model})
    tensors = members.content().tensors
    assert "model.0.weight" in tensors
    buffers = [f"model.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")]
    assert list(members.uncompared(tensors)) == buffers
