"""Mistakes to plant in what knows that a pod has several workers."""

from __future__ import annotations

from typing import Any

import pytest

from elastipod_operator import pod_creation
from elastipod_operator.agents.command_builder import CommandBuilder
from elastipod_operator.kube import pods


def tell_one_address_for_each_pod(patch: pytest.MonkeyPatch) -> None:
    def rank_ips(self: CommandBuilder) -> list[dict[str, Any]]:
        return [{"rank": rank, "ip": pod.ip} for rank, pod in enumerate(self._members)]

    patch.setattr(CommandBuilder, "_rank_ips", property(rank_ips))


def make_pods_with_an_edited_worker_count(patch: pytest.MonkeyPatch) -> None:
    real = pods.pod_manifest

    def manifest(job: Any, spec: Any, *rest: Any, **more: Any) -> Any:
        return real(
            job,
            {**spec, "nprocPerNode": str(2 * int(spec["nprocPerNode"]))} if job.pending_edits else spec,
            *rest,
            **more,
        )

    patch.setattr(pod_creation, "pod_manifest", manifest)
