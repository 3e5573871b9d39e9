"""Kueue in a cluster: the release's chart without its Deployment, and the manager as a process of the control plane.

The image of the manager lies in a registry that nothing here reaches. The rest is what users install: CRDs with
conversion, webhooks, roles, and a manager that has no more rights than the chart gives its service account.
"""

import http.client
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml

from elastipod_local import pki
from elastipod_local.addressing import KUEUE_HEALTH_PORT, KUEUE_WEBHOOK_PORT
from elastipod_local.controlplane import KUEUE, ControlPlane
from elastipod_local.errors import CommandError, LocalClusterError
from elastipod_local.host import tail_of, wait_until
from elastipod_local.kueue_config import (
    API_VERSION,
    AUTHORITY,
    CONFIG_KEY,
    CONFIG_MAP,
    NAMESPACE,
    USER,
    WEBHOOK_SERVICE,
    KueueOptions,
    Manifest,
    chart_values,
    configuration,
    external_roles,
    localized,
    trial_objects,
)
from elastipod_local.processes import ProcessId

READY_DEADLINE_S = 120
PROBE_TIMEOUT_S = 2.0

# kubectl and helm as the cluster's administrator: arguments and, for kubectl, what goes to its stdin.
Kubectl = Callable[..., str]
Helm = Callable[..., str]


@dataclass(frozen=True, slots=True)
class Kueue:
    """Kueue of one cluster. chart: folder of its chart."""

    control_plane: ControlPlane
    kubectl: Kubectl
    helm: Helm
    chart: Path

    def install(self, options: KueueOptions) -> None:
        """Write what the manager is started with and apply what it needs in the cluster. Safe to repeat."""
        folder = self.control_plane.kueue_dir
        folder.mkdir(exist_ok=True)
        secret = self._certificates()
        kubeconfig = folder / "kubeconfig"
        if not kubeconfig.exists():
            self.control_plane.create_client("kueue", USER, kubeconfig)
        objects = localized(self._rendered(options), address=self._webhook_address, secret=secret)
        config = next(item for item in objects if item["metadata"]["name"] == CONFIG_MAP)["data"][CONFIG_KEY]
        (folder / "config.yaml").write_text(config)
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
        self._apply_new([namespace, *objects, *external_roles(options)])

    def _apply_new(self, objects: list[Manifest]) -> None:
        """Apply what was not applied before: the kinds alone take the API server seconds."""
        record = self.control_plane.kueue_dir / "applied.json"
        before = json.loads(record.read_text()) if record.exists() else []
        new = [item for item in objects if item not in before]
        first = [item for item in new if item["kind"] in ("Namespace", "CustomResourceDefinition")]
        self._apply(first)
        self._wait_served({item["spec"]["names"]["plural"] for item in first if item["kind"] != "Namespace"})
        self._apply([item for item in new if item not in first])
        pki.write_private(record, json.dumps(objects).encode())  # a key is among them

    def _wait_served(self, kinds: set[str]) -> None:
        """Return when the API server serves the kinds: a manager that finds one missing ends."""

        def served() -> bool:
            listed = self.control_plane.api_server.get(f"/apis/{API_VERSION}") or {"resources": []}
            return kinds <= {resource["name"] for resource in listed["resources"]}

        wait_until(served, deadline_s=READY_DEADLINE_S, what="the kinds of Kueue to be served", every_s=0.1)

    @property
    def _webhook_address(self) -> str:
        return f"{self.control_plane.addressing.loopback}:{KUEUE_WEBHOOK_PORT}"

    def _certificates(self) -> dict[str, bytes]:
        """Give the content of the Secret in which Kueue keeps the certificates of its webhooks, from files beside it.

        A kubelet would carry the Secret to the manager; here both are made from the same files, and Kueue accepts them.
        """
        authority = pki.Authority(self.control_plane.kueue_dir / "certificates", "ca")
        if not authority.certificate.exists():
            authority.create(names=[AUTHORITY], with_rsa=True)
            authority.issue("tls", WEBHOOK_SERVICE, serves=[WEBHOOK_SERVICE, self.control_plane.addressing.loopback])
        return {name: (authority.folder / name).read_bytes() for name in ("ca.crt", "ca.key", "tls.crt", "tls.key")}

    def _rendered(self, options: KueueOptions) -> list[Manifest]:
        """Give the objects of the chart with our configuration."""
        release = yaml.safe_load((self.chart / "values.yaml").read_text())["managerConfig"][
            "controllerManagerConfigYaml"
        ]
        config = configuration(
            yaml.safe_load(release),
            options,
            host=str(self.control_plane.addressing.loopback),
            webhook_port=KUEUE_WEBHOOK_PORT,
            health_port=KUEUE_HEALTH_PORT,
            certificates=str(self.control_plane.kueue_dir / "certificates"),
        )
        values = json.dumps(chart_values(config))
        text = self.helm("template", KUEUE, str(self.chart), "--namespace", NAMESPACE, "--values", "-", input=values)
        # A megabyte and a half: the loader in C takes under a second, the other one ten.
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        return [item for item in yaml.load_all(text, Loader=loader) if item]

    def _apply(self, objects: list[Manifest]) -> None:
        if not objects:
            return
        content = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        # Kueue writes into its webhooks and kinds as well.
        self.kubectl("apply", "--server-side", "--force-conflicts", "--filename=-", input=content)

    def wait_ready(self, process: ProcessId) -> None:
        """Return when the manager serves and its webhooks take a trial.

        Raises LocalClusterError with the end of its log when it ends, or with what the trial was told at the deadline.
        """
        log = self.control_plane.log(KUEUE)
        trial = json.dumps({"apiVersion": "v1", "kind": "List", "items": trial_objects()})
        refusal = ""

        def ready() -> bool:
            nonlocal refusal
            if not process.is_alive():
                raise LocalClusterError(f"kueue ended at its start: {tail_of(log, 2)}; log: {log}")
            if not self._answers_ok("/readyz"):
                return False
            try:
                self.kubectl("create", "--dry-run=server", "--filename=-", input=trial)
            except CommandError as refused:
                refusal = refused.output
                return False
            return True

        try:
            wait_until(ready, deadline_s=READY_DEADLINE_S, what="Kueue to be ready", every_s=0.1, hint=f"log: {log}")
        except LocalClusterError as late:
            if not refusal or not process.is_alive():
                raise
            raise LocalClusterError(f"{late}; a trial was refused: {refusal}") from late

    def _answers_ok(self, path: str) -> bool:
        host = str(self.control_plane.addressing.loopback)
        connection = http.client.HTTPConnection(host, KUEUE_HEALTH_PORT, timeout=PROBE_TIMEOUT_S)
        try:
            connection.request("GET", path)
            return connection.getresponse().status == http.client.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()
