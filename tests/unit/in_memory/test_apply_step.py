"""What applies a step, and in which order."""

from __future__ import annotations

import pytest
import torch
from tests.unit.in_memory.models import build
from torch.optim.lr_scheduler import ReduceLROnPlateau

from elastipod.in_memory.apply_step import apply_gradients, unscale_gradients
from elastipod.in_memory.members import Members


def gradients(members: Members) -> None:
    members.model(torch.eye(4, 3)).square().sum().backward()


def gradients_of(members: Members) -> list[torch.Tensor]:
    return [each.grad.clone() for each in members.model.parameters() if each.grad is not None]


def test_optimizers_run_before_schedules_and_schedules_before_averages(monkeypatch: pytest.MonkeyPatch) -> None:
    built = build()
    order: list[str] = []
    for name, method in (("ema", "update_parameters"), ("scheduler", "step"), ("optimizer", "step")):
        monkeypatch.setattr(built[name], method, lambda *_, name=name: order.append(name))
    apply_gradients(Members(built))
    assert order == ["optimizer", "scheduler", "ema"]


def test_several_scalers_are_left_to_the_script() -> None:
    scalers = {name: torch.amp.GradScaler("cpu") for name in ("one", "other")}
    with pytest.raises(
        TypeError, match=r"^there are several GradScalers; give State an apply function that runs them$"
    ):
        apply_gradients(Members({**build(), **scalers}))


def test_a_schedule_that_needs_the_loss_is_left_to_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would miss an argument when the optimizer has run already."""
    built = build()
    monkeypatch.setattr(built["optimizer"], "step", lambda: pytest.fail("the state has changed"))
    with pytest.raises(TypeError, match=r"^ReduceLROnPlateau needs a loss at each step; give State an apply function"):
        apply_gradients(Members({**built, "scheduler": ReduceLROnPlateau(built["optimizer"])}))


@pytest.mark.parametrize("by_script", [False, True])
def test_gradients_are_unscaled_once_before_they_are_applied(by_script: bool) -> None:
    built = build()
    members = Members({**built, "scaler": torch.amp.GradScaler("cpu", init_scale=4.0)})
    scaler, optimizer = members["scaler"], members["optimizer"]
    scaler.scale(members.model(torch.eye(4, 3)).square().sum()).backward()
    wanted = [each / 4 for each in gradients_of(members)]
    if by_script:
        scaler.unscale_(optimizer)
    for is_first in (True, False):
        assert unscale_gradients(members) is (is_first and not by_script)
        torch.testing.assert_close(gradients_of(members), wanted, rtol=0, atol=0)
    apply_gradients(members)  # unscales nothing again, and begins anew
    scaler.scale(members.model(torch.eye(4, 3)).square().sum()).backward()
    unscale_gradients(members)


def test_without_a_scaler_nothing_is_unscaled() -> None:
    members = Members(build())
    gradients(members)
    before = gradients_of(members)
    assert unscale_gradients(members) is False
    torch.testing.assert_close(gradients_of(members), before, rtol=0, atol=0)


def test_a_scaler_runs_the_optimizer_and_grows_by_its_own_count() -> None:
    built = build()
    members = Members({**built, "scaler": torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)})
    scaler = members["scaler"]
    scaler.scale(members.model(torch.eye(4, 3)).square().sum()).backward()
    before = [each.detach().clone() for each in members.model.parameters()]
    apply_gradients(members)
    assert scaler.get_scale() == 8.0
    assert any(not torch.equal(one, other) for one, other in zip(before, members.model.parameters(), strict=True))


def test_a_scaler_that_is_switched_off_scales_nothing() -> None:
    """Scripts make one whatever the precision: GradScaler(enabled=...)."""
    members, plain = (Members({**build(), "scaler": torch.amp.GradScaler("cpu", enabled=False)}), Members(build()))
    for each in (members, plain):
        each.zero_grad()
        gradients(each)
        unscale_gradients(each)
        apply_gradients(each)
    torch.testing.assert_close([*members.model.parameters()], [*plain.model.parameters()], rtol=0, atol=0)


@pytest.mark.parametrize("idle", [("one",), ("other",), ("one", "other")])
def test_an_optimizer_without_gradients_is_left_alone_as_it_is_without_a_scaler(idle: tuple[str, ...]) -> None:
    """Steps that train one of two networks in turn."""
    parts = {name: torch.nn.Linear(1, 1) for name in ("one", "other")}
    optimizers = {name: torch.optim.SGD(part.parameters(), lr=1.0) for name, part in parts.items()}
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    members = Members({"model": torch.nn.ModuleDict(parts), **optimizers, "scaler": scaler})
    before = {name: part.weight.item() for name, part in parts.items()}
    for name in parts.keys() - set(idle):
        scaler.scale(parts[name](torch.ones(1, 1)).sum()).backward()
    unscale_gradients(members)
    apply_gradients(members)
    assert {name for name, part in parts.items() if part.weight.item() == before[name]} == set(idle)
