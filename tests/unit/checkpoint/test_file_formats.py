"""The files of checkpoints keep their bytes: what older versions wrote is read, and the same state is written as it always was."""

from __future__ import annotations

import base64
import json
import math
import zlib
from typing import Any

import pytest
from tests.unit.checkpoint.save_plans import make_save_plan

from elastipod.checkpoint import chunk_table
from elastipod.checkpoint.chunk import Chunk
from elastipod.checkpoint.chunk_table import expand_runs, unpack_ints
from elastipod.checkpoint.image_header import ImageHeader
from elastipod.checkpoint.image_inventory import ImageInfo
from elastipod.checkpoint.manifest import CheckpointId, FileRecord, Manifest
from elastipod.checkpoint.save_plan import LocalState, SavePlan
from elastipod.errors import CheckpointError
from elastipod.json_records import JsonError, decode, encode

MANIFEST = Manifest(
    CheckpointId(7, 3),
    2,
    {"b.distcp": FileRecord(5, "0000abcd", {"0": "00ff", "128": "0a0b"}), ".metadata": FileRecord(0, "00000000")},
    {"note": [1, None, "ü"], "lr": 0.5},
)
MANIFEST_BYTES = (
    '{"format":2,"step":7,"generation":3,"world_size":2,"files":{".metadata":{"size":0,"crc32":"00000000"},'
    '"b.distcp":{"size":5,"crc32":"0000abcd","parts":{"0":"00ff","128":"0a0b"}}},'
    '"extra":{"note":[1,null,"\\u00fc"],"lr":0.5}}'
)
INDENTED_MANIFEST_BYTES = """{
 "format": 2,
 "step": 7,
 "generation": 3,
 "world_size": 2,
 "files": {
  ".metadata": {
   "size": 0,
   "crc32": "00000000"
  },
  "b.distcp": {
   "size": 5,
   "crc32": "0000abcd",
   "parts": {
    "0": "00ff",
    "128": "0a0b"
   }
  }
 },
 "extra": {
  "note": [
   1,
   null,
   "\\u00fc"
  ],
  "lr": 0.5
 }
}"""

FULL_HEADER = ImageHeader(
    CheckpointId(7, 3), 1, 0, 2, "dddd", 128, "00000000000000ff" * 2, CheckpointId(5, 2), {"optimizer.lr": "0.5"},
    {"note": [1, None]}, True, 9,
)  # fmt: skip
FULL_HEADER_BYTES = (
    '{"format": 3, "step": 7, "generation": 3, "rank": 1, "slot": 0, "world_size": 2, "plan": "dddd", "size": 128, '
    '"sums": "00000000000000ff00000000000000ff", "durable": [5, 2], "values": {"optimizer.lr": "0.5"}, '
    '"extra": {"note": [1, null]}, "wants_durable": true, "save": 9}'
)
BARE_HEADER = ImageHeader(CheckpointId(7, 3), 0, 1, 2, "dddd", 128, "", None, {}, {})
BARE_HEADER_BYTES = (
    '{"format": 3, "step": 7, "generation": 3, "rank": 0, "slot": 1, "world_size": 2, "plan": "dddd", "size": 128, '
    '"sums": "", "durable": null, "values": {}, "extra": {}, "wants_durable": false, "save": 0}'
)

PLAN_BYTES = (
    '{"tensors":[["model.w",["model","w"],"float32",[4,2],4],["model.b",["model","b"],"float32",[],4]],'
    '"divisions":["eJxjYEAFTDhoXPIAAWAACw==","eJwDAAAAAAE="],"division_of":[0,1],"copiers":[[0],[1],[0,1]],'
    '"copied_by":"eJxjYGBgYARiJiAGAAAcAAQ=","writers":"eJxjYGBgYGSAAAAAFAAC",'
    '"values":[["optimizer.groups.0.lr",["optimizer","groups",0,"lr"],0],["rng.0",["rng","0"],0],["rng.1",["rng","1"],1]],'
    '"nodes":[["a",1],["b",1]]}'
)
PLAN_DIGEST = "ac231600706f1dcbea685f0259deb7b4"


