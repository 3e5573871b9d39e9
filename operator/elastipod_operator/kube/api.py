"""The calls to the API server: few and explicit, with plain dicts as bodies."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import AsyncIterator, Mapping
from datetime import datetime
from typing import Any

import aiohttp
from kubernetes.aio import client, config

from ..core.actions import JobEvent
from ..core.names import API_VERSION, CRD_NAME, FIELD_MANAGER, GROUP, KIND, LABEL_UID, PLURAL, VERSION
from ..core.quoted_output import redact_quotes
from ..core.snapshot import ObservedJob
from ..core.time_order import timestamp

MERGE_PATCH = "application/merge-patch+json"
# With a charset, because the client would otherwise serialize the body itself, as JSON that is not valid YAML.
APPLY_PATCH = "application/apply-patch+yaml; charset=utf-8"
CALL_TIMEOUT_S = 10
EVENT_MESSAGE_LIMIT = 1000
TOO_MANY_REQUESTS = 429
NOT_PLAIN = re.compile("[\x7f-\uffff]")


class ApiError(Exception):
    """The API server refused a call. status: the HTTP code, 0 if no call was made. The text is the server's message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


CALL_ERRORS = (ApiError, aiohttp.ClientError, OSError, TimeoutError)
"""What a call may raise: the API server refused it, or did not answer."""


def may_pass(error: Exception) -> bool:
    """Whether a call may succeed later by itself: the API server did not answer, or could not at that moment."""
    return not isinstance(error, ApiError) or error.status >= 500 or error.status == TOO_MANY_REQUESTS


async def connect(*, is_unlimited: bool = False) -> client.ApiClient:
    """Give a client with the pod's service account, or with the user's kubeconfig outside of a cluster.

    is_unlimited: it opens any number of connections, otherwise 100. Raises ApiError with status 0 if there is neither account.
    """
    configuration = client.Configuration(connection_pool_maxsize=0 if is_unlimited else None)
    try:
        config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]  # the client has no annotations here
    except config.ConfigException:
        try:
            await config.load_kube_config(client_configuration=configuration)  # type: ignore[no-untyped-call]  # the client has no annotations here
        except config.ConfigException as error:
            raise ApiError(0, f"neither a service account nor a kubeconfig: {error}") from error
    made = client.ApiClient(configuration)
    made.user_agent = FIELD_MANAGER  # also the default field manager of all writes
    return made


