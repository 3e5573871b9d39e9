"""Warnings at apply, and the rules that need no webhook, on a real API server with the chart's own objects."""

from __future__ import annotations

import asyncio
import base64
import copy
import json
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.api.compat_lives import operator
from tests.api.jobs import apply, job, refusal
from tests.api.self_signed import issue
from tests.chart.rendered import Objects, render
from tests.free_ports import free_port
from tests.patience import PATIENCE_S

from elastipod_local import binaries
from elastipod_local.cluster import Cluster
from elastipod_local.errors import CommandError
from elastipod_local.host import wait_until
from elastipod_operator.admission.authority_bundle import refresh_bundle
from elastipod_operator.admission.certificates import SERVES_FOR, Files, SelfMade
from elastipod_operator.admission.webhook import PATH, Webhook
from elastipod_operator.core.ending import KEPT_TEXT
from elastipod_operator.kube.api import Api
from elastipod_operator.kube.queue_api import QueueApi
from elastipod_operator.kube.scope import Scope

CONFIGURATION = "aws-hyperpod-elastipod"
OTHER = "others:operator"
"""The account of another operator, which the policies know."""
UNREACHABLE = "cannot be reached from 1 in steps of 2; the largest size is 3"


def wishful(name: str = "llm", **spec: Any) -> dict[str, Any]:
    """Give a job that deserves some warnings."""
    policy = {"minReplicas": 1, "maxReplicas": 4, "replicaIncrementStep": 2}
    body = job(name, elasticPolicy=policy, runPolicy={"ttlSecondsAfterFinished": 0}, **spec)
    body["spec"]["replicaSpecs"][0] |= {"maxReplicas": 4}
    template = copy.deepcopy(body["spec"]["replicaSpecs"][0]["template"])
    template["spec"]["containers"][0]["command"] = ["python", "train.py"]
    body["spec"]["replicaSpecs"][0]["template"] = template
    body["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "nowhere"}
    return body


def kubectl(cluster: Cluster, *arguments: str, body: dict[str, Any] | None = None) -> list[str]:
    """Run kubectl, and give the warnings that it prints."""
    command = [str(binaries.ensure(["kubectl"])["kubectl"]), *arguments]
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/root", **cluster.environment()}
    done = subprocess.run(
        command, env=environment, input=json.dumps(body), capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    return [line.removeprefix("Warning: ") for line in done.stderr.splitlines() if line.startswith("Warning: ")]


def applied(cluster: Cluster, namespace: str, body: dict[str, Any]) -> list[str]:
    return kubectl(cluster, "-n", namespace, "apply", "-f", "-", body=body)


def tried(cluster: Cluster, namespace: str) -> list[str]:
    """Give the warnings about a job that is not kept."""
    command = ("-n", namespace, "create", "--dry-run=server", "-f", "-")
    return kubectl(cluster, *command, body=wishful(f"try-{uuid.uuid4().hex[:8]}"))


@contextmanager
def installed(cluster: Cluster, objects: Objects, *kinds: str) -> Iterator[None]:
    """Keep some of the chart's objects in the cluster."""
    items = [body for (kind, _, _), body in objects.items() if kind in kinds]
    assert {body["kind"] for body in items} == set(kinds)
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
    cluster.kubectl("apply", "-f", "-", input=text)
    try:
        yield
    finally:
        cluster.kubectl("delete", "-f", "-", input=text)


@contextmanager
def webhook_at(cluster: Cluster, namespace: str, port: int) -> Iterator[None]:
    """Install the chart's configuration for one namespace, with a URL: no Service leads to a port of this machine."""
    objects = render({"webhook": {"enabled": True, "timeoutSeconds": 30}, "watchNamespaces": [namespace]})
    (webhook,) = objects["ValidatingWebhookConfiguration", "", CONFIGURATION]["webhooks"]
    webhook["clientConfig"] = {"url": f"https://127.0.0.1:{port}{PATH}"}
    with installed(cluster, objects, "ValidatingWebhookConfiguration"):
        yield


def point_to(cluster: Cluster, port: int) -> None:
    patch = [{"op": "replace", "path": "/webhooks/0/clientConfig/url", "value": f"https://127.0.0.1:{port}{PATH}"}]
    cluster.kubectl(
        "patch", "validatingwebhookconfiguration", CONFIGURATION, "--type=json", f"--patch={json.dumps(patch)}"
    )


def test_leader_and_standby_warn_and_without_them_jobs_are_created(
    api_server: Cluster, namespace: str, tmp_path: Path
) -> None:
    ports, logs = {"one": free_port(), "two": free_port()}, {}
    with webhook_at(api_server, namespace, ports["one"]), ExitStack() as running:
        assert applied(api_server, namespace, wishful("early")) == [], "nobody serves the webhook yet"
        for name, port in ports.items():
            (tmp_path / name).mkdir()
            more = {"POD_NAME": name, "POD_NAMESPACE": "kube-system", "WEBHOOK_PORT": str(port)}
            more |= {"WEBHOOK_CONFIGURATION": CONFIGURATION, "LOG_LEVEL": "info"}
            logs[name] = running.enter_context(operator(api_server, tmp_path / name, [namespace], more))
        for name, port in ports.items():
            point_to(api_server, port)
            wait_until(
                lambda: any(UNREACHABLE in one for one in tried(api_server, namespace)),
                deadline_s=PATIENCE_S,
                what=f"warnings of replica {name}",
            )
        bundles = [log.read_text().count("the authority of the admission webhook was written") for log in logs.values()]
        assert sorted(bundles) == [0, 1], "the leader alone writes the authority"
        told = applied(api_server, namespace, wishful())
        for sentence in (
            *(UNREACHABLE, KEPT_TEXT, "does not start hyperpodrun in container trainer"),
            *(
                "mounts nothing in container trainer that outlives the pod",
                "install Kueue 0.15 or newer, or remove the label",
            ),
        ):
            assert [one for one in told if sentence in one] != [], f"{sentence}: {told}"
        assert kubectl(api_server, "-n", namespace, "label", "hpjob", "llm", "team=a") != []
        assert kubectl(api_server, "-n", namespace, "annotate", "hpjob", "llm", "note=a") == [], "nothing new to say"
        assert kubectl(api_server, "-n", namespace, "scale", "hpjob", "llm", "--replicas=3") == []
        (sentence,) = kubectl(api_server, "-n", namespace, "scale", "hpjob", "llm", "--replicas=0")
        assert "spec.replicas was set from 3 to 0, which means no ceiling" in sentence
    # The configuration is gone too; a webhook that is down is the case above and below.
    with webhook_at(api_server, namespace, free_port()):
        assert applied(api_server, namespace, wishful("late")) == []


@pytest.mark.slow
async def test_an_expired_certificate_keeps_no_job_out_and_is_renewed(
    api: Api, api_server: Cluster, namespace: str
) -> None:
    """The webhook's clock is behind by a month, until it is corrected: its first certificate has long expired."""
    port, now = free_port(), [datetime.now(UTC) - 5 * SERVES_FOR]
    certificates = SelfMade([b"k" * 32], "127.0.0.1")
    with webhook_at(api_server, namespace, port):
        assert await refresh_bundle(api, CONFIGURATION, certificates, datetime.now(UTC))
        webhook = Webhook(
            port, certificates, QueueApi(api), api, Scope("test"), clock=lambda: now[0], check_again_s=0.1
        )
        serving = asyncio.create_task(webhook.run())
        try:
            for name in ("first", "second"):
                assert await asyncio.to_thread(applied, api_server, namespace, wishful(name)) == []
            now[0] = datetime.now(UTC)
            async with asyncio.timeout(PATIENCE_S):
                while not await asyncio.to_thread(tried, api_server, namespace):
                    pass
            assert await asyncio.to_thread(applied, api_server, namespace, wishful("third")) != []
        finally:
            serving.cancel()
            with suppress(asyncio.CancelledError):
                await serving


@pytest.mark.slow
async def test_certificates_of_cert_managers_self_signed_issuer_are_trusted_and_renewed(
    api: Api, api_server: Cluster, namespace: str, tmp_path: Path
) -> None:
    """Made here as its issuer makes them of the chart's Certificate, and put into the configuration as its injector does."""
    objects = render({"webhook": {"enabled": True, "certManager": {"enabled": True}}})
    (spec,) = (body["spec"] for (kind, _, _), body in objects.items() if kind == "Certificate")
    port = free_port()

    async def warns_with(authority: bytes) -> None:
        value = base64.b64encode(authority).decode()
        patch = json.dumps([{"op": "add", "path": "/webhooks/0/clientConfig/caBundle", "value": value}])
        await asyncio.to_thread(
            *(api_server.kubectl, "patch", "validatingwebhookconfiguration", CONFIGURATION),
            *("--type=json", f"--patch={patch}"),
        )
        async with asyncio.timeout(PATIENCE_S):
            while not await asyncio.to_thread(tried, api_server, namespace):
                pass

    with webhook_at(api_server, namespace, port):
        webhook = Webhook(port, Files(tmp_path), QueueApi(api), api, Scope("test"), check_again_s=0.1)
        serving = asyncio.create_task(webhook.run())
        try:
            first = issue(spec, "127.0.0.1", tmp_path)
            await warns_with(first)
            second = issue(spec, "127.0.0.1", tmp_path)
            assert second != first
            await warns_with(second)
        finally:
            serving.cancel()
            with suppress(asyncio.CancelledError):
                await serving


@pytest.fixture
def policed(api_server: Cluster, namespace: str) -> Iterator[str]:
    """A namespace with the chart's policies in force."""
    policy = {"enabled": True, "otherOperators": [username(OTHER)]}
    objects = render({"admissionPolicy": policy, "watchNamespaces": [namespace]})
    kinds = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
    with installed(api_server, objects, *kinds):

        def in_force() -> bool:
            """Whether both policies are: each refuses something."""
            pod = api_server.kubectl(
                *("-n", namespace, "create", "--dry-run=server", "-f", "-"),
                input=json.dumps(foreign_pod()),
                check=False,
            )
            body = api_server.kubectl(
                *("-n", namespace, "create", "--dry-run=server", "-f", "-"), input=json.dumps(uneven(8, 4)), check=False
            )
            return not pod and not body

        wait_until(in_force, deadline_s=PATIENCE_S, what="the policies to be in force")
        yield namespace


def username(account: str) -> str:
    return f"system:serviceaccount:{account}"


def as_user(account: str) -> tuple[str, ...]:
    """Give the options with which kubectl acts as a service account, with all permissions."""
    return (f"--as={username(account)}", "--as-group=system:masters")


def foreign_pod() -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "llm-pods-0", "labels": {"HPJob": "llm", "elastipod.io/job-uid": "a-job"}},
        "spec": {"containers": [{"name": "c", "image": "train:1"}]},
    }


