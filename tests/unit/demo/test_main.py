"""The demo's way in and out: where it cannot run, what it applies, and what it leaves."""

from __future__ import annotations

import errno
import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import pytest
import yaml
from kubernetes.utils.quantity import parse_quantity

from elastipod_local import binaries, host, ports
from elastipod_local.demo import main as demo
from elastipod_local.demo.main import main
from elastipod_local.demo.result import DemoResult
from elastipod_local.demo.steps import CLUSTER_MANIFESTS, JOB, QUEUE, URGENT_JOB, ExampleJob
from elastipod_local.errors import LocalClusterError, UnsupportedError, what_the_machine_refused
from elastipod_local.host import STOP_SIGNALS
from elastipod_local.paths import checkout_root


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    before = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


class FakeCluster:
    """Remembers whether it was taken down."""

    name = "demo"
    kubeconfig = Path("kubeconfig")
    folder = Path("cluster")

    def __init__(self) -> None:
        self.is_up = True
        self.asked: list[str] = []

    def kubectl(self, *arguments: str, timeout_s: float) -> str:
        self.asked.append(arguments[0])
        return "nothing to say\n"

    def is_running(self) -> bool:
        return self.is_up

    def down(self) -> bool:
        self.is_up = False
        return True


class FakeDemo:
    """Ends as it is told to, with a cluster that is up."""

    def __init__(self, outcome: DemoResult | BaseException) -> None:
        self._outcome = outcome
        self.cluster = FakeCluster()

    def run(self) -> DemoResult:
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A root Linux machine with a checkout of its own."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(demo, "is_root", lambda: True)
    monkeypatch.setattr(demo, "require_nodes_possible", lambda: None)
    monkeypatch.setattr(ports, "require_free", lambda wanted: None)
    monkeypatch.setattr(demo, "checkout_root", lambda: tmp_path)
    return monkeypatch


def run_demo(
    machine: pytest.MonkeyPatch, outcome: DemoResult | BaseException, *arguments: str
) -> tuple[int, FakeCluster]:
    fake = FakeDemo(outcome)
    machine.setattr(demo, "Demo", lambda root, view: fake)
    return main(list(arguments)), fake.cluster