class Api:
    """Reads and writes of the operator. Raises ApiError if the API server refuses a call, else another of CALL_ERRORS.

    watch_client: for watches, which would take the connections of other calls; None if there are none.
    """

    def __init__(self, api_client: client.ApiClient, watch_client: client.ApiClient | None = None) -> None:
        self._client = api_client
        self._watch_client = watch_client or api_client

    async def list_pods(self, namespace: str, job_uid: str) -> tuple[list[dict[str, Any]], int]:
        """Give the pods of a job, consistently read, and the version of the list."""
        path = f"/api/v1/namespaces/{namespace}/pods"
        answer = await self.call("GET", path, query=[("labelSelector", f"{LABEL_UID}={job_uid}")])
        return answer["items"], int(answer["metadata"].get("resourceVersion") or 0)

    async def list_nodes(self) -> list[dict[str, Any]]:
        """Give all nodes."""
        answer = await self.call("GET", "/api/v1/nodes", query=[("resourceVersion", "0")])
        nodes: list[dict[str, Any]] = answer["items"]
        return nodes

    async def effective_job(self, namespace: str, name: str) -> dict[str, Any]:
        """Give a job as it is now."""
        return await self.call("GET", _job_path(namespace, name))

    async def patch_metadata(self, job: ObservedJob, version: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """Write annotations or finalizers if the job is still at `version`; otherwise the answer is 409."""
        body = {"metadata": {**metadata, "resourceVersion": version, "uid": job.uid}}
        return await self.call("PATCH", _job_path(job.namespace, job.name), body, content_type=MERGE_PATCH)

    async def apply_status(self, job: ObservedJob, status: Mapping[str, Any]) -> dict[str, Any]:
        """Apply the whole status; the operator is its only writer."""
        body = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"name": job.name, "namespace": job.namespace, "uid": job.uid},
            "status": status,
        }
        query = [("fieldManager", FIELD_MANAGER), ("force", "true")]
        path = _job_path(job.namespace, job.name) + "/status"
        return await self.call("PATCH", path, as_yaml(body), query=query, content_type=APPLY_PATCH)

    async def delete_job(self, job: ObservedJob) -> None:
        """Delete the job if it is still the same one."""
        await self.call("DELETE", _job_path(job.namespace, job.name), {"preconditions": {"uid": job.uid}})

    async def create_pod(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Create a pod; 409 if it exists."""
        namespace = manifest["metadata"]["namespace"]
        return await self.call("POST", f"/api/v1/namespaces/{namespace}/pods", dict(manifest))

    async def create_secret(self, manifest: Mapping[str, Any]) -> None:
        """Create a Secret; 409 if it exists."""
        namespace = manifest["metadata"]["namespace"]
        await self.call("POST", f"/api/v1/namespaces/{namespace}/secrets", dict(manifest))

    async def delete_pod(
        self, namespace: str, name: str, uid: str, *, force: bool, grace_s: int | None = None
    ) -> dict[str, Any]:
        """Delete a pod if it is still the same one; gives the pod, or a Status if it is gone at once.

        force: do not wait for its kubelet. grace_s: the grace period; None for that of the pod.
        """
        body: dict[str, Any] = {"preconditions": {"uid": uid}}
        if force or grace_s is not None:
            body["gracePeriodSeconds"] = 0 if force else grace_s
        return await self.call("DELETE", f"/api/v1/namespaces/{namespace}/pods/{name}", body)

    async def emit(self, job: ObservedJob, event: JobEvent, at: datetime) -> None:
        """Write a Kubernetes Event about the job, without output of its scripts. at: when it happened."""
        format_time = timestamp(at)
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{job.name[:200]}.{uuid.uuid4().hex[:16]}", "namespace": job.namespace},
            "involvedObject": {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "name": job.name,
                "namespace": job.namespace,
                "uid": job.uid,
            },
            "type": "Warning" if event.is_warning else "Normal",
            "reason": event.reason,
            "message": redact_quotes(event.message)[:EVENT_MESSAGE_LIMIT],
            "source": {"component": FIELD_MANAGER},
            "reportingComponent": FIELD_MANAGER,
            "firstTimestamp": format_time,
            "lastTimestamp": format_time,
            "count": 1,
        }
        await self.call("POST", f"/api/v1/namespaces/{job.namespace}/events", body)

    async def label_pod(self, namespace: str, name: str, labels: Mapping[str, str | None]) -> None:
        """Set labels of a pod; None removes one."""
        path = f"/api/v1/namespaces/{namespace}/pods/{name}"
        await self.call("PATCH", path, {"metadata": {"labels": dict(labels)}}, content_type=MERGE_PATCH)

    async def read_lease(self, namespace: str, name: str) -> dict[str, Any]:
        """Give the leader lease; 404 when there is none yet."""
        return await self.call("GET", f"{_leases(namespace)}/{name}")

    async def list_leases(self, name: str) -> list[dict[str, Any]]:
        """Give the leases of this name in all namespaces."""
        path, query = "/apis/coordination.k8s.io/v1/leases", [("fieldSelector", f"metadata.name={name}")]
        leases: list[dict[str, Any]] = (await self.call("GET", path, query=query))["items"]
        return leases

    async def read_crd(self) -> dict[str, Any]:
        """Give the CRD of jobs; 404 when there is none."""
        return await self.call("GET", f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{CRD_NAME}")

    async def create_lease(self, namespace: str, body: Mapping[str, Any]) -> None:
        """Create the leader lease; 409 if another operator was faster."""
        await self.call("POST", _leases(namespace), body)

    async def replace_lease(self, namespace: str, name: str, body: Mapping[str, Any]) -> None:
        """Replace the leader lease if it is unchanged since it was read; otherwise 409."""
        await self.call("PUT", f"{_leases(namespace)}/{name}", body)

    async def call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | str | None = None,
        *,
        query: list[tuple[str, str]] | None = None,
        content_type: str = "application/json",
    ) -> dict[str, Any]:
        """Make one call and give the answer's body."""
        response = await self._request(self._client, method, path, body, query or [], content_type, CALL_TIMEOUT_S)
        raw: bytes = await response.read()
        try:
            answer: dict[str, Any] = json.loads(raw)
        except ValueError as error:
            raise ApiError(
                response.status, "the answer is not JSON; is there a proxy before the API server?"
            ) from error
        return answer

    async def watch(self, path: str, query: list[tuple[str, str]], limit_s: float) -> AsyncIterator[dict[str, Any]]:
        """Give the events of a watch until the API server ends it. A silent watch ends with TimeoutError."""
        limit = aiohttp.ClientTimeout(total=limit_s)
        query = [*query, ("watch", "true")]
        response = await self._request(self._watch_client, "GET", path, None, query, "application/json", limit)
        stream: aiohttp.ClientResponse = response.response
        try:
            async for line in lines_of(stream.content.iter_any()):
                yield json.loads(line)
        finally:
            stream.close()

    @staticmethod
    async def _request(
        api_client: client.ApiClient,
        method: str,
        path: str,
        body: Mapping[str, Any] | str | None,
        query: list[tuple[str, str]],
        content_type: str,
        limit: int | aiohttp.ClientTimeout,
    ) -> Any:
        request = await api_client.param_serialize(
            method=method,
            resource_path=path,
            query_params=query,
            header_params={"Accept": "application/json", "Content-Type": content_type},
            body=body,
            auth_settings=["BearerToken"],
        )
        response = await api_client.call_api(*request, _request_timeout=limit)
        if not 200 <= response.status <= 299:
            raise ApiError(response.status, _message(await response.read()))  # type: ignore[no-untyped-call]  # the client has no annotations here
        return response


async def lines_of(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Give the complete lines of a stream; a last line without a line end is left out."""
    rest = b""
    async for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            if line.strip():
                yield line


def as_yaml(body: Mapping[str, Any]) -> str:
    """Give JSON that is also valid YAML, as which apply patches are read. It may contain any output of users' programs.

    YAML has no surrogate pairs, so characters beyond U+FFFF (torch's own messages have some) stay as they are. All other
    characters outside ASCII are escaped, because YAML rejects control characters and reads some others as line ends.
    """
    return NOT_PLAIN.sub(_escaped, json.dumps(body, ensure_ascii=False))


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    return "\\ufffd" if 0xD800 <= code <= 0xDFFF else f"\\u{code:04x}"


def _message(raw: bytes) -> str:
    try:
        return str(json.loads(raw)["message"])
    except (ValueError, KeyError, TypeError):
        return raw[:300].decode(errors="replace")


def _leases(namespace: str) -> str:
    return f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"


def _job_path(namespace: str, name: str) -> str:
    return f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/{PLURAL}/{name}"