def uneven(*devices: int | str, **container: Any) -> dict[str, Any]:
    """Give a job with a template for each number of devices."""
    templates = [
        {"spec": {"containers": [{"name": "t", "image": "train:1", "resources": {"limits": {"nvidia.com/gpu": n}}}]}}
        for n in devices
    ]
    for one in templates:
        one["spec"]["containers"][0] |= container
    return job(
        "uneven", replica_specs=[{"name": f"s{at}", "replicas": 1, "template": t} for at, t in enumerate(templates)]
    )


def test_policies_type_check(api_server: Cluster, policed: str) -> None:
    for one in ("jobs", "pods"):
        name = f"{CONFIGURATION}-{one}"

        def status(name: str = name) -> dict[str, Any]:
            text = api_server.kubectl("get", "validatingadmissionpolicy", name, "-o", "json")
            found: dict[str, Any] = json.loads(text).get("status", {})
            return found

        wait_until(
            lambda: "typeChecking" in status(), deadline_s=PATIENCE_S, what=f"a check of policy {name}"
        )  # called at once
        assert status()["typeChecking"] == {}, name


def test_the_policy_refuses_records_that_a_user_writes(api_server: Cluster, policed: str) -> None:
    body = job()
    body["metadata"]["annotations"] = {"elastipod.io/state": "copied"}
    assert "created" in apply(api_server, policed, body), "copies of manifests hold records, which the operator ignores"
    assert "configured" in apply(api_server, policed, {**body, "spec": job(nprocPerNode="2")["spec"]})
    body["metadata"]["annotations"] = {"elastipod.io/state": "forged"}
    sentence = "elastipod.io/state is written by the operator alone; remove it from the manifest"
    assert sentence in refusal(api_server, policed, body)
    body["metadata"]["annotations"] = {}
    assert "configured" in apply(api_server, policed, body)
    operators = as_user("aws-hyperpod:elastipod")
    api_server.kubectl("-n", policed, "annotate", "hpjob", "llm", "elastipod.io/state=real", *operators)


