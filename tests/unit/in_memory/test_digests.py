"""Digests of a state: what they are, what they depend on, and which are computed while the state stands still."""

from __future__ import annotations

import hashlib
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.unit.in_memory.models import build
from torch import nn

from elastipod.in_memory import digests_at_rest
from elastipod.in_memory import members as module
from elastipod.in_memory.digests_at_rest import DigestsAtRest
from elastipod.in_memory.members import Content, Members, TensorShape, digest_of, empty_like_shape


def test_one_digest_of_many_knows_no_order() -> None:
    text = b'{"a": "1", "b": "2"}'
    assert digest_of({"b": "2", "a": "1"}) == hashlib.sha256(text).hexdigest()


def test_a_state_has_a_digest_for_each_parameter_moment_and_the_values_of_each_member() -> None:
    found = Members(build()).digests()
    parameters = [f"{index}.{name}" for index in (0, 1, 2) for name in ("weight", "bias")]
    assert list(found) == ["optimizer", "scheduler", *(f"{of}.{name}" for of in ("model", "ema") for name in (
        parameters if of == "model" else [f"module.{each}" for each in parameters]
    ))]  # fmt: skip
    assert {len(digest) for name, digest in found.items() if "." in name} == {16}
    assert {len(found[name]) for name in ("optimizer", "scheduler")} == {64}


def test_digests_that_are_known_are_not_computed_again() -> None:
    members = Members((nn.Linear(2, 1), torch.optim.SGD([nn.Parameter(torch.zeros(1))])))
    found = members.digests()
    assert members.digests({"model.weight": "known", "optimizer": "ignored", "other": "x"}) == {
        **found, "model.weight": "known"
    }  # fmt: skip


def test_members_of_other_kinds_may_differ_between_replicas() -> None:
    class Loader:
        def state_dict(self) -> dict[str, Any]:
            raise AssertionError("it is not looked at")

        def load_state_dict(self, state_dict: Any) -> None:
            raise AssertionError(state_dict)

    scaler = torch.amp.GradScaler("cpu")
    members = Members({"model": nn.Linear(1, 1, bias=False), "loader": Loader(), "scaler": scaler})
    assert list(members.digests()) == ["scaler", "model.weight"]


def test_values_have_one_digest_whatever_the_order_of_their_keys() -> None:
    one = '{"b": [1, {"d": 2, "c": 3}], "a": {"__pairs__": [[2, "x"], [10, "y"]]}}'
    other = '{"a": {"__pairs__": [[10, "y"], [2, "x"]]}, "b": [1, {"c": 3, "d": 2}]}'
    text = '{"a": {"__pairs__": [[10, "y"], [2, "x"]]}, "b": [1, {"c": 3, "d": 2}]}'
    assert module._digest_of_values(one) == module._digest_of_values(other)
    assert module._digest_of_values(one) == hashlib.sha256(text.encode()).hexdigest()
    assert module._digest_of_values('{"b": [2, 1]}') != module._digest_of_values('{"b": [1, 2]}')


def test_pairs_are_in_the_order_of_the_texts_of_their_keys() -> None:
    """Of all kinds that a key can have; pairs within a value are sorted as well."""
    one = '{"__pairs__": [[{"__tuple__": [1, "a"]}, 0], ["__b", {"__pairs__": [[9, 1], [10, 2]]}], [-1, 0], [true, 0], [1.5, 0]]}'
    text = '{"__pairs__": [["__b", {"__pairs__": [[10, 2], [9, 1]]}], [-1, 0], [1.5, 0], [true, 0], [{"__tuple__": [1, "a"]}, 0]]}'
    assert module._digest_of_values(one) == hashlib.sha256(text.encode()).hexdigest()


def test_a_tensor_is_described_by_its_type_and_sizes() -> None:
    content = Content({"a": torch.zeros(2, 3, dtype=torch.bfloat16), "b": torch.tensor(1)}, "values")
    shapes = [TensorShape("a", "bfloat16", (2, 3)), TensorShape("b", "int64", ())]
    assert content.shapes() == shapes
    assert [shape.num_bytes for shape in shapes] == [12, 8]
    made = [empty_like_shape(shape, torch.device("meta")) for shape in shapes]
    assert [(each.dtype, tuple(each.shape), each.device.type) for each in made] == [
        (torch.bfloat16, (2, 3), "meta"), (torch.int64, (), "meta"),
    ]  # fmt: skip
    copy = content.copied()
    assert (copy.values, copy.shapes()) == ("values", shapes)
    assert copy.tensors["a"].data_ptr() != content.tensors["a"].data_ptr()


def test_a_copy_lies_in_host_memory() -> None:
    """On an accelerator it would have to fit in beside the state and the first step of the new world."""
    content = Content({"a": torch.zeros(2, device="meta")}, "values")
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        content.copied()


class Counted:
    """Members that count how often their digests are computed. known: what they were told to be known."""

    def __init__(self) -> None:
        self.known: list[Any] = []
        self.model = nn.Linear(1, 1)

    def digests(self, known: Any = None, progress: Any = None) -> dict[str, str]:
        self.known.append(known)
        return {"a": "1", "b": "2"}


def test_a_state_that_stands_still_is_read_by_a_thread_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Thread(threading.Thread):
        def __init__(self, **options: Any) -> None:
            made.append(options)
            super().__init__(**options)

    monkeypatch.setattr(digests_at_rest, "threading", SimpleNamespace(Thread=Thread))
    counted: Any = Counted()
    at_rest = DigestsAtRest(counted, lambda: None)
    assert at_rest.digests() == {"a": "1", "b": "2"}
    at_rest.begin()
    assert [(each["target"], each["daemon"]) for each in made] == [(at_rest._compute, True)]
    at_rest.digests()
    at_rest.forget(but={"b", "other"})
    at_rest.digests()
    at_rest.forget()
    at_rest.digests()
    at_rest.digests()["a"] = "changed"
    assert at_rest.digests() == {"a": "1", "b": "2"}
    assert counted.known == [{}, None, {"b": "2"}, {}], "what is at rest is read once"
    assert len(made) == 1


def test_each_tensor_that_is_read_restarts_the_limit_of_the_phase_that_waits_for_it() -> None:
    """A state of many gigabytes takes longer than a phase may last without progress."""
    members, calls = Members(build()), list[str]()
    at_rest = DigestsAtRest(members, lambda: calls.append(threading.current_thread().name))
    at_rest.begin()
    found = at_rest.digests()
    tensors = [name for name in found if "." in name]
    assert calls == ["elastipod-digests"] * len(tensors)
    calls.clear()
    at_rest.forget(but=tensors[1:])
    assert at_rest.digests() == found
    assert calls == [threading.main_thread().name]


def test_digests_are_computed_once_what_the_training_thread_has_queued_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread begins with a stream of its own, so an optimizer that the script runs in another one may still be writing."""
    order: list[str] = []
    queue_of_training = SimpleNamespace(synchronize=lambda: order.append("what was queued has run"))

    def current_stream(device: torch.device) -> Any:
        assert device.type == "meta"
        assert threading.current_thread() is threading.main_thread()
        return queue_of_training

    monkeypatch.setattr(torch, "meta", SimpleNamespace(current_stream=current_stream), raising=False)

    def digests(progress: Any) -> dict[str, str]:
        order.append("read")
        return {}

    members: Any = SimpleNamespace(model=nn.Linear(1, 1, device="meta"), digests=digests)
    at_rest = DigestsAtRest(members, lambda: None)
    at_rest.begin()
    at_rest.forget()
    assert order == ["what was queued has run", "read"]
