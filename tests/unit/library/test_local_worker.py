"""What a process reads of its environment: its generation, its job, and the wheel that it was installed from."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from elastipod import distribution, elastic_event
from elastipod.local_worker import (
    generation_from_env,
    job_from_env,
    local_worker,
    run_id_from_env,
    store_generation,
)
from elastipod.progress import report
from elastipod.worker_file import WORKER_FILE_ENV, WorkerFile

NAMES = ("ELASTIPOD_GENERATION", "JOB_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")


@pytest.mark.parametrize(
    ("values", "generation", "of_store"),
    [
        (("7", "3", "2"), 7, 7),
        (("", "3", "2"), 4, 4),
        (("", "0", "2"), 1, 1),
        (("", "", "2"), None, 3),
        (("", "", "0"), None, 1),
    ],
)
def test_the_launchers_generation_comes_before_counts_of_restarts(
    monkeypatch: pytest.MonkeyPatch, values: tuple[str, ...], generation: int | None, of_store: int
) -> None:
    for name, value in zip(NAMES, values, strict=True):
        monkeypatch.setenv(name, value)
    assert (generation_from_env(), store_generation()) == (generation, of_store)


def test_outside_a_pod_nothing_is_known_and_nothing_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NAMES, "ELASTIPOD_RUN_ID", "ELASTIPOD_JOB", WORKER_FILE_ENV):
        monkeypatch.delenv(name, raising=False)
    assert (generation_from_env(), store_generation()) == (None, 1)
    assert (run_id_from_env(), job_from_env()) == ("", "")
    assert local_worker() is None
    report(1, 2)


def test_a_rank_of_a_launcher_inside_a_worker_trains_without_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "worker-file"
    WorkerFile.create(path, 1).close()
    monkeypatch.setenv(WORKER_FILE_ENV, str(path))
    monkeypatch.delenv("ELASTIPOD_LOCAL_RANK", raising=False)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("HYPERPOD_SIGNAL_COORDINATION", "disabled")
    assert local_worker() is None
    report(1, 2)
    assert not elastic_event.elastic_event_detected()
    assert local_worker() is None
    elastic_event.reset_elastic_event()
    (record,) = caplog.records
    assert "knows no local rank 3" in record.getMessage()
    assert "hyperpodrun --nproc-per-node" in record.getMessage()


@pytest.mark.parametrize(
    ("own", "torchs", "slot"), [("2", "0", 2), ("", "1", 1), ("", "", 0)], ids=["virtual", "real", "none"]
)
def test_a_report_goes_into_the_slot_of_this_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, torchs: str, slot: int
) -> None:
    """LOCAL_RANK is 0 on all workers of a pod with --virtual-local-rank."""
    for name, value in {"ELASTIPOD_LOCAL_RANK": own, "LOCAL_RANK": torchs, "WORLD_SIZE": "6"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(WORKER_FILE_ENV, str(tmp_path / "worker-file"))
    with WorkerFile.create(tmp_path / "worker-file", 3) as file:
        report(4, 80, 0.5, 10.0, 100)
        told = [file.progress(each) for each in range(3)]
        assert [each is not None for each in told] == [each == slot for each in range(3)]
        found = told[slot]
        assert found is not None
        assert (found.step, found.samples, found.loss, found.samples_per_s) == (4, 80, 0.5, 10.0)
        assert (found.world_size, found.total_steps) == (6, 100)
        monkeypatch.delenv("WORLD_SIZE")
        report(5, 100)
        found = file.progress(slot)
        assert found is not None
        assert (found.step, found.loss, found.samples_per_s, found.world_size) == (5, None, None, 1)


@pytest.mark.parametrize(
    ("installed", "named"),
    [
        ([], "elastipod"),
        (["elastipod"], "elastipod"),
        (["elastipod-agent"], "elastipod-agent"),
        (["elastipod", "elastipod-agent"], "elastipod"),
    ],
)
def test_extras_are_installed_by_the_name_of_the_wheel_that_is_there(
    monkeypatch: pytest.MonkeyPatch, installed: list[str], named: str
) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return "1.2"

    monkeypatch.setattr(distribution, "version", version)
    assert distribution.distribution() == named
    assert distribution.installed_version("elastipod") == ("1.2" if "elastipod" in installed else None)