@pytest.mark.slow
def test_the_records_of_another_releases_jobs_are_its_own_affair(api_server: Cluster, policed: str) -> None:
    def annotate(*annotations: str, is_user: bool = False) -> None:
        who = () if is_user else as_user("trials:trials-elastipod")
        api_server.kubectl("-n", policed, "annotate", "--overwrite", "hpjob", "llm", *annotations, *who)

    body = job()
    body["metadata"]["annotations"] = {"elastipod.io/controller": "trials"}
    apply(api_server, policed, body)
    annotate("elastipod.io/state=real")
    with pytest.raises(CommandError, match="is written by the operator alone"):
        annotate("elastipod.io/state=forged", "elastipod.io/controller=elastipod", is_user=True)
    with pytest.raises(CommandError, match="is written by the operator alone"):
        annotate("elastipod.io/controller=elastipod", is_user=True)
    annotate("elastipod.io/controller=elastipod", "elastipod.io/state-", is_user=True)
    with pytest.raises(CommandError, match="is written by the operator alone"):
        annotate("elastipod.io/state=forged", "elastipod.io/controller=trials", is_user=True)
    with pytest.raises(CommandError, match="is written by the operator alone"):
        annotate("elastipod.io/state=newer")


@pytest.mark.slow
def test_operators_that_are_named_create_pods_and_write_records_too(api_server: Cluster, policed: str) -> None:
    apply(api_server, policed, job())
    pod = foreign_pod()
    for who in (OTHER, "aws-hyperpod:elastipod"):
        api_server.kubectl("-n", policed, "create", "-f", "-", *as_user(who), input=json.dumps(pod))
        api_server.kubectl("-n", policed, "delete", "pod", pod["metadata"]["name"], "--grace-period=0", "--force")
        record = ("--overwrite", "hpjob", "llm", f"elastipod.io/state={who}")
        api_server.kubectl("-n", policed, "annotate", *record, *as_user(who))
    with pytest.raises(CommandError, match="which the operator alone creates"):
        api_server.kubectl(
            "-n", policed, "create", "-f", "-", *as_user("trials:default"), input=json.dumps(foreign_pod())
        )


