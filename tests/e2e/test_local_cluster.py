"""The local cluster itself: nodes that come, go, lose power; and nothing left behind, however the tool ends."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path

import psutil
import pytest
from tests.e2e.leaks import processes_of, traces
from tests.objects import get_object
from tests.patience import PATIENCE_S

import elastipod_local
from elastipod_local.cluster import Cluster
from elastipod_local.errors import LocalClusterError
from elastipod_local.host import wait_until
from elastipod_local.node_init import SYSCTLS
from elastipod_local.nodes import Nodes
from elastipod_local.paths import cluster_dir
from elastipod_local.processes import ProcessId
from elastipod_local.state import NodeOptions, NodePhase, StateFile

pytestmark = pytest.mark.cluster

POD = """
apiVersion: v1
kind: Pod
metadata: {{name: {name}}}
spec:
  restartPolicy: Always
  terminationGracePeriodSeconds: 1
  nodeName: {node}
  volumes: [{{name: shared, hostPath: {{path: /mnt/shared}}}}]
  containers:
  - name: main
    image: elastipod/train:dev
    command: [python, -c, "{program}"]
    volumeMounts: [{{name: shared, mountPath: /mnt/shared}}]
    resources: {{limits: {{{limits}}}}}
"""
SERVER = (
    "import http.server as h; server = h.HTTPServer(('', 8080), h.BaseHTTPRequestHandler); "
    "print('serving', flush=True); server.serve_forever()"
)
PACKAGES = str(Path(elastipod_local.__file__).parents[1])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    where = tmp_path_factory.mktemp("local") / "cluster"
    with Cluster.up("e2e-local", nodes=2, run_dir=where, options=NodeOptions(slots=2)) as cluster:
        yield cluster


@pytest.fixture
def cut_short() -> Iterator[Cluster]:
    """A cluster of the command line, not up yet; its folder goes with the test."""
    name = "e2e-cut-short"
    cluster = Cluster(name, cluster_dir(name))
    cluster.down()
    yield cluster
    cluster.down()
    shutil.rmtree(cluster.folder, ignore_errors=True)


def run_pod(cluster: Cluster, name: str, node: str, limits: str = "") -> None:
    """Run a pod, and wait until its server listens: a pod without probes is ready as soon as its process is there."""
    cluster.kubectl("apply", "-f", "-", input=POD.format(name=name, node=node, program=SERVER, limits=limits))
    cluster.kubectl("wait", "--for=condition=Ready", f"pod/{name}", "--timeout=240s")
    wait_until(
        lambda: "serving" in cluster.kubectl("logs", name), deadline_s=PATIENCE_S, what=f"{name} to serve", every_s=0.1
    )


def node_ready(cluster: Cluster, name: str) -> str:
    path = "{.status.conditions[?(@.type=='Ready')].status}"
    return cluster.kubectl("get", "node", name, "-o", f"jsonpath={path}")


def pod_field(cluster: Cluster, name: str, path: str) -> str:
    return cluster.kubectl("get", "pod", name, "-o", f"jsonpath={{{path}}}")


def answer_of(address: str, *, within_s: float) -> bytes | None:
    """Give how a pod's server begins to answer: empty when it says nothing in time, None when it cannot be connected to."""
    try:
        client = socket.create_connection((address, 8080), within_s)
    except OSError:
        return None
    with client:
        client.sendall(b"GET / HTTP/1.0\r\n\r\n")
        try:
            return client.recv(8)
        except TimeoutError:
            return b""


def test_pods_have_logs_exec_addresses_and_the_shared_folder(cluster: Cluster) -> None:
    run_pod(cluster, "first", "node-1")
    run_pod(cluster, "second", "node-2")
    assert "serving" in cluster.kubectl("logs", "first")
    cluster.kubectl("exec", "first", "--", "sh", "-c", "echo hello > /mnt/shared/note")
    assert (cluster.shared / "note").read_text() == "hello\n"
    assert cluster.kubectl("exec", "second", "--", "cat", "/mnt/shared/note") == "hello\n"
    api = "import os, socket; socket.create_connection((os.environ['KUBERNETES_SERVICE_HOST'], 443), 5)"
    cluster.kubectl("exec", "first", "--", "python", "-c", api)
    connect = f"import socket; socket.create_connection(('{pod_field(cluster, 'second', '.status.podIP')}', 8080), 5)"
    cluster.kubectl("exec", "first", "--", "python", "-c", connect)


def until_offered(cluster: Cluster, node: str, units: str) -> None:
    """Wait until kubelet says that this many of its two units of the accelerator may be used."""

    def offered() -> list[str | None]:
        status = get_object(cluster, "nodes", node)["status"]
        return [status[kind].get("elastipod.io/slot") for kind in ("capacity", "allocatable")]

    wait_until(
        lambda: offered() == ["2", units],
        deadline_s=PATIENCE_S,
        what=f"{units} units of {node}",
        every_s=0.5,
    )


