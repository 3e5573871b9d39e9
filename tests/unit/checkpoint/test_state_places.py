"""Small parts of a checkpoint's state: names that stages may not share, keys, numbers kept, and values taken apart."""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from elastipod.checkpoint.load_plan import flat_keys, list_some
from elastipod.checkpoint.pipeline_stages import PipelineStage, refuse_shared_weights
from elastipod.checkpoint.save_arguments import check_keep, require_step
from elastipod.checkpoint.stateful_members import stateful_state
from elastipod.checkpoint.value_codec import decode_value, encode_value
from elastipod.checkpoint.value_tree import join_tensors, split_tensors
from elastipod.errors import CheckpointError


class NothingSaved:
    """A saved state without tensors."""

    metadata = Metadata({})

    def value(self, key: str) -> Any:
        raise KeyError(key)


def test_keys_are_paths_as_in_checkpoints() -> None:
    nested = {"model": {"w": torch.zeros(2), "deep": {"b": torch.zeros(1)}}, "rng": {"0": "text"}}
    assert flat_keys(nested, NothingSaved()) == {"model.w", "model.deep.b", "rng.0"}


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ([], ""),
        (["b", "a"], "a, b"),
        (["c", "a", "b"], "a, b, c"),
        (["d", "c", "b", "a"], "a, b, c and 1 more"),
        (["e", "d", "c", "b", "a"], "a, b, c and 2 more"),
    ],
)
def test_a_message_names_three_keys_and_counts_the_rest(keys: list[str], told: str) -> None:
    assert list_some(keys) == told


def test_stages_of_different_names_may_be_saved() -> None:
    refuse_shared_weights({})
    refuse_shared_weights({0: ["a", "b"], 1: ["c"], 2: []})


@pytest.mark.parametrize(
    ("of_stages", "told"),
    [
        ({0: ["a"], 1: ["b"], 2: ["c", "b"]}, "the pipeline stages 1 and 2 both have b; let each stage keep the names"),
        ({0: ["a", "b", "c"], 3: ["a", "b", "c"]}, "the pipeline stages 0 and 3 both have a, b, c; let"),
        ({0: list("abcd"), 1: list("abcd")}, "the pipeline stages 0 and 1 both have a, b, c and 1 more; let"),
        ({0: ["a"], 1: ["a"]}, r"or pass model=\{\"stage1\": \.\.\.\}$"),
    ],
)
def test_stages_that_share_names_are_refused_with_both_numbers(of_stages: dict[int, list[str]], told: str) -> None:
    with pytest.raises(CheckpointError, match=told):
        refuse_shared_weights(of_stages)


def test_a_stage_keeps_its_groups_and_schedules_apart() -> None:
    stage = PipelineStage(1, 3)
    first, second = {"lr": 1.0}, {"lr": 2.0}
    assert stage.own_groups([first, second]) == [{}, first, {}, {}, second, {}]
    assert stage.own_names({"warmup": 1, "": 2}) == {"warmup-stage1": 1, "stage1": 2}
    assert PipelineStage().own_groups([first]) == [first]
    assert PipelineStage().own_names({"": 2}) == {"": 2}
    assert PipelineStage() == PipelineStage(0, 1, True)


def test_at_least_one_checkpoint_and_one_step_are_kept() -> None:
    check_keep(1, None)
    check_keep(1, 1)
    with pytest.raises(ValueError, match="keep is 0; at least one"):
        check_keep(0, None)
    with pytest.raises(ValueError, match="keep_every is 0; it is a number of steps, at least 1"):
        check_keep(1, 0)


def test_tensors_are_taken_out_by_their_path_and_put_back() -> None:
    tensors: dict[str, torch.Tensor] = {}
    weight = torch.ones(2, requires_grad=True)
    value = OrderedDict(a=weight, b=[1, torch.zeros(1)], c=("x", torch.full((1,), 3.0)), d=None)
    found = split_tensors(value, "it", tensors)
    assert found == {
        "a": {"__tensor_of_state__": "it.a"},
        "b": [1, {"__tensor_of_state__": "it.b.1"}],
        "c": ("x", {"__tensor_of_state__": "it.c.1"}),
        "d": None,
    }
    assert list(tensors) == ["it.a", "it.b.1", "it.c.1"]
    assert not tensors["it.a"].requires_grad
    joined = join_tensors(found, tensors)
    assert joined["a"] is tensors["it.a"]
    assert joined["b"] == [1, tensors["it.b.1"]]
    assert joined["c"] == ("x", tensors["it.c.1"])
    assert joined["d"] is None


