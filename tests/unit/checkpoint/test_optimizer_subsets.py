"""Parameters that have no optimizer state yet: what was never trained is saved and loaded as that, and training goes on alike."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastipod.checkpoint import CheckpointManager
from elastipod.errors import CheckpointError

Groups = list[dict[str, object]]
Make = Callable[[Groups], torch.optim.Optimizer]

KINDS: dict[str, Make] = {
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.1, amsgrad=True),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.1),
    "adamw-fused": lambda groups: torch.optim.AdamW(groups, lr=0.1, fused=True),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.1, momentum=0.5, centered=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.1),  # has state before its first step
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=0.1),
}
NAMES = ("body", "head", "expert", "scale")
SUBSETS = st.lists(st.frozensets(st.sampled_from(NAMES)), max_size=3)


class Run:
    """A model of four parameters in two groups; each step trains those that it is told to."""

    def __init__(self, kind: str, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.model = torch.nn.ParameterDict(
            {name: torch.nn.Parameter(torch.randn(3, 2, generator=generator)) for name in NAMES[:3]}
            | {"scale": torch.nn.Parameter(torch.randn((), generator=generator))}
        )
        self.optimizer = KINDS[kind](
            [
                {"params": [self.model["body"], self.model["scale"]], "weight_decay": 0.1},
                {"params": [self.model["head"], self.model["expert"]], "lr": 0.02},
            ]
        )

    def train(self, steps: list[frozenset[str]]) -> None:
        for number, subset in enumerate(steps):
            self.optimizer.zero_grad(set_to_none=True)
            for name in subset:
                self.model[name].grad = torch.full_like(self.model[name], 0.3 + number).cos()
            self.optimizer.step()

    def save(self, folder: Path, *, in_memory: bool) -> None:
        with CheckpointManager(folder / "disk", memory=folder / "memory") as manager:
            manager.save_async(1, model=self.model, optimizer=self.optimizer, durable=not in_memory)
            manager.wait()

    def load(self, folder: Path, *, in_memory: bool) -> None:
        with CheckpointManager(folder / "disk", memory=folder / "memory" if in_memory else False) as manager:
            resume = manager.load_latest(model=self.model, optimizer=self.optimizer)
            assert resume is not None
            assert resume.tier == ("memory" if in_memory else "durable")

    def state(self) -> dict[str, dict[str, object]]:
        """Give weights and optimizer state by parameter, as what can be compared bit by bit."""
        return {
            name: {"weight": parameter.detach().numpy().tobytes()}
            | {
                key: value.numpy().tobytes() if isinstance(value, torch.Tensor) else value
                for key, value in self.optimizer.state.get(parameter, {}).items()
            }
            for name, parameter in self.model.items()
        }


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=12)
@given(before=SUBSETS, after=SUBSETS, other=SUBSETS, in_memory=st.booleans())
def test_training_goes_on_bit_by_bit_whatever_was_trained_so_far(
    kind: str,
    before: list[frozenset[str]],
    after: list[frozenset[str]],
    other: list[frozenset[str]],
    in_memory: bool,
) -> None:
    """before: what was trained when it was saved; other: what the run that loads it had trained of its own."""
    undisturbed, resumed = Run(kind), Run(kind, seed=1)
    undisturbed.train(before)
    resumed.train(other)
    wanted = undisturbed.state()
    with tempfile.TemporaryDirectory() as folder:
        undisturbed.save(Path(folder), in_memory=in_memory)
        assert undisturbed.state() == wanted, "a save changes nothing"
        resumed.load(Path(folder), in_memory=in_memory)
    assert resumed.state() == wanted
    undisturbed.train([*after, frozenset(NAMES)])
    resumed.train([*after, frozenset(NAMES)])
    assert resumed.state() == undisturbed.state()
    assert [group["lr"] for group in resumed.optimizer.param_groups] == [0.1, 0.02]


@pytest.mark.parametrize("names", [(), ("body",), NAMES], ids=["none", "some", "all"])
@pytest.mark.parametrize(("saved", "live"), [("sgd", "adamw"), ("adamw", "momentum"), ("momentum", "adam")])
def test_another_kind_of_optimizer_is_not_taken_for_one_without_state(
    tmp_path: Path, saved: str, live: str, names: tuple[str, ...]
) -> None:
    run, other = Run(saved), Run(live, seed=1)
    run.train([frozenset(names)])
    run.save(tmp_path, in_memory=False)
    before = copy.deepcopy(other.state())
    with pytest.raises(CheckpointError, match="does not fit this model and optimizer: it"):
        other.load(tmp_path, in_memory=False)
    assert other.state() == before, "nothing was changed"


def test_a_parameter_that_the_saving_optimizer_did_not_have_is_refused(tmp_path: Path) -> None:
    run, other = Run("adamw"), Run("adamw", seed=1)
    del run.optimizer.param_groups[1]["params"][1]
    run.train([frozenset({"body"})])
    run.save(tmp_path, in_memory=False)
    with pytest.raises(CheckpointError, match="its optimizer had no parameter expert"):
        other.load(tmp_path, in_memory=False)


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.ASGD], ids=["a product", "rates"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=["bfloat16", "float64"])
def test_what_an_optimizer_keeps_in_another_type_than_its_parameters_is_not_rounded(
    tmp_path: Path, kind: type[torch.optim.Optimizer], dtype: torch.dtype
) -> None:
    def run(steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = torch.nn.Linear(3, 2).to(dtype)
        optimizer = kind(model.parameters())  # type: ignore[call-arg]
        for _ in range(steps):
            for each in model.parameters():
                each.grad = torch.randn_like(each)
            optimizer.step()
        return model, optimizer

    (model, optimizer), (other_model, other) = run(3), run(0)
    with CheckpointManager(tmp_path, memory=False) as manager:
        manager.save(3, model=model, optimizer=optimizer)
        manager.load_latest(model=other_model, optimizer=other)
    saved, loaded = optimizer.state_dict()["state"], other.state_dict()["state"]
    assert {at: {name: (each.dtype, each.tolist()) for name, each in kept.items()} for at, kept in loaded.items()} == {
        at: {name: (each.dtype, each.tolist()) for name, each in kept.items()} for at, kept in saved.items()
    }