@pytest.mark.slow
def test_a_sick_unit_of_the_accelerator_is_offered_to_nobody(cluster: Cluster) -> None:
    """kubelet itself keeps count: a pod gets a unit of the device plugin, and the sick one is taken off what the node offers."""
    until_offered(cluster, "node-2", "2")
    cluster.set_sick("node-2", sick=True)
    until_offered(cluster, "node-2", "1")
    run_pod(cluster, "with-unit", "node-2", "elastipod.io/slot: 1")
    assert cluster.kubectl("exec", "with-unit", "--", "printenv", "SLOT_UNITS") == "slot-1\n"
    cluster.set_sick("node-2", sick=False)
    until_offered(cluster, "node-2", "2")


@pytest.mark.slow
def test_the_train_image_finds_torch_and_the_launchers(cluster: Cluster) -> None:
    run_pod(cluster, "torch", "node-1")
    assert (
        cluster.kubectl("exec", "torch", "--", "python3", "-c", "import torch; print(torch.ones(2).sum().item())")
        == "2.0\n"
    )
    is_compiled = "import torch, pathlib; print(pathlib.Path(torch.__cached__).exists())"
    assert cluster.kubectl("exec", "torch", "--", "python3", "-c", is_compiled) == "True\n", (
        "every start would compile it"
    )
    found = cluster.kubectl("exec", "torch", "--", "sh", "-c", "which python python3 hyperpodrun elastipod")
    assert len(found.splitlines()) == 4


def test_each_node_offers_as_many_units_as_were_asked_for(cluster: Cluster) -> None:
    for node in cluster.state().nodes:
        until_offered(cluster, node, "2")


def test_node_files_stay_off_the_machine(cluster: Cluster) -> None:
    assert not Path("/mnt/shared").exists()
    assert not Path("/etc/elastipod-node").exists()
    assert os.stat(cluster.kubeconfig).st_mode & 0o777 == 0o600


@pytest.mark.slow
def test_a_node_comes_loses_its_power_returns_and_goes(cluster: Cluster) -> None:
    (name,) = cluster.add_nodes()
    run_pod(cluster, "guest", name)
    cluster.kill_node(name)
    assert cluster.state().nodes[name].phase is NodePhase.OFF
    with pytest.raises(LocalClusterError, match="needs a node that is"):
        cluster.kill_node(name)
    cluster.return_node(name)

    def runs_again() -> bool:
        status = get_object(cluster, "pods", "guest", "default")["status"]
        ready = [each["status"] for each in status["conditions"] if each["type"] == "Ready"]
        return any(each["restartCount"] for each in status.get("containerStatuses", ())) and ready == ["True"]

    wait_until(runs_again, deadline_s=PATIENCE_S, what="the pod to run again", every_s=0.2)
    cluster.remove_node(name)
    assert name not in cluster.kubectl("get", "nodes")
    assert name not in cluster.state().nodes