def test_another_system_gets_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert main([]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_plain_user_gets_one_sentence(machine: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    machine.setattr(demo, "is_root", lambda: False)
    assert main([]) == 2
    assert "sudo make demo" in capsys.readouterr().err


def test_a_machine_that_cannot_have_nodes_is_told_before_anything_begins(
    machine: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> None:
        raise UnsupportedError("nodes need containerd, and this machine has no apt-get")

    machine.setattr(demo, "require_nodes_possible", refuse)
    ended, cluster = run_demo(machine, DemoResult({}, [], "all shown"))
    assert (ended, cluster.is_up) == (2, True)
    assert capsys.readouterr().err == "demo: nodes need containerd, and this machine has no apt-get\n"


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        pytest.param(DemoResult({}, [], "all shown"), 0, id="all shown"),
        pytest.param(DemoResult({}, ["a resize repeated steps"], "not all shown"), 1, id="something was not shown"),
        pytest.param(LocalClusterError("waited 120 s"), 1, id="a step did not get there"),
        pytest.param(demo.Interrupted(), 130, id="Ctrl-C"),
    ],
)
def test_whatever_happens_the_cluster_is_taken_down(
    machine: pytest.MonkeyPatch, outcome: DemoResult | BaseException, status: int
) -> None:
    ended, cluster = run_demo(machine, outcome)
    assert (ended, cluster.is_up) == (status, False)


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device", "/c/etcd"), subprocess.TimeoutExpired(["debootstrap"], 1800)],
)
def test_what_the_machine_refuses_is_one_sentence_and_the_cluster_is_taken_down(
    error: OSError | subprocess.TimeoutExpired, machine: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended, cluster = run_demo(machine, error)
    assert (ended, cluster.is_up) == (1, False)
    assert capsys.readouterr().err == f"demo: {what_the_machine_refused(error)}\n"


def test_a_machine_that_turns_out_to_be_unable_gets_the_exit_status_of_one(
    machine: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended, cluster = run_demo(machine, UnsupportedError("nodes need runc, and apt-get cannot bring it"))
    assert (ended, cluster.is_up, cluster.asked) == (2, False, [])
    assert capsys.readouterr().err == "demo: nodes need runc, and apt-get cannot bring it\n"


@pytest.mark.parametrize(("has_config", "lacking"), [(False, []), (True, ["kubectl"])])
def test_a_failure_before_there_is_a_cluster_asks_none_for_diagnostics(
    has_config: bool, lacking: list[str], machine: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without a kubeconfig kubectl asks whatever cluster this machine is part of; without kubectl a build of it would begin."""
    machine.setattr(FakeCluster, "kubeconfig", tmp_path / "kubeconfig")
    if has_config:
        (tmp_path / "kubeconfig").touch()
    machine.setattr(binaries, "missing", lambda names: lacking)
    ended, cluster = run_demo(machine, LocalClusterError("the build failed"))
    assert (ended, cluster.asked, cluster.is_up) == (1, [], False)


@pytest.fixture
def diagnosable(machine: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A machine whose cluster got as far as its kubeconfig."""
    (tmp_path / "kubeconfig").touch()
    machine.setattr(FakeCluster, "kubeconfig", tmp_path / "kubeconfig")
    machine.setattr(binaries, "missing", lambda names: [])
    return machine


def test_a_failed_step_leaves_diagnostics(
    diagnosable: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended, cluster = run_demo(diagnosable, LocalClusterError("waited 120 s"))
    assert (ended, set(cluster.asked)) == (1, {"describe", "get", "logs"})
    assert f"diagnostics of the cluster are in {tmp_path / '.run' / 'demo' / 'failure'}" in capsys.readouterr().err


def test_ctrl_c_during_diagnostics_takes_the_cluster_down(
    diagnosable: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: str, timeout_s: float) -> str:
        signal.raise_signal(signal.SIGINT)
        return ""

    diagnosable.setattr(FakeCluster, "kubectl", interrupted)
    ended, cluster = run_demo(diagnosable, LocalClusterError("waited 120 s"))
    assert (ended, cluster.is_up) == (130, False)
    assert "demo: waited 120 s\n" in capsys.readouterr().err


def test_ctrl_c_before_anything_was_made_is_no_traceback(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(demo, "require_nodes_possible", lambda: signal.raise_signal(signal.SIGINT))
    assert main([]) == 130


def test_a_second_ctrl_c_does_not_cut_the_taking_down_short(machine: pytest.MonkeyPatch) -> None:
    class Impatient(FakeDemo):
        def run(self) -> DemoResult:
            try:
                signal.raise_signal(signal.SIGINT)
            finally:
                signal.raise_signal(signal.SIGINT)
            raise AssertionError("nobody was interrupted")

    fake = Impatient(KeyError())
    machine.setattr(demo, "Demo", lambda root, view: fake)
    assert (main([]), fake.cluster.is_up) == (130, False)


@pytest.mark.parametrize("outcome", [DemoResult({}, [], "all shown"), LocalClusterError("waited 120 s")])
def test_a_cluster_that_cannot_be_taken_down_does_not_hide_how_the_demo_went(
    outcome: DemoResult | BaseException, machine: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stuck(self: FakeCluster) -> bool:
        raise LocalClusterError("processes [7] did not end within 20 s of SIGKILL")

    machine.setattr(FakeCluster, "down", stuck)
    ended, _ = run_demo(machine, outcome)
    said = "".join(capsys.readouterr())
    assert ended == 1
    assert "demo: processes [7] did not end" in said
    assert ("all shown" if isinstance(outcome, DemoResult) else "waited 120 s") in said


@pytest.mark.usefixtures("without_nohup")
def test_a_dropped_connection_takes_the_cluster_down(machine: pytest.MonkeyPatch) -> None:
    class Dropped(FakeDemo):
        def run(self) -> DemoResult:
            signal.raise_signal(signal.SIGHUP)
            raise AssertionError("nobody was interrupted")

    machine.setattr(host, "_leave_terminal", lambda: None)  # which is that of the tests here
    fake = Dropped(KeyError())
    machine.setattr(demo, "Demo", lambda root, view: fake)
    assert (main(["--keep"]), fake.cluster.is_up) == (130, False)


class DeadTerminal(io.StringIO):
    """A terminal whose connection dropped."""

    def write(self, text: str) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize(
    "outcome", [demo.Interrupted(), LocalClusterError("waited 120 s"), DemoResult({}, ["a pause"], "all shown")]
)
def test_a_dead_terminal_does_not_keep_the_cluster(
    outcome: DemoResult | BaseException, machine: pytest.MonkeyPatch
) -> None:
    machine.setattr(sys, "stdout", DeadTerminal())
    machine.setattr(sys, "stderr", DeadTerminal())
    ended, cluster = run_demo(machine, outcome)
    assert (ended > 0, cluster.is_up) == (True, False)


def test_an_unforeseen_error_takes_the_cluster_down_and_is_not_hidden(machine: pytest.MonkeyPatch) -> None:
    fake = FakeDemo(KeyError("history"))
    machine.setattr(demo, "Demo", lambda root, view: fake)
    with pytest.raises(KeyError, match="history"):
        main([])
    assert not fake.cluster.is_up


def test_keep_leaves_the_cluster_and_says_how_to_use_it(
    machine: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, cluster = run_demo(machine, DemoResult({}, [], "all shown"), "--keep")
    assert cluster.is_up
    said = re.search(r"Take it down with: (\S+) local down --name demo\n", capsys.readouterr().out)
    assert said is not None
    assert Path(said[1]).is_file()  # .venv is not on PATH


def test_ctrl_c_ends_the_cluster_even_with_keep(machine: pytest.MonkeyPatch) -> None:
    _, cluster = run_demo(machine, demo.Interrupted(), "--keep")
    assert not cluster.is_up


def test_the_examples_that_are_applied_exist() -> None:
    root = checkout_root()
    assert [ExampleJob.of_file(root / name).name for name in (JOB, URGENT_JOB)] == ["lm", "urgent"]
    assert all((root / name).is_file() for name in CLUSTER_MANIFESTS)


def amount_of(quantity: str) -> Decimal:
    amount: Decimal = parse_quantity(quantity)  # type: ignore[no-untyped-call]  # the client has no annotations here
    return amount


def test_the_queue_has_quota_for_both_jobs_at_their_smallest_and_for_the_elastic_one_at_its_largest() -> None:
    root = checkout_root()
    objects = yaml.safe_load_all((root / QUEUE).read_text())
    queue = next(one for one in objects if one["kind"] == "ClusterQueue")
    [flavor] = queue["spec"]["resourceGroups"][0]["flavors"]
    quota = {resource["name"]: amount_of(resource["nominalQuota"]) for resource in flavor["resources"]}
    for name in (JOB, URGENT_JOB):
        [spec] = yaml.safe_load((root / name).read_text())["spec"]["replicaSpecs"]
        requests = spec["template"]["spec"]["containers"][0]["resources"]["requests"]
        assert {resource: 4 * amount_of(amount) for resource, amount in requests.items()} == quota
