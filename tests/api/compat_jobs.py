"""What becomes of each manifest in compat/: sizes, pods, environment and warnings, as the field's documents have it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent / "compat"
MANIFESTS = sorted(FOLDER.glob("*.yaml"))
# hyp's own model cannot read affinities to pods, and one such job breaks `hyp list` for its whole namespace.
SPREAD = frozenset({"fsdp-8b", "fsdp-1b"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """sizes: the allowed ones. start: the first one. first, full: pods at the start, and at the largest size.

    nproc: NPROC_PER_NODE in the pod. workers: what the command line makes of it. warnings: part of each, in order.
    """

    sizes: tuple[int, ...]
    start: int
    first: tuple[str, ...]
    full: tuple[str, ...] = ()
    nproc: str = "8"
    workers: int = 8
    warnings: tuple[str, ...] = ()
    spares: tuple[str, ...] = ()
    keeps_pods: bool = False


def _pods(name: str, count: int, begin: int = 0) -> tuple[str, ...]:
    return tuple(f"{name}-{number}" for number in range(begin, count))


def _fixed(job: str, spec: str, count: int, **more: Any) -> Expected:
    return Expected(sizes=(count,), start=count, first=_pods(f"{job}-{spec}", count), **more)


def _elastic(job: str, spec: str, sizes: tuple[int, ...], start: int, **more: Any) -> Expected:
    pods = _pods(f"{job}-{spec}", sizes[-1])
    return Expected(sizes=sizes, start=start, first=pods[:start], full=pods, **more)


EXPECTED = {
    "documents-policy": _elastic("documents-policy", "pod", (4, 6, 8), 4, keeps_pods=True),
    "documents-launcher": _elastic("documents-launcher", "worker", (2, 4, 6, 8), 2, nproc="auto"),
    "documents-both-ways": _elastic(
        "documents-both-ways", "pods", (2, 4), 4,
        warnings=("maxReplicas is 4 but the replicaSpecs add up to 8; the smaller one applies", "replicaDiscreteValues is used"),
    ),
    "documents-two-specs": Expected(
        sizes=(2, 4, 6, 8), start=2, first=_pods("documents-two-specs-base", 2),
        full=(*_pods("documents-two-specs-base", 2), *_pods("documents-two-specs-elastic", 6)),
    ),
    "hyp-1.0": _fixed("hyp-first", "pod", 1, nproc="auto", workers=4),
    "hyp-1.0-retries": _fixed("hyp-first-retries", "pod", 2, nproc="2", workers=2, keeps_pods=True),
    "hyp-1.1-step": _elastic(
        "hyp-step", "pod", (1, 3), 1, nproc="auto", workers=2, keeps_pods=True,
        warnings=("maxReplicas 4 cannot be reached from 1 in steps of 2; the largest size is 3",),
    ),
    "hyp-1.1-values": _elastic(
        "hyp-values", "pod", (2, 4, 8), 2, nproc="auto", workers=2, keeps_pods=True,
        warnings=("the job starts at 2 replicas: 1 as written is not one of the allowed sizes [2, 4, 8]",),
    ),
    "hyp-1.1-all": _elastic("hyp-all", "pod", (2, 4), 2, keeps_pods=True),
    "recipe-elastic": _elastic(
        "recipe-elastic-a1b2c", "2-nodes", (4, 6, 8), 4, keeps_pods=True,
        warnings=("the job starts at 4 replicas: 2 as written is not one of the allowed sizes [4, 6, 8]",),
    ),
    "recipe-static": _fixed("recipe-static-d3e4f", "2-nodes", 2),
    "recipe-trainium": _fixed("recipe-trainium-g5h6i", "1-nodes", 1, nproc="32", workers=32),
    "recipe-hub": _fixed("hub-recipe", "1-nodes", 1),
    "checkpointless-lora": _fixed("llama-lora", "2-nodes", 2),
    "checkpointless-pretrain": _fixed("llama-pretrain", "16-nodes", 16),
    "checkpointless-gpt-lora": _fixed("gpt-lora", "2-nodes", 2),
    "checkpointless-gpt-full": _fixed("gpt-full", "16-node", 16),
    "baseline-lora": _fixed("llama-lora-base", "2-nodes", 2),
    "baseline-pretrain": _fixed("llama-pretrain-base", "16-node", 16),
    "baseline-gpt-lora": _fixed("gpt-lora-base", "2-nodes", 2),
    "baseline-gpt-full": _fixed("gpt-full-base", "2-nodes", 2),
    "log-rules": _fixed("log-rules", "pods", 16),
    "spare-queued": _fixed("spare-queued", "pods", 1, nproc="1", workers=1, spares=("spare-queued-pods-1",)),
    "spare-free": _fixed("spare-free", "pods", 1, nproc="1", workers=1, spares=("spare-free-pods-1",)),
    "fsdp-8b": _fixed("fsdp-8b", "pods", 4),
    "fsdp-1b": _fixed("fsdp-1b", "pods", 2),
    "deaf-trainer": _elastic("deaf-trainer", "worker", (1, 2, 3, 4), 4, nproc="4", workers=4),
    "smoke": _fixed("smoke", "pods", 1, nproc="1", workers=1),
}  # fmt: skip


def job_of(manifest: str) -> dict[str, Any]:
    """Give the job in a manifest."""
    documents = yaml.safe_load_all((FOLDER / f"{manifest}.yaml").read_text(encoding="utf-8"))
    return next(d for d in documents if d["kind"] == "HyperPodPyTorchJob")


def name_of(manifest: str) -> str:
    """Give the name of the job in a manifest."""
    return str(job_of(manifest)["metadata"]["name"])


def namespace_of(manifest: str) -> str:
    """Give where a manifest is applied. Those of hyp's templates say default themselves."""
    return "compat-spread" if manifest in SPREAD else "default"
