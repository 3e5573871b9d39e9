"""Kueue in a local cluster: its settings, and the release's own manifests made fit for a manager that is no pod.

Pure; `kueue` carries it out.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Manifest = dict[str, Any]

API_VERSION = "kueue.x-k8s.io/v1beta2"
NAMESPACE = "kueue-system"
SERVICE_ACCOUNT = "kueue-controller-manager"
# What the service account's token would say; the process shows a certificate of the same name.
USER = f"system:serviceaccount:{NAMESPACE}:{SERVICE_ACCOUNT}"
WEBHOOK_SERVICE = f"kueue-webhook-service.{NAMESPACE}.svc"
AUTHORITY = "kueue-ca"  # the name that Kueue looks for in the authority's certificate
CONFIG_MAP = "kueue-manager-config"
CONFIG_KEY = "controller_manager_config.yaml"
SECRET = "kueue-webhook-server-cert"  # noqa: S105  # its name

# Served by the pod that the process replaces, or in front of it.
LEFT_OUT = frozenset({"APIService", "Deployment", "PodDisruptionBudget", "Service"})
TRIAL = "elastipod-local-trial"  # never kept
OUR_KIND = "HyperPodPyTorchJob.v1.sagemaker.amazonaws.com"


@dataclass(frozen=True, slots=True)
class KueueOptions:
    """How Kueue is set up in a cluster.

    frameworks: Kueue's own integrations that are on, as `batch/job` or `pod`. external_frameworks: kinds
    (`Kind.version.group`) whose pods its pod integration leaves to their owner; Kueue gets the right to read them.
    settings: further keys of Kueue's Configuration (`waitForPodsReady`, `fairSharing`, ...), which override ours.
    """

    frameworks: tuple[str, ...] = ("batch/job",)
    external_frameworks: tuple[str, ...] = (OUR_KIND,)
    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "KueueOptions":
        """Give what `dataclasses.asdict` and JSON made a record of."""
        return cls(tuple(record["frameworks"]), tuple(record["external_frameworks"]), record["settings"])


def configuration(
    release: Manifest, options: KueueOptions, *, host: str, webhook_port: int, health_port: int, certificates: str
) -> Manifest:
    """Give the Configuration of Kueue's release with our changes and those of `options`.

    host: the one address on which Kueue listens; certificates: folder of the certificates of its webhooks.
    """
    ours: Manifest = {
        "namespace": NAMESPACE,
        "health": {"healthProbeBindAddress": f"{host}:{health_port}"},
        "metrics": {"bindAddress": "0"},
        "webhook": {"host": host, "port": webhook_port, "certDir": certificates},
        # One manager; and a killed one's lease would keep the next waiting.
        "leaderElection": {"leaderElect": False},
        # As in a stock install; without it Kueue reads certificates for its metrics from a fixed folder in /etc.
        "internalCertManagement": {
            "enable": True,
            "webhookServiceName": WEBHOOK_SERVICE.split(".")[0],
            "webhookSecretName": SECRET,
        },
        "manageJobsWithoutQueueName": False,
        "integrations": {
            "frameworks": list(options.frameworks),
            "externalFrameworks": list(options.external_frameworks),
        },
    }
    # The visibility server keeps certificates in a fixed folder too, and nothing here asks it.
    gates = {"VisibilityOnDemand": False, **options.settings.get("featureGates", {})}
    return {**release, **ours, **options.settings, "featureGates": gates}


def chart_values(config: Manifest) -> Manifest:
    """Give the values for Kueue's chart that carry our configuration."""
    return {"managerConfig": {"controllerManagerConfigYaml": json.dumps(config)}}


def localized(objects: Sequence[Manifest], *, address: str, secret: Mapping[str, bytes]) -> list[Manifest]:
    """Give a release's objects made fit for a manager outside the cluster.

    What serves or fronts the manager's pod is left out, webhooks are called at `address` (host:port), and the Secret
    of their certificates holds `secret`; its `ca.crt` is whom the API server trusts with them.
    """
    data = {key: base64.b64encode(value).decode() for key, value in secret.items()}
    return [_localized(item, address, data) for item in objects if item["kind"] not in LEFT_OUT]


def _localized(item: Manifest, address: str, data: Mapping[str, str]) -> Manifest:
    def called_here(webhook: Manifest) -> Manifest:
        url = f"https://{address}{webhook['clientConfig']['service']['path']}"
        # Kueue would put its authority in as well, but takes seconds for the large kinds.
        return {**webhook, "clientConfig": {"url": url, "caBundle": data["ca.crt"]}}

    match item:
        case {"kind": "Secret", "metadata": {"name": name}} if name == SECRET:
            return {**item, "data": data}
        case {"kind": "CustomResourceDefinition", "spec": {"conversion": {"webhook": webhook}}}:
            conversion = {**item["spec"]["conversion"], "webhook": called_here(webhook)}
            return {**item, "spec": {**item["spec"], "conversion": conversion}}
        case {"kind": "MutatingWebhookConfiguration" | "ValidatingWebhookConfiguration", "webhooks": webhooks}:
            return {**item, "webhooks": [called_here(webhook) for webhook in webhooks]}
    return item


def external_roles(options: KueueOptions) -> list[Manifest]:
    """Give the right to read objects of the external kinds, which Kueue's chart does not include."""
    name = "kueue-external-frameworks"
    # Kind.version.group; by convention the plural is what its resource is called.
    kinds = [entry.split(".", 2) for entry in options.external_frameworks]
    if not kinds:
        return []
    rules = [
        {"apiGroups": [group], "resources": [f"{kind.lower()}s"], "verbs": ["get", "list", "watch"]}
        for kind, _, group in kinds
    ]
    api = "rbac.authorization.k8s.io"
    return [
        {"apiVersion": f"{api}/v1", "kind": "ClusterRole", "metadata": {"name": name}, "rules": rules},
        {
            "apiVersion": f"{api}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": name},
            "roleRef": {"apiGroup": api, "kind": "ClusterRole", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": SERVICE_ACCOUNT, "namespace": NAMESPACE}],
        },
    ]


def trial_objects() -> list[Manifest]:
    """Give objects that are accepted only when Kueue's webhooks work: one is validated, the other converted as well."""
    cpu = {"name": TRIAL, "resources": [{"name": "cpu", "nominalQuota": "1"}]}
    queue = {"namespaceSelector": {}, "resourceGroups": [{"coveredResources": ["cpu"], "flavors": [cpu]}]}
    return [
        {"apiVersion": API_VERSION, "kind": "ResourceFlavor", "metadata": {"name": TRIAL}},
        {"apiVersion": API_VERSION, "kind": "ClusterQueue", "metadata": {"name": TRIAL}, "spec": queue},
    ]
