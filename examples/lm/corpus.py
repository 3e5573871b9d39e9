"""The corpus: the sources of Python's standard library, as bytes. Every machine with Python has them."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

NOT_SOURCE = {"site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """Bytes in windows of `seq_len` + 1: inputs, and targets shifted by one. digest: SHA-256 of the bytes."""

    data: torch.Tensor  # uint8, one element per byte
    seq_len: int
    digest: str

    def __len__(self) -> int:
        return (len(self.data) - 1) // self.seq_len

    def state_dict(self) -> dict[str, str]:
        """Give what a checkpoint holds of the corpus: which one it is."""
        return {"digest": self.digest}

    def load_state_dict(self, state: dict[str, str]) -> None:
        """Raise SystemExit when the training began with another corpus."""
        if state["digest"] != self.digest:
            raise SystemExit("this training began with other sources than this Python's; use another --checkpoint-dir")

    def batch(self, indices: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Give inputs and targets of some windows: two int64 tensors of shape (len(indices), seq_len)."""
        starts = torch.tensor(indices).unsqueeze(1) * self.seq_len
        windows = self.data[starts + torch.arange(self.seq_len + 1)].long().to(device)
        return windows[:, :-1], windows[:, 1:]


def read_corpus(seq_len: int, max_bytes: int) -> Corpus:
    """Read the first ``max_bytes`` of all modules, sorted by path. The same Python gives the same bytes on every machine."""
    root = Path(sysconfig.get_paths()["stdlib"])
    data = bytearray()
    for path in _sources(root):
        data += path.read_bytes()
        if len(data) >= max_bytes:
            break
    del data[max_bytes:]
    return Corpus(torch.frombuffer(data, dtype=torch.uint8), seq_len, hashlib.sha256(data).hexdigest())


def _sources(folder: Path) -> Iterator[Path]:
    """Give the modules below a folder, sorted by path. Every start of a worker reads them, so it lists no folder that it does not need."""
    with os.scandir(folder) as found:
        folders = {entry.name: entry.is_dir(follow_symlinks=False) for entry in found}
    # The slash puts a folder among the files where its contents belong: after the file of the same name.
    for name in sorted(folders, key=lambda name: name + "/" * folders[name]):
        if folders[name] and name not in NOT_SOURCE:
            yield from _sources(folder / name)
        elif not folders[name] and name.endswith(".py"):
            yield folder / name
