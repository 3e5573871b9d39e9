"""Several models, optimizers, schedules and other members in one checkpoint; checkpoints of earlier versions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

from elastipod.checkpoint import CheckpointManager
from elastipod.errors import CheckpointError

MATRIX_OPTIMIZER = getattr(torch.optim, "Muon", torch.optim.SGD)  # Muon exists from torch 2.9 on


class CountingLoader:
    """A loader whose position is plain values, and whose random state is a tensor."""

    def __init__(self) -> None:
        self.position: dict[str, Any] = {"epoch": 0, "shards": ["a", "b"], "at": (0, 0)}
        self.noise = torch.zeros(100, dtype=torch.uint8)

    def read(self) -> None:
        epoch, number = self.position["at"]
        self.position = {**self.position, "at": (epoch, number + 1)}
        self.noise = self.noise + 3

    def state_dict(self) -> dict[str, Any]:
        return {**self.position, "noise": self.noise}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position = {key: value for key, value in state_dict.items() if key != "noise"}
        self.noise = state_dict["noise"].clone()


class Run:
    """A model trained by two optimizers, a frozen layer, an unused one, an average of the weights, a scaler and a loader."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.ModuleDict(
            {
                "body": torch.nn.Linear(4, 6),
                "frozen": torch.nn.Linear(6, 6).requires_grad_(False),
                "unused": torch.nn.Linear(6, 3),
                "head": torch.nn.Linear(6, 2),
            }
        )
        self.average = AveragedModel(self.model)
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.matrices = MATRIX_OPTIMIZER([each for each in trained if each.ndim == 2], lr=0.02, momentum=0.9)
        unused = self.model["unused"].bias
        biases = [each for each in trained if each.ndim == 1 and each is not unused]
        self.others = torch.optim.AdamW(
            [{"params": biases, "weight_decay": 0.0}, {"params": [unused], "weight_decay": 0.1}], lr=0.1
        )
        self.schedules = [
            torch.optim.lr_scheduler.MultiStepLR(each, [2, 4], gamma=0.5) for each in (self.matrices, self.others)
        ]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**seed, growth_interval=3)
        self.loader = CountingLoader()

    def train(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
            self.model.zero_grad()
            hidden = self.model["frozen"](torch.tanh(self.model["body"](inputs)))
            self.scaler.scale(self.model["head"](hidden).square().mean()).backward()
            for optimizer in (self.matrices, self.others):
                self.scaler.step(optimizer)
            self.scaler.update()
            for schedule in self.schedules:
                schedule.step()
            self.average.update_parameters(self.model)
            self.loader.read()

    def arguments(self) -> dict[str, Any]:
        return {
            "model": {"model": self.model, "average": self.average},
            "optimizer": {"matrices": self.matrices, "others": self.others},
            "scheduler": {"matrices": self.schedules[0], "others": self.schedules[1]},
            "stateful": {"scaler": self.scaler, "loader": self.loader},
        }

    def state(self) -> dict[str, Any]:
        """Give everything that a later step depends on, as what can be compared bit by bit."""
        found: dict[str, Any] = {key: tensor.numpy().tobytes() for key, tensor in self.model.state_dict().items()}
        found |= {f"average.{key}": tensor.numpy().tobytes() for key, tensor in self.average.state_dict().items()}
        names: dict[Any, str] = {parameter: name for name, parameter in self.model.named_parameters()}
        for optimizer in (self.matrices, self.others):
            for parameter, state in optimizer.state.items():
                found |= {
                    f"{names[parameter]}.{key}": value.numpy().tobytes()
                    for key, value in state.items()
                    if torch.is_tensor(value)
                }
            for number, group in enumerate(optimizer.param_groups):
                found |= {
                    f"{type(optimizer).__name__}.{number}.{key}": value
                    for key, value in group.items()
                    if key != "params"
                }
        found["schedules"] = [schedule.state_dict() for schedule in self.schedules]
        found["scaler"], found["loader"] = self.scaler.state_dict(), repr(self.loader.state_dict())
        return found


@pytest.mark.parametrize("in_memory", [False, True], ids=["durable", "memory"])
@pytest.mark.parametrize("steps_of_receiver", [0, 2])
def test_training_of_several_objects_goes_on_bit_by_bit(
    tmp_path: Path, in_memory: bool, steps_of_receiver: int
) -> None:
    undisturbed, resumed = Run(), Run(seed=1)
    undisturbed.train(1, 3)
    resumed.train(1, steps_of_receiver)
    wanted = undisturbed.state()
    memory = tmp_path / "memory" if in_memory else False
    with CheckpointManager(tmp_path / "disk", memory=memory) as manager:
        manager.save_async(3, **undisturbed.arguments(), durable=not in_memory)
        manager.wait()
    assert undisturbed.state() == wanted, "a save changes nothing"
    with CheckpointManager(tmp_path / "disk", memory=memory) as manager:
        resume = manager.load_latest(**resumed.arguments())
    assert resume is not None
    assert (resume.step, resume.tier) == (3, "memory" if in_memory else "durable")
    assert resumed.state() == wanted
    for run in (undisturbed, resumed):
        run.train(4, 7)
    assert resumed.state() == undisturbed.state()
    assert not [key for key in wanted if key.startswith("unused.") and "momentum" in key]


def test_optimizers_may_be_given_in_another_order_or_divided_in_another_way(tmp_path: Path) -> None:
    saved, loaded = Run(), Run(seed=1)
    saved.train(1, 3)
    with CheckpointManager(tmp_path, memory=False) as manager:
        manager.save(3, **{**saved.arguments(), "optimizer": [saved.matrices, saved.others]})
        manager.load_latest(**{**loaded.arguments(), "optimizer": (loaded.others, loaded.matrices)})
    assert loaded.state() == saved.state()
    weight, bias = torch.nn.Linear(2, 2).parameters()
    model = torch.nn.ParameterDict({"weight": weight, "bias": bias})
    whole = torch.optim.AdamW([{"params": [weight], "lr": 0.3}, {"params": [bias], "lr": 0.2}])
    model["weight"].square().sum().backward()
    whole.step()
    with CheckpointManager(tmp_path / "divided", memory=False) as manager:
        manager.save(1, model=model, optimizer=whole)
        parts = [torch.optim.AdamW([bias], lr=1.0), torch.optim.AdamW([weight], lr=1.0)]
        manager.load_latest(model=model, optimizer=parts)
    assert [part.param_groups[0]["lr"] for part in parts] == [0.2, 0.3]
    assert not parts[0].state
    assert torch.equal(parts[1].state[weight]["exp_avg"], whole.state[weight]["exp_avg"])


def test_a_learning_rate_that_is_a_tensor_is_loaded(tmp_path: Path) -> None:
    weight, bias = torch.nn.Linear(2, 2).parameters()
    model = torch.nn.ParameterDict({"weight": weight, "bias": bias})

    def optimizers(rate: float) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.SGD([weight], lr=1.0),
            torch.optim.AdamW([bias], lr=torch.tensor(rate), capturable=False, foreach=False),
        ]

    with CheckpointManager(tmp_path, memory=False) as manager:
        manager.save(1, model=model, optimizer=optimizers(0.25))
        loaded = optimizers(0.5)
        manager.load_latest(model=model, optimizer=loaded[::-1])
    assert float(loaded[1].param_groups[0]["lr"]) == 0.25


