"""A control plane for load: its API server writes down every call of the operator, and kwok plays the nodes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from elastipod_local import binaries, pki
from elastipod_local.addressing import Addressing
from elastipod_local.cluster import Cluster
from elastipod_local.controlplane import ControlPlane
from elastipod_local.host import wait_until

CHECKOUT = Path(__file__).resolve().parents[2]
OPERATOR = "elastipod-operator"
NAMESPACE = "load"
AUDIT_POLICY = f"""
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: Metadata
  users: [{OPERATOR}]
- level: None
"""


class LoadControlPlane(ControlPlane):
    """Writes an audit log of the operator, and takes as many calls at once as a large cluster's API server."""

    @property
    def audit_log(self) -> Path:
        return self.folder / "logs" / "audit.log"

    def _api_server_flags(self) -> list[str]:
        policy = self.folder / "audit-policy.yaml"
        policy.write_text(AUDIT_POLICY)
        return [
            *super()._api_server_flags(),
            f"--audit-policy-file={policy}",
            f"--audit-log-path={self.audit_log}",
            "--audit-log-mode=batch",
            "--audit-log-batch-max-wait=100ms",
            "--audit-log-batch-buffer-size=100000",
            "--audit-log-batch-throttle-enable=false",
        ]


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the operator, as the API server wrote it down. at: when it ended, or for a watch, began (RFC 3339)."""

    verb: str
    resource: str
    code: int
    at: str


class LoadCluster(Cluster):
    """A control plane without nodes, as Cluster.up(nodes=0) makes it, with an audit log and a user for the operator."""

    def _control_plane(self, addressing: Addressing, *, nodes: bool) -> ControlPlane:
        return LoadControlPlane(self.folder, self.name, addressing, self._programs(int(nodes)))

    @property
    def audit_log(self) -> Path:
        """Where the API server writes down what the operator asks."""
        return self.folder / "logs" / "audit.log"

    def calls(self, offset: int = 0) -> list[Call]:
        """Give the operator's calls from a position of the audit log on; a watch counts when it begins."""
        found: list[Call] = []
        with self.audit_log.open("rb") as stream:
            stream.seek(offset)
            for line in stream:
                event = json.loads(line)
                is_begin = event["stage"] == "ResponseStarted"
                if (event["verb"] == "watch") == is_begin:
                    reference = event.get("objectRef") or {}
                    resource = "/".join(filter(None, (reference.get("resource", ""), reference.get("subresource"))))
                    code = (event.get("responseStatus") or {}).get("code", 0)
                    found.append(Call(event["verb"], resource, code, event["stageTimestamp"]))
        return found

    def prepare(self) -> Path:
        """Apply the CRD, a namespace and the operator's rights (those of the chart); gives the operator's kubeconfig."""
        self.kubectl("apply", "-f", str(CHECKOUT / "crds"))
        self.kubectl("create", "namespace", NAMESPACE)
        self.kubectl(
            "apply", "-f", "-", input=json.dumps({"apiVersion": "v1", "kind": "List", "items": list(self._rights())})
        )

        def is_served() -> bool:
            return self.kubectl("get", "hpjob", "-A", "-o", "json", check=False) != ""

        wait_until(is_served, deadline_s=30, what="the API server to serve jobs", every_s=0.1)
        return self.kubeconfig_of(OPERATOR)

    def kubeconfig_of(self, user: str) -> Path:
        """Make a kubeconfig for a user without any group."""
        plane = self._control_plane(self.state().addressing, nodes=False)
        path = self.folder / f"{user}.kubeconfig"
        issued = plane.authority.issue(user, user)
        where = self.state().addressing.api_url
        pki.write_kubeconfig(path, server=where, authority=plane.authority, client=issued, cluster=self.name)
        return path

    def _rights(self) -> Iterator[dict[str, Any]]:
        """Give the chart's roles of the operator, bound to our user."""
        rendered = self.helm("template", "load", str(CHECKOUT / "charts" / "elastipod"), "--namespace", "default")
        for body in yaml.safe_load_all(rendered):
            if not body or body["kind"] not in ("ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"):
                continue
            if "subjects" in body:
                body["subjects"] = [{"kind": "User", "name": OPERATOR, "apiGroup": "rbac.authorization.k8s.io"}]
            yield body


def count_by_kind(calls: list[Call]) -> Counter[str]:
    """Count calls by verb and resource, such as `update leases`."""
    return Counter(f"{call.verb} {call.resource}" for call in calls)


@contextmanager
def cluster(folder: Path) -> Iterator[LoadCluster]:
    """Bring the control plane up in a folder and take it down at the end."""
    made = LoadCluster.up("load", nodes=0, run_dir=folder)
    assert isinstance(made, LoadCluster)
    with made:
        yield made


def kwok_command(cluster: Cluster) -> list[str]:
    """Give the command line that plays all nodes of a cluster; pods get addresses of loopback."""
    program = binaries.ensure(["kwok"], print)["kwok"]
    stages = Path(__file__).with_name("kwok.yaml")
    options = ["--manage-all-nodes", "--cidr=127.128.0.0/9", "--node-lease-duration-seconds=40"]
    return [str(program), f"--kubeconfig={cluster.kubeconfig}", f"--config={stages}", *options]


def node(name: str) -> Mapping[str, Any]:
    """Give a node for kwok to play, with room for a thousand pods."""
    room = {"cpu": "4000", "memory": "64Ti", "pods": "1000"}
    return {
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, "type": "kwok"},
                     "annotations": {"kwok.x-k8s.io/node": "fake"}},
        "status": {"allocatable": room, "capacity": room},
    }  # fmt: skip