@pytest.mark.parametrize(
    ("value", "key"),
    [
        pytest.param({0: torch.ones(1), "0": torch.zeros(1)}, "it.0", id="a number and its text"),
        pytest.param({"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}, "it.a.b", id="a name with a dot"),
        pytest.param({"a": [torch.ones(1)], "a.0": torch.zeros(1)}, "it.a.0", id="a place in a list"),
    ],
)
def test_two_tensors_of_one_key_are_refused(value: Any, key: str) -> None:
    with pytest.raises(CheckpointError) as raised:
        split_tensors(value, "it", {})
    assert str(raised.value) == (
        f"two tensors of the state have the key {key}; a key is the path of names and numbers with dots between them: rename one"
    )
    member = torch.nn.Module()
    member.state_dict = lambda: value  # type: ignore[method-assign, assignment]
    with pytest.raises(CheckpointError, match=f"have the key {key}"):
        stateful_state({"it": member})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([1, (2.5, None)], '[1,{"__tuple__":[2.5,null]}]'),
        ({"a": True, "b": "x"}, '{"a":true,"b":"x"}'),
        ({1: "x"}, '{"__pairs__":[[1,"x"]]}'),
        ({"__a": 1}, '{"__pairs__":[["__a",1]]}'),
        (torch.tensor([[1], [2]], dtype=torch.int32), '{"__tensor__":["int32",[2,1],[1,2]]}'),
        (torch.tensor([1 + 2j, 3j]), '{"__tensor__":["complex64",[2],[1.0,2.0,0.0,3.0]]}'),
        (torch.tensor(4j, dtype=torch.complex128), '{"__tensor__":["complex128",[],[0.0,4.0]]}'),
        (torch.zeros(64, dtype=torch.bool), f'{{"__tensor__":["bool",[64],[{",".join(["false"] * 64)}]]}}'),
    ],
)
def test_values_have_the_text_that_checkpoints_hold(value: Any, text: str) -> None:
    assert encode_value(value, "it") == text
    found = decode_value(text)
    assert torch.equal(found, value) if isinstance(value, torch.Tensor) else found == value
    assert type(found) is type(value)


class Mode(str, Enum):
    MIN = "min"


def test_a_string_enum_comes_back_as_its_text() -> None:
    """A schedule that compares its mode with a text goes on as before."""
    found = decode_value(encode_value({"mode": Mode.MIN, Mode.MIN: 1}, "it"))
    assert found == {"mode": "min", "min": 1}
    assert {type(each) for each in (*found, found["mode"])} == {str}


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ([1, {2}], r"it\[1\] is a set; only tensors and plain values can be saved"),
        ({"a": (1, {2})}, r"it.a\[1\] is a set; only tensors and plain values can be saved"),
        ({3: {2}}, r"it\[3\] is a set; only tensors and plain values can be saved"),
        (torch.zeros(3).to_sparse(), r"it is a tensor without numbers of its own \(torch.sparse_coo, cpu\)"),
        (torch.zeros(3, device="meta"), r"it is a tensor without numbers of its own \(torch.strided, meta\)"),
        (torch.zeros(65), "it is a tensor of 65 elements; here a tensor of at most 64 can be saved"),
    ],
)
def test_what_a_checkpoint_cannot_hold_is_named_by_its_place(value: Any, place: str) -> None:
    with pytest.raises(ValueError, match=place):
        encode_value(value, "it")


def test_a_step_that_no_name_has_room_for_is_refused() -> None:
    require_step(10**10 - 1)
    with pytest.raises(
        ValueError, match=r"^step is 10000000000; names of checkpoints have room for steps up to 9999999999: "
    ):
        require_step(10**10)
