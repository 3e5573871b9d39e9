"""Writing the weights of a durable checkpoint to one safetensors file, in one process without a process group."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from elastipod.checkpoint.file_source import FileSource
from elastipod.checkpoint.load_plan import LoadPlan, list_some
from elastipod.checkpoint.manifest import CheckpointId, DamagedCheckpoint
from elastipod.checkpoint.save_arguments import open_store
from elastipod.checkpoint.store import COMPLETE, CheckpointStore
from elastipod.checkpoint.training_state import MODEL
from elastipod.distribution import install_advice
from elastipod.errors import CheckpointError
from elastipod.synced_files import sync_directory

_AVERAGED, _COUNT = (
    "module.",
    "n_averaged",
)  # what torch's AveragedModel adds to the names of the model that it averages


@dataclass(frozen=True, slots=True)
class ExportedWeights:
    """What was written. left_out: keys of the model's plain values, which such a file cannot hold."""

    path: Path
    step: int
    num_tensors: int
    num_bytes: int
    left_out: tuple[str, ...]


def export_weights(
    source: str | os.PathLike[str],
    to: str | os.PathLike[str],
    *,
    step: int | None = None,
    model: str | None = None,
    replace: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> ExportedWeights:
    """Write weights and buffers, whole and under the model's own names, to a safetensors file, atomically.

    source: the directory or address of the checkpoints, or the folder of one of them. step: by default the newest. model: one of
    several that were saved together, by its name; the average of an AveragedModel gets the names of the model itself. replace:
    overwrite an existing file. storage_options: as for `CheckpointManager`.
    Nothing is claimed or changed at the source. The weights must fit into host memory. Raises CheckpointError, also when the package
    safetensors is missing; no file is left behind then.
    """
    save_file = _save_file()
    target = Path(to)
    if target.exists() and not replace:
        raise CheckpointError(f"{target} exists; name another file, or replace it (--force, replace=True)")
    store, chosen = _find(os.fspath(source), step, storage_options or {})
    try:
        weights, left_out = _read(store, chosen, model)
    except DamagedCheckpoint as error:
        others = ", ".join(str(each.step) for each in store.list_complete() if each != chosen) or "none"
        raise CheckpointError(
            f"the checkpoint of step {chosen.step} is damaged: {error}; other steps: {others}"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{store.location(chosen)} cannot be read: {error.strerror or error}") from error
    _write(save_file, weights, target, chosen.step)
    return ExportedWeights(
        target, chosen.step, len(weights), sum(each.nbytes for each in weights.values()), tuple(left_out)
    )


def _save_file() -> Any:
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise CheckpointError(
            f"exporting needs the package safetensors ({error}); {install_advice('export')}"
        ) from error
    return save_file


def _find(source: str, step: int | None, options: Mapping[str, Any]) -> tuple[CheckpointStore, CheckpointId]:
    """Return the store and the checkpoint that is meant. Raises CheckpointError."""
    parent, _, name = source.rstrip("/").rpartition("/")
    named = COMPLETE.fullmatch(name)
    store = open_store((parent or ("/" if source.startswith("/") else ".")) if named else source, options)
    try:
        there = store.list_complete()
    except OSError as error:
        raise CheckpointError(f"{store.name} cannot be read: {error.strerror or error}") from error
    if named:
        wanted = CheckpointId(int(named[1]), int(named[2]))
        found = [each for each in there if each == wanted and step in (None, each.step)]
    else:
        found = [each for each in there if step in (None, each.step)]
    if not found:
        what = f"no checkpoint of step {step}" if step is not None else "no complete checkpoint"
        steps = ", ".join(str(each.step) for each in reversed(there)) or "none"
        raise CheckpointError(f"{source} has {what}; complete steps: {steps}")
    return store, found[0]


def _read(store: CheckpointStore, chosen: CheckpointId, model: str | None) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return the weights by name, and the keys of values. Raises DamagedCheckpoint, OSError, CheckpointError."""
    manifest = store.manifest(chosen)
    if problems := store.find_problems(manifest, sorted(manifest.files)):
        raise DamagedCheckpoint(problems[0])
    source = FileSource(store, manifest, rank=0)
    names, left_out = _names(source.metadata, model)
    saved = source.metadata.state_dict_metadata
    weights: dict[str, torch.Tensor] = {}
    for key, name in names.items():
        entry = saved[key]
        assert isinstance(entry, TensorStorageMetadata)
        weights[name] = torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
    prefix = f"{MODEL}."
    filling = LoadPlan(
        {MODEL: {key.removeprefix(prefix): weights[name] for key, name in names.items()}}, source, strict=False
    )
    if problems := source.fill(filling.targets()):
        raise DamagedCheckpoint(problems[0])
    return weights, left_out


def _names(metadata: Metadata, model: str | None) -> tuple[dict[str, str], list[str]]:
    """Return the names of the wanted tensors by their keys, and the keys of the model's values. Raises CheckpointError."""
    prefix = f"{MODEL}.{model}." if model else f"{MODEL}."
    keys = [key for key in metadata.state_dict_metadata if key.startswith(prefix)]
    tensors = [key for key in keys if isinstance(metadata.state_dict_metadata[key], TensorStorageMetadata)]
    if not tensors:
        first = sorted({key.split(".")[1] for key in metadata.state_dict_metadata if key.startswith(f"{MODEL}.")})
        raise CheckpointError(
            f"the checkpoint has no model {model}; its weights begin with {list_some(first) or 'nothing'}"
        )
    names = {key: key.removeprefix(prefix) for key in tensors}
    if _COUNT in names.values() and all(name == _COUNT or name.startswith(_AVERAGED) for name in names.values()):
        names = {key: name.removeprefix(_AVERAGED) for key, name in names.items() if name != _COUNT}
    return names, sorted(set(keys) - set(tensors))


def _write(save_file: Any, weights: dict[str, torch.Tensor], target: Path, step: int) -> None:
    temporary = target.with_name(f".{target.name}.{socket.gethostname()}.{os.getpid()}.partial")
    try:
        save_file(weights, temporary, metadata={"format": "pt", "step": str(step)})
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
        sync_directory(target.parent)
    except Exception as error:  # the package has errors of its own for types of numbers and for files
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise CheckpointError(f"cannot write {target}: {reason}") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