def test_the_policy_refuses_templates_with_different_devices(api_server: Cluster, policed: str) -> None:
    said = refusal(api_server, policed, uneven(8, 4))
    assert "start different numbers of workers; give all pods the same number of devices" in said
    for body in (
        uneven(8, "8"),
        uneven("0", 0),
        uneven(8, 4, env=[{"name": "NPROC_PER_NODE", "value": "4"}]),
        uneven(8, 4, command=["hyperpodrun", "--nproc-per-node=4", "train.py"]),
        uneven(8),
    ):
        assert "created" in apply(api_server, policed, body)
        api_server.kubectl("-n", policed, "delete", "hpjob", "uneven")


@pytest.mark.slow
def test_the_policy_refuses_pods_that_pretend_to_be_a_jobs(api_server: Cluster, policed: str) -> None:
    assert "which the operator alone creates; remove the label" in refusal(api_server, policed, foreign_pod())
    mine = foreign_pod()
    del mine["metadata"]["labels"]["elastipod.io/job-uid"]
    apply(api_server, policed, mine)
    assert "which the operator alone creates" in refusal(api_server, policed, foreign_pod()), "nor by an update"
    api_server.kubectl("-n", policed, "delete", "pod", mine["metadata"]["name"])  # nodes of other tests would take it
