"""The command line: what it refuses, in which words and with which exit code."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from elastipod_local import binaries, cli, host
from elastipod_local.cluster import Cluster
from elastipod_local.errors import LocalClusterError
from elastipod_local.host import STOP_SIGNALS
from elastipod_local.kueue_config import KueueOptions
from elastipod_operator.kube.observed_node import NOTICES


def test_not_linux_is_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cli.main(["up"]) == cli.EXIT_UNSUPPORTED
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert "Linux" in said


@pytest.mark.parametrize("command", [["up"], ["images"], ["node", "add"], ["node", "kill", "node-1"]])
def test_not_root_is_one_sentence(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert cli.main(command) == cli.EXIT_UNSUPPORTED
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert "sudo" in said


def test_a_failure_is_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: object, **__: object) -> None:
        raise LocalClusterError("it broke; mend it")

    monkeypatch.setattr(Cluster, "up", fail)
    assert cli.main(["up"]) == cli.EXIT_FAILED
    assert capsys.readouterr().err == "elastipod local: it broke; mend it\n"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        pytest.param(
            OSError(errno.ENOSPC, "No space left on device", "/c/elastipod/etcd"),
            "/c/elastipod/etcd: No space left on device; free some, or set XDG_CACHE_HOME to a folder on another disk",
            id="full disk",
        ),
        pytest.param(
            OSError(errno.EROFS, "Read-only file system", "/c/lock"),
            "/c/lock: Read-only file system; set XDG_CACHE_HOME to a folder that can be written if it is below the cache",
            id="folder that cannot be written",
        ),
        pytest.param(OSError(errno.EMFILE, "Too many open files"), "Too many open files", id="something else"),
        pytest.param(
            subprocess.TimeoutExpired(["apt-get", "update"], 900),
            "`apt-get update` did not end within 900 s",
            id="slow mirror",
        ),
    ],
)
def test_what_the_machine_refuses_is_one_sentence(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(Cluster, "up", fail)
    assert cli.main(["up"]) == cli.EXIT_FAILED
    assert capsys.readouterr().err == f"elastipod local: {said}\n"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["up"], None),
        (["up", "--kueue"], KueueOptions()),
        (["up", "--kueue", "--kueue-frameworks", "batch/job,pod"], KueueOptions(frameworks=("batch/job", "pod"))),
    ],
)
def test_kueue_is_asked_for(argv: list[str], expected: KueueOptions | None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(Cluster, "up", lambda *_, kueue, **__: asked.append(kueue))
    assert cli.main(argv) == 0
    assert asked == [expected]


def test_ctrl_c_has_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Cluster, "up", interrupt)
    assert cli.main(["up"]) == cli.EXIT_INTERRUPTED


@pytest.mark.usefixtures("without_nohup")
@pytest.mark.parametrize("signum", STOP_SIGNALS)
def test_every_way_to_stop_a_command_takes_down_what_it_made(
    signum: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_leave_terminal", lambda: None)  # which is that of the tests here
    monkeypatch.setattr(Cluster, "up", lambda *_, **__: signal.raise_signal(signum))
    assert cli.main(["up"]) == cli.EXIT_INTERRUPTED


@pytest.mark.parametrize(
    "argv", [[], ["node"], ["up", "--nodes", "-1"], ["up", "--nodes", "99"], ["node", "add", "0"], ["nope"]]
)
def test_wrong_usage(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    assert ended.value.code == 2


def test_a_cluster_name_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "--name", "No Name"]) == cli.EXIT_FAILED
    assert "no cluster name" in capsys.readouterr().err


def test_kubectl_gets_its_own_options(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def attach(name: str) -> Cluster:
        seen.append([name])
        return Cluster(name, Path("/x"))

    monkeypatch.setattr(Cluster, "attach", attach)
    monkeypatch.setattr(binaries, "ensure", lambda names: {"kubectl": "kubectl"})
    monkeypatch.setattr(os, "execve", lambda program, arguments, environment: seen.append(arguments))
    cli.main(["kubectl", "--name", "mine", "-n", "kube-system", "get", "pods", "--", "x"])
    cli.main(["kubectl", "get", "pods", "-A"])
    assert seen == [
        ["mine"],
        ["kubectl", "-n", "kube-system", "get", "pods", "--", "x"],
        ["default"],
        ["kubectl", "get", "pods", "-A"],
    ]


@pytest.mark.parametrize(
    ("argv", "calls"),
    [
        (
            ["spot-notice"],
            [
                "taint node node-1 --overwrite aws-node-termination-handler/spot-itn=:NoSchedule",
                "after 120 s",
                "remove node-1 False",
            ],
        ),
        (
            ["spot-notice", "--seconds=30"],
            [
                "taint node node-1 --overwrite cloud.google.com/impending-node-termination=:NoSchedule",
                "after 30 s",
                "remove node-1 False",
            ],
        ),
    ],
)
def test_what_is_announced_of_a_node(argv: list[str], calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(Cluster, "attach", lambda name, **_: Cluster(name, Path("/x")))
    monkeypatch.setattr(Cluster, "kubectl", lambda self, *words: seen.append(" ".join(words)))
    monkeypatch.setattr(Cluster, "remove_node", lambda self, name, *, drain: seen.append(f"remove {name} {drain}"))
    monkeypatch.setattr("time.sleep", lambda seconds: seen.append(f"after {seconds} s"))
    assert cli.main(["node", *argv, "node-1"]) == 0
    assert seen == calls


def test_a_node_is_sickened_and_cured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The file tells its device plugin, the label the operator."""
    seen: list[str] = []
    etc = tmp_path / "nodes" / "node-1" / "etc"
    etc.mkdir(parents=True)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(Cluster, "attach", lambda name, **_: Cluster(name, tmp_path))
    monkeypatch.setattr(Cluster, "kubectl", lambda self, *words: seen.append(" ".join(words)))
    label = "label node node-1 --overwrite sagemaker.amazonaws.com/node-health-status"
    assert cli.main(["node", "sicken", "node-1"]) == 0
    assert [one.name for one in etc.iterdir()] == ["sick-device"]
    assert cli.main(["node", "cure", "node-1"]) == 0
    assert not any(etc.iterdir())
    assert seen == [f"{label}=UnschedulablePendingReplacement", f"{label}=Schedulable"]


def test_the_operator_knows_the_notices_of_the_local_cluster() -> None:
    assert {taint: timedelta(seconds=lead) for lead, taint in cli.SPOT_TAINTS.items()} == NOTICES


def test_a_lead_that_no_cloud_gives_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["node", "spot-notice", "node-1", "--seconds=60"])
    assert "argument --seconds: invalid choice: 60 (choose from 120, 30)" in capsys.readouterr().err


def test_every_change_of_a_node_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["node", "--help"])
    said = capsys.readouterr().out
    assert all(name in said for name in ("add", *cli.NODE_COMMANDS))
