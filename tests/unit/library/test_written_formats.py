"""What the library writes for later versions and for others to read, word by word and byte by byte."""

from __future__ import annotations

import json
import os
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.library.sample_logs import PLAN

from elastipod.audit import sample_log
from elastipod.audit.sample_log import SampleLog
from elastipod.batches.learning_rate import BatchScaledRate
from elastipod.checkpoint import Resume
from elastipod.data import ElasticBatches, tokens_command
from elastipod.data.mixture import Mixture
from elastipod.data.shards import Shards, shard_lengths
from elastipod.data.stream_lanes import StreamLanes
from elastipod.data.tensor_file import write_tensors
from elastipod.errors import DataError, SampleLogError
from elastipod.worker_file import EventLevel, WorkerFile

MIXTURE = Mixture({"web": 10, "code": Shards([3, 4], lanes=2)}, {"web": 6, "code": 2}, samples=40, seed=2)
LOG = """\
{"kind":"start","generation":3,"rank":1,"world_size":2,"resumed_step":4,"resumed_generation":2,"dataset_size":50,"epochs":2,\
"global_batch":8,"t":12.5}
{"kind":"loaded","step":4,"optimizer_norm":0.5}
{"kind":"step","step":5,"epoch":0,"samples":[7,9,3,8],"t":12.5,"loss":2.5}
{"kind":"step","step":6,"epoch":0,"ids":[[20,24]],"t":12.5,"loss":null}
{"kind":"step","step":7,"epoch":0,"samples":[],"t":12.5,"loss":null}
{"kind":"done","step":7,"t":12.5,"loss":2.25}
{"kind":"saved","step":7,"t":12.5,"optimizer_norm":null}
{"kind":"end","step":7,"why":"drained","t":12.5}
"""


def test_a_sample_log_is_the_text_of_the_contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastipod.audit.sample_log.time.time", lambda: 12.5)
    batch = PLAN.batch(5, 1, 2)
    resume = Resume(4, 2, 1, tmp_path)
    with SampleLog(tmp_path, PLAN, generation=3, rank=1, world_size=2, resume=resume) as log:
        log.loaded(4, 0.5)
        log.step(replace(batch, indices=(7, 9, 3, 8)), loss=2.5)
        log.step(replace(batch, step=6, indices=(20, 21, 22, 23)))
        log.step(replace(batch, step=7, indices=()))
        log.done(7, 2.25)
        log.saved(7)
        log.end(7, "drained")
    assert log.path.read_text() == LOG
    assert log.path.stat().st_mode & 0o777 == 0o644 & ~umask()


def umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def test_a_log_of_a_mixture_names_its_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastipod.audit.sample_log.time.time", lambda: 12.5)
    with SampleLog(tmp_path, ElasticBatches.over(MIXTURE, 8, epochs=3), generation=1, rank=0, world_size=1) as log:
        pass
    assert log.path.read_text() == (
        '{"kind":"start","generation":1,"rank":0,"world_size":1,"resumed_step":0,"resumed_generation":0,"dataset_size":40,'
        '"epochs":3,"global_batch":8,"t":12.5,"sources":[["web",10,90],["code",7,30]]}\n'
    )


def test_the_end_of_a_log_is_on_disk_after_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[str, list[str]]] = []

    def sync(descriptor: int) -> None:
        synced.append((os.readlink(f"/proc/self/fd/{descriptor}"), log.path.read_text().splitlines()))

    monkeypatch.setattr(os, "fsync", sync)
    with SampleLog(tmp_path, PLAN, generation=1, rank=0, world_size=1) as log:
        log.done(1)
        assert synced == [], "a world that begins waits for no disk"
        log.end(1, "completed")
    assert [path for path, _ in synced] == [str(log.path), str(tmp_path)], "the file, then its name"
    _, _, end = synced[0][1]
    assert json.loads(end)["why"] == "completed"


def test_a_rank_whose_samples_another_one_logs_has_no_file(tmp_path: Path) -> None:
    with SampleLog(tmp_path / "logs", PLAN, generation=1, rank=0, world_size=1, writes=False) as log:
        log.step(PLAN.batch(1, 0, 1))
        log.end(1, "completed")
    log.sync()
    assert list(tmp_path.iterdir()) == []


