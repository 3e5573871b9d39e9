"""How a donor describes its state: what it says, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from elastipod.in_memory.members import Content, Members, TensorShape
from elastipod.in_memory.state_manifest import BadManifest, StateManifest, describe, read_manifest

GOOD = {
    "v": 3,
    "tensors": [["model.weight", "float32", [2, 3]]],
    "values": "{}",
    "digests": {},
    "uncompared": {"model.weight": "00ff"},
}
NOTHING = Members({"model": nn.Module()})


def test_a_description_is_read_as_it_was_written() -> None:
    shapes = [TensorShape("model.weight", "float32", (2, 3))]
    assert read_manifest(json.dumps(GOOD)) == StateManifest(shapes, "{}", {}, {"model.weight": "00ff"})
    content = Content({"a": torch.zeros(2, dtype=torch.bfloat16), "b": torch.tensor(1)}, "[1]")
    told = read_manifest(describe(NOTHING, content, {"a": "00ff"}))
    assert (told.shapes, told.values, told.digests) == (content.shapes(), "[1]", {"a": "00ff"})


def test_the_description_of_a_state_is_a_json_object() -> None:
    model = nn.BatchNorm1d(1, affine=False, track_running_stats=True)
    model.register_parameter("weight", nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16)))
    members = Members({"model": model})
    told = json.loads(describe(members, members.content(), {"model.weight": "00ff"}))
    buffers = ["model.running_mean", "model.running_var", "model.num_batches_tracked"]
    assert told == {
        "v": 3,
        "tensors": [
            ["model.weight", "bfloat16", [2, 3]], *([each, "float32", [1]] for each in buffers[:2]), [buffers[2], "int64", []],
        ],
        "values": told["values"],
        "digests": {"model.weight": "00ff"},
        "uncompared": dict(zip(buffers, [f"{0:016x}", f"{0x3F800000:016x}", f"{0:016x}"], strict=True)),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param("", "cannot be read: JSONDecodeError", id="nothing"),
        pytest.param("[]", "cannot be read: TypeError", id="no object"),
        pytest.param("[" * 5000, "cannot be read: RecursionError", id="nested too deeply"),
        pytest.param("{}", "cannot be read: KeyError", id="no fields"),
        pytest.param(json.dumps({**GOOD, "v": 1}), "has version 1; all ranks need the same", id="another version"),
        pytest.param(json.dumps({**GOOD, "tensors": [["w", "nn", [1]]]}), "'nn' is no type", id="no type of a tensor"),
        pytest.param(json.dumps({**GOOD, "tensors": [["w", "float32", ["x"]]]}), "cannot be read", id="no size"),
        pytest.param(json.dumps({**GOOD, "uncompared": []}), "cannot be read: AttributeError", id="no digests"),
        pytest.param(json.dumps({**GOOD, "uncompared": {"b": "1"}}), "digests of tensors that", id="an unknown tensor"),
    ],
)
def test_a_description_that_cannot_be_read_is_refused(text: str, said: str) -> None:
    with pytest.raises(BadManifest, match=said):
        read_manifest(text)