@pytest.mark.filterwarnings("ignore:torch.distributed is .*unavailable or uninitialized")
def test_torch_reads_several_optimizers_as_its_own(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load

    model = torch.nn.Linear(3, 2)
    optimizers = [torch.optim.SGD([model.weight], lr=0.1, momentum=0.9), torch.optim.AdamW([model.bias], lr=0.2)]
    model(torch.ones(1, 3)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    with CheckpointManager(tmp_path, memory=False) as manager:
        path = manager.save(1, model=model, optimizer=optimizers)
    other = torch.nn.Linear(3, 2)
    others = [torch.optim.SGD([other.weight], lr=1.0, momentum=0.9), torch.optim.AdamW([other.bias], lr=1.0)]
    weights, states = get_state_dict(other, others)
    nested: dict[str, Any] = {"model": weights, "optimizer": states}
    load(nested, storage_reader=FileSystemReader(path))
    set_state_dict(other, others, model_state_dict=nested["model"], optim_state_dict=nested["optimizer"])
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(
        others[0].state[other.weight]["momentum_buffer"], optimizers[0].state[model.weight]["momentum_buffer"]
    )
    assert [each.param_groups[0]["lr"] for each in others] == [0.1, 0.2]


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        ({"optimizer": None}, TypeError, "optimizer is a NoneType; give one torch Optimizer, a sequence, or a mapping by name"),
        ({"optimizer": []}, TypeError, "optimizer is empty; give one torch Optimizer"),
        ({"optimizer": {"a": object()}}, TypeError, r"optimizer\['a'\] is a object; give one torch Optimizer"),
        ({"model": {"a.b": torch.nn.Linear(1, 1)}}, ValueError, "model has the name 'a.b'; a name is a text without dots"),
        ({"model": [3]}, TypeError, r"model\['0'\] is a int; give one torch Module"),
        ({"scheduler": 3}, TypeError, "scheduler is a int; give one object with state_dict and load_state_dict"),
        ({"stateful": [CountingLoader()]}, TypeError, "stateful is a list; give names"),
        ({"stateful": {"loader": object()}}, TypeError, r"stateful\['loader'\] is a object; each is one object with state_dict"),
    ],
)  # fmt: skip
def test_what_is_no_object_of_a_training_is_refused_by_name(
    tmp_path: Path, arguments: dict[str, Any], kind: type[Exception], said: str
) -> None:
    run = Run()
    with CheckpointManager(tmp_path, memory=False) as manager, pytest.raises(kind, match=said):
        manager.save(1, **{**run.arguments(), **arguments})
    assert not list(tmp_path.glob("step-*"))