def test_a_log_that_cannot_be_written_says_which_and_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = SampleLog(tmp_path, PLAN, generation=1, rank=0, world_size=1)
    with pytest.raises(SampleLogError) as again:
        SampleLog(tmp_path, PLAN, generation=1, rank=0, world_size=1)
    assert str(again.value) == f"{log.path} exists: another run logged there; give each run a directory of its own"
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, line: 5)
        with pytest.raises(SampleLogError, match=rf"^only 5 of \d\d bytes went into {log.path}; is its disk full\?$"):
            log.done(1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(SampleLogError, match=f"^cannot put the sample log {log.path} on disk: Input/output error$"):
            log.sync()
    with monkeypatch.context() as patch:
        patch.setattr(sample_log, "sync_directory", fail)
        with pytest.raises(SampleLogError, match=f"^cannot put the sample log {log.path} on disk: Input/output error$"):
            log.sync()
    log.close()
    with pytest.raises(SampleLogError, match=f"^the sample log {log.path} is closed$"):
        log.sync()
    (tmp_path / "file").touch()
    with pytest.raises(
        SampleLogError, match=rf"^cannot create the sample log's folder {tmp_path}/file/logs: Not a directory$"
    ):
        SampleLog(tmp_path / "file" / "logs", PLAN, generation=1, rank=0, world_size=1)
    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(SampleLogError, match=r"^cannot write the sample log .*-00000\.jsonl: Input/output error$"):
        SampleLog(tmp_path, PLAN, generation=2, rank=0, world_size=1)


def fail(*_: object) -> None:
    raise OSError(5, "Input/output error")


def test_positions_and_descriptions_are_those_of_earlier_checkpoints() -> None:
    """Keys and values are compared with those of the running job, so a job could not be resumed with others."""
    shards = {
        "kind": "shards", "shards": 2, "size": 7, "lengths": zlib.crc32(b"[3, 4]"), "lanes": 2, "seed": 0, "shuffle": True,
    }  # fmt: skip
    assert ElasticBatches(20, 3, seed=5, epochs=2, shuffle=False).state_dict(7) == {
        "v": 1, "step": 7, "samples": 20, "epochs": 2, "source": {"kind": "map", "size": 20, "seed": 5, "shuffle": False},
    }  # fmt: skip
    source = ElasticBatches.over(MIXTURE, 8).state_dict(0)["source"]
    web = source["sources"]["web"].pop("seed")
    assert source == {
        "kind": "mixture", "samples": 40, "order": ["web", "code"], "seed": 2, "weights": {"web": 3, "code": 1},
        "sources": {"web": {"kind": "map", "size": 10, "shuffle": True}, "code": shards},
    }  # fmt: skip
    assert web == 0x975835DE1C9756CE
    rate = BatchScaledRate("linear", 64, warm_up_steps=4)
    rate.resized(0, 64)
    rate.resized(10, 192)
    assert rate.state_dict() == {"v": 1, "since": 10, "from": 1.0, "to": 3.0, "global_batch": 192}
    lanes: StreamLanes[int] = StreamLanes(lambda lane: pytest.fail("opened"), 2, global_batch=6)
    assert lanes.state_dict(0) == {"v": 1, "lanes": 2, "global_batch": 6, "step": 0, "positions": {}}


def test_the_index_of_shards_is_one_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = tmp_path / "index.json"
    assert shard_lengths(lambda shard, first: range(shard), 3, index) == [0, 1, 2]
    assert index.read_text() == '{"v": 1, "lengths": [0, 1, 2]}'
    assert list(tmp_path.iterdir()) == [index]
    index.unlink()
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(DataError, match=f"^cannot write the index of shards {index}: Input/output error$"):
        shard_lengths(lambda shard, first: range(shard), 3, index)
    assert list(tmp_path.iterdir()) == []
    index.mkdir()
    with pytest.raises(DataError, match=f"^cannot read the index of shards {index}: Is a directory$"):
        shard_lengths(lambda shard, first: range(shard), 3, index)


def test_a_folder_that_cannot_hold_the_index_is_found_before_anything_is_counted(tmp_path: Path) -> None:
    index = tmp_path / "not-there" / "index.json"
    with pytest.raises(DataError, match=f"^cannot write the index of shards {index}: No such file or directory$"):
        shard_lengths(lambda shard, first: pytest.fail("counted"), 3, index)
    with pytest.raises(ZeroDivisionError):
        shard_lengths(lambda shard, first: [1 // 0], 3, tmp_path / "index.json")
    assert list(tmp_path.iterdir()) == [], "what a failed count has begun"


def test_a_token_file_is_its_header_and_its_tokens(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("ab")
    (tmp_path / "b").write_text("c")
    tokens_command.build(tmp_path / "out", [tmp_path / "a", tmp_path / "b"], vocabulary=300, end_of_document=299)
    tokens = struct.pack("<5H", 97, 98, 299, 99, 299)
    fields = struct.pack("<8sIIQQQI", b"ELPTOKEN", 1, 2, 5, 300, 2, zlib.crc32(tokens))
    header = fields + struct.pack("<I", zlib.crc32(fields))
    assert (tmp_path / "out").read_bytes() == header.ljust(64, b"\0") + tokens


@pytest.mark.parametrize(
    ("tensors", "kind", "names"),
    [
        ([torch.arange(3, dtype=torch.int16), torch.ones(2, 1)], "list", []),
        ((torch.arange(3, dtype=torch.int16), torch.ones(2, 1)), "tuple", []),
        ({"a": torch.arange(3, dtype=torch.int16), "b": torch.ones(2, 1)}, "dict", ["a", "b"]),
    ],
)
def test_a_cached_batch_is_the_documented_file(tmp_path: Path, tensors: Any, kind: str, names: list[str]) -> None:
    write_tensors(tmp_path / "file", tensors, "the key")
    data = (tmp_path / "file").read_bytes()
    magic, length, header_crc32, crc32 = struct.unpack_from("<8sIII", data)
    header = data[20 : 20 + length]
    assert (magic, header_crc32, crc32) == (b"ELPBATCH", zlib.crc32(header), zlib.crc32(data[20 + length :]))
    assert json.loads(header) == {
        "key": "the key", "kind": kind, "names": names,
        "tensors": [{"dtype": "int16", "shape": [3], "offset": 0}, {"dtype": "float32", "shape": [2, 1], "offset": 64}],
    }  # fmt: skip
    first = -(-(20 + length) // 64) * 64
    assert len(data) == first + 128
    assert data[first:] == struct.pack("<3h", 0, 1, 2).ljust(64, b"\0") + struct.pack("<2f", 1, 1).ljust(64, b"\0")


def test_every_word_of_a_worker_file_has_its_place(tmp_path: Path) -> None:
    with WorkerFile.create(tmp_path / "page", 1) as page:
        page.set_event(EventLevel.DRAIN, 123.5, leaves=False, kept=True)
        page.report(0, step=3, samples=96, loss=0.25, samples_per_s=8.0, world_size=4, time=1000.0, total_steps=500)
        page.set_stacks_signal(0, 12)
        page.set_checks_events(0)
        assert page.stacks_signal(0) == 12
        assert page.stacks_path(0) == f"{tmp_path}/page.stacks-0"
        assert page.kept() is True
    data = (tmp_path / "page").read_bytes()
    assert data[:64] == struct.pack("<4sIIIdIIQ", b"ELPW", 1, 1, 1, 123.5, 1, 2, 500).ljust(64, b"\0")
    assert data[64:] == struct.pack("<IIQQddIIdII", 0, 2, 3, 96, 0.25, 8.0, 4, 12, 1000.0, 0, 1)


def test_an_event_may_change_until_the_next_run(tmp_path: Path) -> None:
    with WorkerFile.create(tmp_path / "page", 2) as agent, WorkerFile.open(tmp_path / "page") as worker:
        agent.set_event(EventLevel.DRAIN, 5.0, leaves=False, kept=False)
        agent.set_deadline(9.0)
        agent.set_leaves()
        assert (worker.event(), worker.leaves(), worker.kept()) == ((1, 9.0), True, False)
        for rank in (0, 1):
            worker.acknowledge(rank)
            worker.set_in_checkpoint(rank, True)
        agent.reset_run()
        assert (worker.event(), worker.leaves(), worker.kept()) == ((0, 0.0), None, None)
        found = [(worker.acknowledged(rank), worker.is_in_checkpoint(rank)) for rank in (0, 1)]
        assert found == [(False, False)] * 2
