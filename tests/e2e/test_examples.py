"""The examples' own manifests on a real cluster."""

from __future__ import annotations

import pytest
from tests.e2e.conftest import ROOT
from tests.e2e.job_run import JobRun

from elastipod_local.cluster import Cluster


@pytest.mark.long("variants")
def test_examples_train_as_they_are(cluster: Cluster) -> None:
    """As users apply them, but that the short one, which may take all nodes first, is shorter still."""
    digits, fsdp2 = JobRun(cluster, "digits"), JobRun(cluster, "lm-fsdp2")
    texts = [(ROOT / "examples" / manifest).read_text() for manifest in ("digits/job.yaml", "lm/job-fsdp2.yaml")]
    assert "--epochs=20" in texts[0]
    try:
        for text in texts:
            cluster.kubectl("apply", "-f", "-", input=text.replace("--epochs=20", "--epochs=2"))
        digits.until("digits to complete", lambda: digits.state() == "Completed")
        fsdp2.until("steps of the sharded model", lambda: fsdp2.step() > 5)
    finally:
        for job in (digits, fsdp2):
            job.delete(wait=False)
        for job in (digits, fsdp2):
            job.delete()
