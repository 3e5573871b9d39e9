"""The README's job, the quick start and the tutorial, pasted block by block into a real cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.e2e.conftest import ROOT
from tests.e2e.job_run import JobRun
from tests.e2e.pasted import paste, shell_blocks
from tests.long_runs import LongRun
from tests.unit.docs.pages import page

from elastipod_local.cluster import Cluster


def with_exports(script: str, **values: str) -> str:
    """Give a script whose exports say where things are here."""
    lines = script.splitlines()
    for name, value in values.items():
        (at,) = [number for number, line in enumerate(lines) if line.startswith(f"export {name}=")]
        lines[at] = f"export {name}={value}"
    return "\n".join(lines)


@pytest.mark.timeout(900)
@pytest.mark.long("pages")
def test_the_readmes_job_trains_to_its_end(cluster: Cluster, tmp_path: Path, long_run: LongRun) -> None:
    """As it stands there, after the command that its first line names; the local cluster has its image."""
    (manifest,) = page("README.md").blocks("yaml")
    before = manifest.splitlines()[0].removeprefix("# after: ")
    assert before.startswith("kubectl ")
    (tmp_path / "job.yaml").write_text(manifest)
    job = JobRun(cluster, "lm")
    try:
        paste(f"{before}\nkubectl apply -f {tmp_path}/job.yaml", ROOT, cluster)
        job.until("the README's job to complete", lambda: job.state() == "Completed", 600)
        (samples,) = cluster.shared.glob("*/log")
        printed = paste(f"elastipod audit {samples}", ROOT)
    finally:
        job.delete()
    assert "every one of 3200 samples was trained exactly once over 200 steps" in printed
    long_run.count(steps=200)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_quick_start_ends_with_a_job_that_has_proven_itself(cluster: Cluster) -> None:
    """All of it but building images, which needs Docker: the local cluster has them already."""
    script = shell_blocks("docs/quick-start.md", leave_out=["Build the images", "Clean up"])
    script = script.replace("helm uninstall", "echo helm uninstall")
    try:
        printed = paste(with_exports(script, REGISTRY="docker.io", STORAGE_CLASS="elastipod-shared"), ROOT, cluster)
    finally:
        paste(shell_blocks_of_clean_up(), ROOT, cluster)
    assert "every one of 2400 samples was trained exactly once over 150 steps" in printed
    assert "→ 2" in printed, "the timeline shows the growth"
    assert "Job smoke/smoke" in printed, "why explains the job"


def shell_blocks_of_clean_up() -> str:
    """Give what the page's last section says: it deletes the namespace and leaves the operator to the other tests."""
    others = ["Say where things are", "Build the images", "Install the operator", "Run a smoke job", "Check its data"]
    script = shell_blocks("docs/quick-start.md", leave_out=others)
    assert "helm" not in script
    return script


@pytest.mark.long("pages")
def test_the_tutorials_job_runs_its_script(cluster: Cluster, tmp_path: Path) -> None:
    tutorial = page("docs/tutorial.md")
    _, after = tutorial.blocks("python")
    (manifest,) = tutorial.blocks("yaml")
    (tmp_path / "train.py").write_text(after)
    (tmp_path / "job.yaml").write_text(manifest)
    script = shell_blocks("docs/tutorial.md", leave_out=["Try it without a cluster"])
    # The job runs as soon as one of its pods trains, which may be the second one.
    waits = "kubectl wait --for=condition=Running hpjob/digits-tutorial --timeout=200s\n"
    waits += "kubectl wait --for=condition=Ready pod/digits-tutorial-worker-0 --timeout=200s\n"
    assert script.count("kubectl get hpjob") == 1
    job = JobRun(cluster, "digits-tutorial")
    try:
        printed = paste(script.replace("kubectl get hpjob", f"{waits}kubectl get hpjob"), tmp_path, cluster)
        assert "Job default/digits-tutorial" in printed
        job.until("the tutorial's job to complete", lambda: job.state() == "Completed")
    finally:
        job.delete()
        cluster.kubectl("delete", "configmap", "digits", "--ignore-not-found")