def chunk(key: str, shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Chunk:
    return Chunk(key, tuple(key.split(".")), "float32", shape, offsets, sizes, 4 * math.prod(sizes))


def state(rank: int) -> LocalState:
    """A sharded weight, a bias that both ranks have, a common value, and a rank's own."""
    chunks = (chunk("model.w", (4, 2), (2 * rank, 0), (2, 2)), chunk("model.b", (), (), ()))
    values = (
        ("optimizer.groups.0.lr", ("optimizer", "groups", 0, "lr")),
        (f"rng.{rank}", ("rng", str(rank))),
    )
    return LocalState("ab"[rank], chunks, values)


@pytest.mark.parametrize("written", [MANIFEST_BYTES, INDENTED_MANIFEST_BYTES], ids=["now", "by earlier versions"])
def test_a_manifest_is_written_and_read_as_ever(written: str) -> None:
    assert MANIFEST.to_json() == MANIFEST_BYTES
    found = Manifest.from_json(written)
    assert found == MANIFEST
    assert found.files["b.distcp"].checksums == {"0": "00ff", "128": "0a0b"}
    assert found.files[".metadata"].checksums == {}


@pytest.mark.parametrize(
    ("header", "written"), [(FULL_HEADER, FULL_HEADER_BYTES), (BARE_HEADER, BARE_HEADER_BYTES)], ids=["full", "bare"]
)
def test_a_header_is_written_and_read_as_ever(header: ImageHeader, written: str) -> None:
    assert header.to_json() == written
    assert ImageHeader.from_json(written) == header


@pytest.mark.parametrize("lacks", [', "save": 0', ', "wants_durable": false, "save": 0'])
def test_a_header_of_before_these_fields_is_read(lacks: str) -> None:
    older = BARE_HEADER_BYTES.replace(lacks, "")
    assert older != BARE_HEADER_BYTES
    assert ImageHeader.from_json(older) == BARE_HEADER


def test_a_plan_is_written_and_read_as_ever_and_keeps_its_digest() -> None:
    plan = make_save_plan([state(0), state(1)], is_in_memory=True)
    assert (plan.to_json(), plan.digest) == (PLAN_BYTES, PLAN_DIGEST)
    found = SavePlan.from_json(PLAN_BYTES)
    assert (found, found.digest) == (plan, PLAN_DIGEST)


def test_images_and_checkpoints_travel_as_short_rows() -> None:
    info = ImageInfo("node", CheckpointId(7, 3), 1, 0, "dddd", CheckpointId(5, 2), 9)
    assert encode(info) == ["node", 7, 3, 1, 0, "dddd", [5, 2], 9]
    bare = ["node", 7, 3, 1, 0, "dddd", None, 0]
    assert decode(ImageInfo, bare) == ImageInfo("node", CheckpointId(7, 3), 1, 0, "dddd")


@pytest.mark.parametrize(
    ("written", "told"),
    [
        pytest.param({"step": "7"}, "step is '7', not a whole number", id="a number as a text"),
        pytest.param({"step": True}, "step is True, not a whole number", id="true"),
        pytest.param({"world_size": 2.0}, "world_size is 2.0, not a whole number", id="a fraction"),
        pytest.param({"files": []}, "files is a list of 0, not an object", id="a list of files"),
        pytest.param({"files": {"a": {"crc32": "0"}}}, "files.a.size is missing", id="a file without a size"),
        pytest.param({"files": {"a": {"size": 1, "crc32": 2}}}, "files.a.crc32 is 2, not a text", id="a checksum as a number"),
        pytest.param({"files": {"../a": {"size": 1, "crc32": ""}}}, "outside its own directory", id="a file elsewhere"),
        pytest.param({"extra": None}, "extra is null, not an object", id="null"),
    ],
)  # fmt: skip
def test_a_manifest_that_is_none_names_the_field(written: dict[str, Any], told: str) -> None:
    with pytest.raises(JsonError, match=told):
        Manifest.from_json(json.dumps(json.loads(MANIFEST_BYTES) | written))


def test_a_manifest_of_another_version_is_no_damage() -> None:
    with pytest.raises(CheckpointError, match="its format is 3, this library reads 2"):
        Manifest.from_json('{"format": 3, "steps": {}}')


@pytest.mark.parametrize(
    ("written", "told"),
    [
        pytest.param({"sums": "0"}, "sums are malformed", id="sums"),
        pytest.param({"format": 2}, "format is 2, this library reads 3", id="an older version"),
        pytest.param({"durable": [5]}, "durable is a list of 1, not a list of 2", id="half an identity"),
        pytest.param({"durable": [5, None]}, "durable.generation is null, not a whole number", id="no generation"),
    ],
)
def test_a_header_that_is_none_names_the_field(written: dict[str, Any], told: str) -> None:
    with pytest.raises(JsonError, match=told):
        ImageHeader.from_json(json.dumps(json.loads(FULL_HEADER_BYTES) | written))


@pytest.mark.parametrize(
    ("written", "told"),
    [
        pytest.param({"tensors": [["w", ["w"], 5, [], 4]]}, "tensors.0.dtype is 5, not a text", id="a type"),
        pytest.param({"division_of": [0, 2]}, "division_of names a number beyond the 2 divisions", id="a division"),
        pytest.param({"division_of": [0]}, "division_of has 1 entries for 2 tensors", id="too few divisions"),
        pytest.param(
            {"writers": "eJxj"}, "writers cannot be read: no packed numbers: they are torn", id="torn numbers"
        ),
        pytest.param({"writers": "YQ=="}, "writers cannot be read: no packed numbers", id="no numbers"),
        pytest.param({"writers": 5}, "writers cannot be read", id="a number"),
        pytest.param({"nodes": [["a"]]}, "nodes cannot be read", id="a run without a length"),
        pytest.param(
            {"nodes": [["a", 10**15]]}, "nodes cannot be read: they stand for more than", id="a very long run"
        ),
        pytest.param(
            {"values": [["v", ["v"]]]}, "values.0 is a list of 2, not a list of 3", id="a value without a rank"
        ),
    ],
)
def test_a_plan_that_is_none_names_the_field(written: dict[str, Any], told: str) -> None:
    with pytest.raises(JsonError, match=told):
        SavePlan.from_json(json.dumps(json.loads(PLAN_BYTES) | written))


def test_packed_numbers_may_not_unpack_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_table, "MAX_PACKED_BYTES", 1 << 10)
    assert len(unpack_ints("q", base64.b64encode(zlib.compress(bytes((1 << 10) - 8))).decode())) == 127
    with pytest.raises(ValueError, match="more than 1024 bytes"):
        unpack_ints("q", base64.b64encode(zlib.compress(bytes(1 << 20))).decode())


def test_run_lengths_may_not_expand_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_table, "MAX_EXPANDED_RUNS", 3)
    assert expand_runs([("a", 1), ("b", 2)]) == ("a", "b", "b")
    with pytest.raises(ValueError, match="more than 3 values"):
        expand_runs([("a", 2), ("b", 2)])