def test_a_parameter_that_two_optimizers_train_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    both = {"first": torch.optim.SGD([model.weight]), "second": torch.optim.SGD(model.parameters())}
    with (
        CheckpointManager(tmp_path, memory=False) as manager,
        pytest.raises(
            CheckpointError, match=r"'first' and 'second' have a parameter of shape \[2, 3\] in common; give"
        ),
    ):
        manager.save(1, model=model, optimizer=both)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("scheduler", "was saved without a scheduler more; resume without one"),
        ("stateful", "was saved without a member more; resume without one"),
    ],
)
def test_a_member_that_was_not_saved_is_refused_before_anything_changes(tmp_path: Path, kind: str, said: str) -> None:
    saved, loaded = Run(), Run(seed=1)
    saved.train(1, 2)
    before = loaded.state()
    arguments = loaded.arguments()
    arguments[kind] = {**arguments[kind], "more": CountingLoader()}
    with CheckpointManager(tmp_path, memory=False) as manager:
        manager.save(2, **saved.arguments())
        with pytest.raises(CheckpointError, match=said):
            manager.load_latest(**arguments)
    assert loaded.state() == before


def test_swapped_optimizers_are_another_kind_even_before_their_first_step(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    saved = [torch.optim.SGD([model.weight]), torch.optim.AdamW([model.bias])]
    live = [torch.optim.SGD([model.bias]), torch.optim.AdamW([model.weight])]
    with CheckpointManager(tmp_path, memory=False) as manager:
        manager.save(1, model=model, optimizer=saved)
        with pytest.raises(CheckpointError, match="another kind of optimizer, with the option"):
            manager.load_latest(model=model, optimizer=live)
