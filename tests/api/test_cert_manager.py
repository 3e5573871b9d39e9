"""The webhook with certificates of cert-manager: its own controllers issue, inject and renew what the chart asks them for."""

from __future__ import annotations

import json
import ssl
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from tests.api.cert_manager import cert_manager, data_of, mounted
from tests.api.compat_lives import operator
from tests.api.test_admission import CONFIGURATION, applied, installed, tried, wishful
from tests.chart.rendered import Objects, render
from tests.free_ports import free_port
from tests.long_runs import LongRun
from tests.patience import PATIENCE_S

from elastipod_local.cluster import Cluster
from elastipod_local.host import wait_until
from elastipod_operator.admission.webhook import PATH

NAMESPACE = "aws-hyperpod"
RENEWALS = 2
# cert-manager allows no shorter life than an hour; the renewal may come as early as one likes.
EVERY_MINUTE = {"duration": "1h0m0s", "renewBefore": "59m0s"}


def of_the_chart(namespace: str, port: int) -> Objects:
    """Give the chart's objects, with an address of this machine in place of the Service, whose name leads nowhere here."""
    objects = render(
        {
            "webhook": {"enabled": True, "timeoutSeconds": 30, "certManager": {"enabled": True}},
            "watchNamespaces": [namespace],
        }
    )
    (webhook,) = objects["ValidatingWebhookConfiguration", "", CONFIGURATION]["webhooks"]
    webhook["clientConfig"] = {"url": f"https://127.0.0.1:{port}{PATH}"}
    certificate_of(objects)["spec"] |= {"ipAddresses": ["127.0.0.1"], **EVERY_MINUTE}
    return objects


def certificate_of(objects: Objects) -> dict[str, Any]:
    (found,) = (body for (kind, _, _), body in objects.items() if kind == "Certificate")
    return found


def serial_served(port: int) -> int:
    """Give the number of the certificate that is served; 0 for none."""
    try:
        text = ssl.get_server_certificate(("127.0.0.1", port))
    except OSError:
        return 0
    return x509.load_pem_x509_certificate(text.encode()).serial_number


@pytest.mark.timeout(900)
@pytest.mark.long("cert-manager")
def test_it_issues_and_renews_the_webhooks_certificate(
    api_server: Cluster, namespace: str, tmp_path: Path, long_run: LongRun
) -> None:
    port, files = free_port(), tmp_path / "secret"
    files.mkdir()
    objects = of_the_chart(namespace, port)
    certificate = certificate_of(objects)["metadata"]["name"]
    api_server.kubectl("create", "namespace", NAMESPACE)
    more = {"WEBHOOK_PORT": str(port), "WEBHOOK_CERTIFICATES": str(files)}

    def revision() -> int:
        found = json.loads(api_server.kubectl("-n", NAMESPACE, "get", "certificate", certificate, "-o", "json"))
        return int(found.get("status", {}).get("revision", 0))

    def is_trusted() -> bool:
        """Whether the API server asks the webhook, which serves the newest certificate, and prints its warnings."""
        newest = data_of(api_server, NAMESPACE, certificate).get("tls.crt", b"")
        if not newest or serial_served(port) != x509.load_pem_x509_certificate(newest).serial_number:
            return False
        return tried(api_server, namespace) != []

    with (
        cert_manager(api_server, tmp_path) as log,
        installed(api_server, objects, "Issuer", "Certificate", "ValidatingWebhookConfiguration"),
        mounted(api_server, NAMESPACE, certificate, files),
        operator(api_server, tmp_path, (namespace,), more),
    ):
        assert applied(api_server, namespace, wishful("early")) is not None, (
            "jobs are created while nothing is issued yet"
        )
        wait_until(lambda: bool(list(files.glob("tls.crt"))), deadline_s=PATIENCE_S, what=f"a certificate; see {log}")
        for renewal in range(RENEWALS + 1):
            wait_until(
                lambda renewal=renewal: revision() > renewal and is_trusted(),  # type: ignore[misc]
                deadline_s=PATIENCE_S,
                what=f"warnings with certificate {renewal + 1}; it is at revision {revision()}",
            )
            assert applied(api_server, namespace, wishful(f"job-{renewal}")) is not None
    long_run.count(renewals=RENEWALS)
