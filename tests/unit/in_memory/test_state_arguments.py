"""What `State` says of an argument that it cannot use: one sentence that names it, before anything is built."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
from tests.unit.in_memory.models import build
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from elastipod import Copies, State
from elastipod.errors import FrameworkError

MESH = {"shard": -1}


def build_over(mesh: Any) -> Any:
    return mesh


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no function": ({"build": None}, TypeError, "build is None; it must be a function that returns the model and the optimizer"),
    "a model": (
        {"build": nn.Linear(2, 2)}, TypeError, "build is a Linear; it must be a function that returns the model and the optimizer"
    ),
    "a build that takes a mesh": (
        {"build": build_over}, TypeError, "build needs an argument; State calls build() without one, unless mesh= is given"
    ),
    "a build that takes no mesh": (
        {"build": lambda: 1, "mesh": MESH}, TypeError, "build takes no argument; with mesh=, State calls build(mesh)"
    ),
    "an apply that is none": ({"apply": 3}, TypeError, "apply is 3; it must be a function, which is called as apply(state)"),
    "an apply without a parameter": (
        {"apply": lambda: None}, TypeError, "apply takes no argument; State calls apply(state)"
    ),
    "the name of a wrapper": (
        {"wrap": "ddp"}, TypeError, "wrap is 'ddp'; it must be a function of the model, such as DistributedDataParallel"
    ),
    "a wrapped model": (
        {"wrap": nn.Sequential()}, TypeError,
        "wrap is a Sequential; it must be a function of the model, such as DistributedDataParallel",
    ),
    "a list for a mesh": (
        {"build": build_over, "mesh": [-1]}, TypeError, 'mesh is [-1]; it must be a dictionary such as {"shard": -1}'
    ),
    "copies without a mesh": (
        {"copies": Copies(1)}, ValueError, "copies= needs mesh=: replicated state needs no copies, every rank has all of it"
    ),
    "a number for copies": (
        {"build": build_over, "mesh": MESH, "copies": 2}, TypeError,
        "copies is 2; it must be a Copies, such as Copies(memory_bytes=8 << 30)",
    ),
    "a number for a folder": ({"checkpoints": 3}, TypeError, "checkpoints is 3; it must be a folder or an address"),
    "no name of a folder": ({"checkpoints": ""}, ValueError, "checkpoints is ''; it must be a folder or an address"),
    "bytes for a folder": ({"checkpoints": b"a"}, TypeError, "checkpoints is b'a'; it must be a folder or an address"),
    "a number for a log": ({"sample_log": 5}, TypeError, "sample_log is 5; it must be a folder"),
    "checkpoints that go nowhere": (
        {"checkpoint_every": 100}, ValueError, "checkpoint_every is 100, but checkpoints= is not given; name the folder for them"
    ),
    "a negative interval": (
        {"checkpoints": "c", "checkpoint_every": -1}, ValueError,
        "checkpoint_every is -1; it must be a number of steps, or 0 for none while training runs",
    ),
    "half an interval": (
        {"checkpoints": "c", "checkpoint_every": 0.5}, TypeError, "checkpoint_every is 0.5; it must be a whole number"
    ),
    "a text for a number": ({"keep": "2"}, TypeError, "keep is '2'; it must be a whole number"),
    "no checkpoint to keep": ({"checkpoints": "c", "keep": 0}, ValueError, "keep is 0; at least one checkpoint must stay"),
    "a text for a seed": ({"seed": "a"}, TypeError, "seed is 'a'; it must be a whole number"),
    "seconds": ({"timeout": 30}, TypeError, "timeout is 30; it must be a timedelta, such as timedelta(minutes=30)"),
    "a backend that is no text": ({"backend": 3}, TypeError, 'backend is 3; it must be a text, such as "nccl"'),
}  # fmt: skip


@pytest.mark.parametrize(("given", "kind", "said"), REFUSED.values(), ids=REFUSED)
def test_an_argument_that_cannot_be_used_is_named_with_what_it_must_be(
    given: dict[str, Any], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind) as caught:
        State(**{"build": build, **given})
    assert str(caught.value) == said


def test_what_can_be_called_as_it_must_be_is_taken(tmp_path: Path) -> None:
    def with_more(state: State, *, scale: float = 1.0) -> None: ...

    State(
        partial(build, 3),
        apply=with_more,
        wrap=lambda model, **options: model,
        checkpoints=tmp_path,
        checkpoint_every=numpy.int64(2),  # type: ignore[arg-type]
        keep=numpy.int64(1),  # type: ignore[arg-type]
        seed=numpy.int64(5),  # type: ignore[arg-type]
        timeout=timedelta(seconds=9),
    )
    State(lambda *meshes: build(), mesh=MESH, copies=Copies(1))


@pytest.mark.parametrize("wrap", [FullyShardedDataParallel, partial(FullyShardedDataParallel, use_orig_params=True)])
def test_fsdp1_is_refused_before_it_wraps(wrap: Any) -> None:
    with pytest.raises(FrameworkError, match=r"^wrap is FullyShardedDataParallel \(FSDP1\), .*fully_shard\(model\)$"):
        State(build, wrap=wrap)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"memory_bytes": "8G"}, "memory_bytes is '8G'; it must be a number"),
        ({"memory_bytes": 1, "every": None}, "every is None; it must be a number"),
        ({"memory_bytes": 1, "bytes_per_s": "1"}, "bytes_per_s is '1'; it must be a number"),
    ],
)
def test_copies_name_a_field_that_is_no_number(given: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError) as caught:
        Copies(**given)
    assert str(caught.value) == said
    assert Copies(memory_bytes=8e9).memory_bytes == 8e9  # type: ignore[arg-type]  # fractions of bytes did no harm
