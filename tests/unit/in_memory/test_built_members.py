"""What `State` says of what `build` returns: mistakes that train nothing, or that torch or the loop would meet much later."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
from tests.unit.in_memory.forked_ranks import run_ranks
from tests.unit.in_memory.models import build
from tests.unit.library.sample_logs import PLAN
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from elastipod import State
from elastipod.data import ElasticBatches
from elastipod.in_memory import built_members, elastic_state


def train_one(state: State) -> None:
    for step in state.steps(PLAN):
        with step as batch:
            state.model(torch.ones(len(batch.indices), 3)).sum().backward()
        return


def of_another_model() -> Any:
    return nn.Linear(3, 2), torch.optim.SGD(nn.Linear(3, 2).parameters())


def of_a_forgotten_tensor() -> Any:
    model = nn.Linear(3, 2)
    return model, torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(1))])


@pytest.mark.parametrize("built", [of_another_model, of_a_forgotten_tensor])
def test_an_optimizer_of_other_parameters_than_the_models_is_refused(built: Any) -> None:
    with pytest.raises(TypeError) as caught:
        State(built)
    assert str(caught.value) == (
        "build() returns optimizer, which has parameters that are not the model's; make it from model.parameters()"
    )


def test_a_buffer_that_no_rank_can_be_filled_with_is_refused_before_the_first_step() -> None:
    def with_sparse_mask() -> Any:
        model = nn.Linear(3, 2)
        model.register_buffer("mask", torch.eye(3).to_sparse())
        return model, torch.optim.SGD(model.parameters())

    with pytest.raises(ValueError, match=r"^model\.mask is a sparse tensor, which ranks cannot send to each other"):
        State(with_sparse_mask)


def test_a_model_that_nothing_trains_is_refused_unless_the_script_applies() -> None:
    def alone() -> Any:
        return (nn.Linear(3, 2),)

    with pytest.raises(TypeError) as caught:
        State(alone)
    assert str(caught.value) == (
        "build() returns no optimizer, so the model would not be trained; return one, or pass apply= to State"
    )
    State(alone, apply=lambda state: None)
    State(lambda: (nn.Linear(3, 2).requires_grad_(False),))


def test_an_optimizer_that_is_none_of_torch_trains_the_model_in_the_script() -> None:
    class Own:
        def step(self) -> None: ...

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    State(lambda: (nn.Linear(3, 2), Own()))


def test_parameters_without_an_optimizer_are_told_once_in_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    def head_alone() -> Any:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))
        model[2].bias.requires_grad_(False)
        return model, torch.optim.SGD(model[2].parameters())

    state = State(head_alone)
    assert caplog.records == [], "no rank is known yet"
    train_one(state)
    assert [(each.levelno, each.message) for each in caplog.records] == [
        (
            logging.WARNING,
            "no optimizer of build() trains 4 parameters that require gradients: 0.weight, 0.bias, 1.weight and 1 more",
        )
    ]


def test_a_model_that_is_trained_whole_needs_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    train_one(State(build))
    built_members.warn_untrained(State(lambda: (nn.Linear(3, 2),), apply=lambda _: None)._members)
    assert caplog.records == []


def ddp() -> Any:
    model = DistributedDataParallel(nn.Linear(3, 2))
    return model, torch.optim.SGD(model.parameters())


def sharded() -> Any:
    model = nn.Linear(3, 2)
    fully_shard(model)
    return model, torch.optim.SGD(model.parameters())


@pytest.mark.parametrize("built", [ddp, sharded])
def test_a_build_that_needs_a_process_group_is_told_what_to_pass(built: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)

    def body(_: int) -> list[str]:  # in a process of its own: after its failure torch numbers groups in another way
        with pytest.raises(TypeError) as caught:
            State(built)
        return [str(caught.value), type(caught.value.__cause__).__name__]

    said = "build() must not need a process group: return the bare model, and pass wrap=DistributedDataParallel or mesh= to State"
    assert run_ranks(1, body) == [[said, "ValueError"]]


def test_what_a_build_raises_otherwise_is_its_own() -> None:
    def fails() -> Any:
        raise ValueError("the file is empty")

    with pytest.raises(ValueError, match=r"^the file is empty$"):
        State(fails)


@pytest.mark.parametrize(
    ("is_wrapped", "said"),
    [
        (True, "build() must return the bare model; pass wrap=DistributedDataParallel to State"),
        (False, "build() returns a model that fully_shard has sharded; pass mesh= to State"),
    ],
)
def test_a_model_that_is_wrapped_already_is_refused(
    is_wrapped: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrapped(nn.Linear): ...

    monkeypatch.setattr(built_members, "DistributedDataParallel", Wrapped if is_wrapped else DistributedDataParallel)
    monkeypatch.setattr(built_members, "is_sharded", lambda model: isinstance(model, Wrapped))

    def built() -> Any:
        model = Wrapped(3, 2)
        return model, torch.optim.SGD(model.parameters())

    with pytest.raises(TypeError, match=f"^{re.escape(said)}$"):
        State(built)


@pytest.mark.parametrize("name", ["rank", "steps", "completed", "generation", "world_size", "between_steps", "_world"])
def test_an_entry_is_not_called_like_an_attribute_of_state(name: str) -> None:
    with pytest.raises(
        ValueError, match=f"^build\\(\\) returns an entry named '{name}', which State has already; use "
    ):
        State(lambda: {**build(), name: torch.amp.GradScaler("cpu")})


def test_an_entry_cannot_be_put_in_the_place_of_another() -> None:
    state = State(build)
    for name in ("optimizer", "model"):
        with pytest.raises(AttributeError, match=f"^state.{name} cannot be set: build\\(\\) returns the entries$"):
            setattr(state, name, state.optimizer)
    state.note = 3
    assert state.note == 3


@pytest.mark.parametrize("plan", [[1, 2], 5, None])
def test_what_is_no_plan_is_refused(plan: Any) -> None:
    with pytest.raises(TypeError) as caught:
        next(iter(State(build).steps(plan)))
    assert str(caught.value) == (
        f"plan is {plan}; it must be an ElasticBatches, such as ElasticBatches(len(dataset), global_batch)"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"grain": "2"}, "grain is '2'; it must be a whole number"),
        ({"local_sizes": 8}, "local_sizes is 8; it must have a whole number for each rank"),
        ({"local_sizes": "44"}, "local_sizes is '44'; it must have a whole number for each rank"),
        ({"local_sizes": [4, None]}, "local_sizes[1] is None; it must be a whole number"),
    ],
)
def test_batches_are_cut_by_whole_numbers(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError) as caught:
        next(iter(State(build).steps(ElasticBatches(8, 8), **arguments)))
    assert str(caught.value) == said


@pytest.mark.parametrize("name", ["rank", "world_size", "generation"])
def test_under_a_launcher_the_place_in_the_world_is_known_in_the_loop_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank would be 0 of 1 before it, and do what one rank is to do."""
    state = State(build)
    getattr(state, name)  # the only process there is
    for variable, text in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(variable, text)
    state = State(build)
    with pytest.raises(RuntimeError) as caught:
        getattr(state, name)
    variable = {"rank": "RANK", "world_size": "WORLD_SIZE"}.get(name, "ELASTIPOD_GENERATION")
    assert str(caught.value) == (
        f"state.{name} is known inside the loop over state.steps(); before it use the variable {variable}"
    )
    monkeypatch.setattr(state, "_pid", 1)
    getattr(state, name)
    assert elastic_state.State is State
