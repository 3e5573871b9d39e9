"""Tokens in Megatron's format: every window at its place, and files that do not fit together are refused."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path

import pytest
import torch

from elastipod import DataError, ElasticBatches, MegatronTokens, TokenWindows

DOCUMENTS = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10, 11, 12, 13]]
TYPES = {1: "B", 3: "h", 4: "i", 5: "q", 8: "H"}


def write(prefix: Path, kind: int = 8, *, modes: bytes = b"") -> Path:
    """Write documents of one sequence each, as Megatron's builder does."""
    lengths = [len(each) for each in DOCUMENTS]
    width = struct.calcsize(TYPES.get(kind, "H"))
    starts = [width * sum(lengths[:at]) for at in range(len(lengths))]
    tokens = [token for each in DOCUMENTS for token in each]
    prefix.with_suffix(".bin").write_bytes(struct.pack(f"<{len(tokens)}{TYPES.get(kind, 'H')}", *tokens))
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, kind, 3, 4) + struct.pack("<3i3q4q", *lengths, *starts, 0, 1, 2, 3)
    prefix.with_suffix(".idx").write_bytes(index + modes)
    return prefix


@pytest.mark.parametrize("kind", sorted(TYPES))
@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_windows_run_over_all_documents(tmp_path: Path, kind: int, suffix: str) -> None:
    tokens = MegatronTokens(f"{write(tmp_path / 'corpus', kind)}{suffix}")
    assert (len(tokens), tokens.header.documents) == (13, 3)
    windows = TokenWindows(pickle.loads(pickle.dumps(tokens)), 4)
    assert [windows[at].tolist() for at in range(len(windows))] == [
        [1, 2, 3, 4, 5],
        [5, 6, 7, 8, 9],
        [9, 10, 11, 12, 13],
    ]
    assert windows[0].dtype == torch.int64


def test_every_rank_of_any_world_reads_its_part_from_a_position(tmp_path: Path) -> None:
    windows = TokenWindows(MegatronTokens(write(tmp_path / "corpus")), 1)
    plan = ElasticBatches(len(windows), 4)
    resumed = plan.resumed(plan.state_dict(1))
    read = [
        int(windows[index][0]) for rank in range(3) for batch in resumed.iterate(rank, 3) for index in batch.indices
    ]
    before = [int(windows[index][0]) for index in plan.batch(1, 0, 1).indices]
    assert sorted(before + read) == list(range(1, 13))


def test_tokens_of_16_bits_have_no_sign(tmp_path: Path) -> None:
    prefix = write(tmp_path / "corpus")
    prefix.with_suffix(".bin").write_bytes(struct.pack("<13H", *range(65523, 65536)))
    assert MegatronTokens(prefix).read(11, 2).tolist() == [65534, 65535]


def test_a_multimodal_index_is_read(tmp_path: Path) -> None:
    assert len(MegatronTokens(write(tmp_path / "corpus", modes=bytes(3)))) == 13


@pytest.mark.parametrize(
    ("name", "damage", "problem"),
    [
        pytest.param("corpus.idx", lambda raw: b"other" + raw[5:], "is no index of Megatron's format", id="other"),
        pytest.param("corpus.idx", lambda raw: raw[:20], "is no index of Megatron's format", id="short header"),
        pytest.param(
            "corpus.idx", lambda raw: raw[:9] + b"\2" + raw[10:], "version 2 and tokens of type 8", id="version"
        ),
        pytest.param("corpus.idx", lambda raw: raw[:17] + b"\6" + raw[18:], "tokens of type 6", id="floats"),
        pytest.param("corpus.idx", lambda raw: raw[:-1], "was cut off or changed: 3 sequences take", id="cut off"),
        pytest.param(
            "corpus.bin", lambda raw: raw[:-2], "has 24 bytes, but by corpus.idx its tokens take 26", id="tokens"
        ),
    ],
)
def test_files_that_do_not_fit_together_are_refused(tmp_path: Path, name: str, damage: object, problem: str) -> None:
    assert callable(damage)
    prefix = write(tmp_path / "corpus")
    path = tmp_path / name
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=problem):
        MegatronTokens(prefix)


@pytest.mark.parametrize("missing", ["bin", "idx"])
def test_a_missing_file_is_named(tmp_path: Path, missing: str) -> None:
    prefix = write(tmp_path / "corpus")
    prefix.with_suffix(f".{missing}").unlink()
    with pytest.raises(DataError, match=rf"cannot read .*corpus\.{missing}: No such file"):
        MegatronTokens(prefix)