def test_a_node_that_cannot_be_added_leaves_nothing(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    before, nodes = traces(), cluster.state().nodes

    def fail(*_: object) -> None:
        raise LocalClusterError("no network today")

    monkeypatch.setattr(Nodes, "_connect_to_network", fail)
    with pytest.raises(LocalClusterError, match="no network today"):
        cluster.add_nodes()
    assert cluster.state().nodes == nodes
    assert traces().new_since(before, cluster.state().addressing) == {}


def test_the_api_server_keeps_its_hardware_address(cluster: Cluster) -> None:
    """One that it shared with a node's wire would go with the node, and the others would not know for a while."""
    links = Path("/sys/class/net")
    bridge = links / cluster.state().addressing.kernel_name
    wires = {(links / wire.name / "address").read_text() for wire in (bridge / "brif").iterdir()}
    assert len(wires) == len(cluster.state().nodes)
    assert (bridge / "address").read_text() not in wires


def test_drain_evicts_the_pods_and_cordons(cluster: Cluster) -> None:
    run_pod(cluster, "evicted", "node-2")
    cluster.drain_node("node-2")
    assert cluster.kubectl("get", "node", "node-2", "-o", "jsonpath={.spec.unschedulable}") == "true"
    assert cluster.kubectl("get", "pod", "evicted", "--ignore-not-found") == ""
    cluster.kubectl("uncordon", "node-2")


@pytest.mark.parametrize(
    ("begin", "end", "phase", "connects"),
    [
        pytest.param(Cluster.partition_node, Cluster.heal_node, NodePhase.PARTITIONED, False, id="partitioned"),
        # The kernel takes the connection in place of a process that is frozen.
        pytest.param(
            Cluster.freeze_node, Cluster.thaw_node, NodePhase.FROZEN, True, id="frozen", marks=pytest.mark.slow
        ),
    ],
)
def test_a_pod_of_a_node_in_trouble_does_not_answer_and_goes_on_afterwards(
    cluster: Cluster, begin: Callable[..., None], end: Callable[..., None], phase: NodePhase, connects: bool
) -> None:
    name = f"patient-{phase.value.lower()}"
    run_pod(cluster, name, "node-2")
    address = pod_field(cluster, name, ".status.podIP")
    assert answer_of(address, within_s=PATIENCE_S) == b"HTTP/1.0"
    begin(cluster, "node-2")
    assert cluster.state().nodes["node-2"].phase is phase
    assert answer_of(address, within_s=8) == (b"" if connects else None)
    end(cluster, "node-2")
    wait_until(
        lambda: answer_of(address, within_s=PATIENCE_S) == b"HTTP/1.0",
        deadline_s=PATIENCE_S,
        what="the pod to answer again",
    )
    assert pod_field(cluster, name, ".status.containerStatuses[0].restartCount") == "0"


@pytest.mark.slow
def test_loading_images_reaches_the_nodes(cluster: Cluster) -> None:
    cluster.load_images()
    run_pod(cluster, "after-load", "node-1")


@pytest.mark.long("variants")
def test_a_second_cluster_lives_beside_and_leaves_nothing(cluster: Cluster, tmp_path: Path) -> None:
    before = traces()
    second = Cluster.up("e2e-beside", nodes=1, run_dir=tmp_path / "cluster")
    with second:
        own = second.state().addressing
        assert own.block != cluster.state().addressing.block
        run_pod(second, "some", "node-1")
        during = traces()
        assert f"epod{own.block}-node1" in during.links
        assert any(route.startswith(own.kernel_name) for route in during.routes)
        assert all((Path("/proc/sys") / name).read_text() for name in SYSCTLS)
        assert "node-2" not in second.kubectl("get", "nodes")
        second.freeze_node("node-1")
    assert traces().new_since(before, own) == {}
    assert processes_of(second.folder) == []
    assert {entry.name for entry in second.folder.iterdir()} <= {"logs", "lock"}
    assert not second.down()
    assert node_ready(cluster, "node-1") == node_ready(cluster, "node-2") == "True"


@pytest.mark.long("variants")
@pytest.mark.parametrize(
    ("moment", "signum", "returncode"),
    [
        pytest.param("starting the control plane", signal.SIGKILL, -signal.SIGKILL, id="killed early"),
        pytest.param("starting node-1", signal.SIGKILL, -signal.SIGKILL, id="killed while nodes are made"),
        pytest.param("waiting for the nodes", signal.SIGKILL, -signal.SIGKILL, id="killed late"),
        pytest.param("starting node-1", signal.SIGINT, 130, id="ctrl-c while nodes are made"),
    ],
)
def test_an_up_that_is_cut_short_leaves_nothing(
    moment: str, signum: signal.Signals, returncode: int, cut_short: Cluster
) -> None:
    before = traces()
    folder = cut_short.folder
    tool = subprocess.Popen(
        [sys.executable, "-m", "elastipod_local", "up", "--name", cut_short.name, "--nodes", "2"],
        env={**os.environ, "PYTHONPATH": PACKAGES},
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # in a shell's background it is ignored
    )
    with tool:
        assert tool.stderr is not None
        lines = list(takewhile(lambda line: moment not in line, tool.stderr))
        state = StateFile(folder).load()
        assert state is not None, f"the tool ended before that moment: {''.join(lines)}"
        tool.send_signal(signum)
        _, said = tool.communicate(timeout=PATIENCE_S)
    assert tool.returncode == returncode, said
    if signum is signal.SIGKILL:
        assert cut_short.down()
    assert processes_of(folder) == []
    assert traces().new_since(before, state.addressing) == {}
    assert not cut_short.down()


def test_up_refuses_a_cluster_that_is_up(cluster: Cluster) -> None:
    with pytest.raises(LocalClusterError, match="is up already"):
        Cluster.up(cluster.name, nodes=0, run_dir=cluster.folder)


def test_a_service_that_dies_on_a_node_is_started_again(cluster: Cluster) -> None:
    inner = cluster.state().nodes["node-1"].inner
    assert inner is not None

    def kube_proxy() -> ProcessId | None:
        for child in psutil.Process(inner.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.name() == "kube-proxy":
                    return ProcessId.of(child.pid)
        return None

    first = wait_until(kube_proxy, deadline_s=PATIENCE_S, what="kube-proxy to run")
    os.kill(first.pid, signal.SIGKILL)
    wait_until(lambda: (now := kube_proxy()) and now != first, deadline_s=PATIENCE_S, what="kube-proxy to run again")
