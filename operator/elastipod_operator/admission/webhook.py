"""The webhook's HTTPS server, and what it looks up for a review."""

from __future__ import annotations

import asyncio
import logging
import ssl
import tempfile
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from ..core.queue_facts import QueueFact
from ..kube.api import CALL_ERRORS, ApiError
from ..kube.api_ports import JobReads
from ..kube.cluster_queues import QueueTable
from ..kube.queue_api import QueueApi
from ..kube.reading import mapping, text
from ..kube.scope import Scope
from ..queueing.workload_control import KUEUE_MISSING
from .certificates import CertificateError, Certificates, Pair
from .review import allow, answer, job_without_ceiling, queue_named_in

log = logging.getLogger(__name__)

PATH = "/validate"
# The API server takes objects of 3 MiB, and sends the old one beside the new one.
MAX_REVIEW_BYTES = 8 * 1024 * 1024
LOOKUP_LIMIT_S = 2.0
CHECK_AGAIN_S = 30.0
# An operator that has lost its lease ends at once; reviews take milliseconds.
SHUTDOWN_LIMIT_S = 1.0
NOT_FOUND = 404


def wall_clock() -> datetime:
    """Give the time by which others check certificates. The operator's own clock approaches it only gradually."""
    return datetime.now(UTC)


class Webhook:
    """Serves reviews on a port, with a certificate that is renewed while it runs. scope: the jobs of which it speaks."""

    def __init__(
        self,
        port: int,
        certificates: Certificates,
        queues: QueueApi,
        jobs: JobReads,
        scope: Scope,
        clock: Callable[[], datetime] = wall_clock,
        check_again_s: float = CHECK_AGAIN_S,
    ) -> None:
        self._port, self._certificates = port, certificates
        self._queues, self._jobs, self._scope = queues, jobs, scope
        self._clock, self._check_again_s = clock, check_again_s
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._loaded: Pair | None = None
        self._problem = ""

    async def run(self) -> None:
        """Serve until cancelled. Without a certificate or a port it tries again: the operator works without its webhook."""
        runner: web.AppRunner | None = None
        try:
            while True:
                try:
                    self._load(self._certificates.pair(self._clock()))
                    runner = runner or await self._listen()
                    self._problem = ""
                except (CertificateError, OSError) as error:
                    self._tell(str(error))
                await asyncio.sleep(self._check_again_s)
        finally:
            if runner is not None:
                await runner.cleanup()

    async def review(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Give the answer to an AdmissionReview. Raises nothing because of its content."""
        request = mapping(body.get("request"))
        if not await self._is_ours(request):
            return allow(request)
        return answer(request, await self._queue(*queue_named_in(request)))

    async def _is_ours(self, request: Mapping[str, Any]) -> bool:
        """Whether this release runs the job of a request, as far as that is known."""
        if not self._scope.watches(text(request.get("namespace"))):
            return False
        if request.get("subResource") != "scale":
            return self._scope.holds(mapping(request.get("object")))
        namespace, name = job_without_ceiling(request)
        if not name:
            return False  # there is nothing to say of it
        try:  # a scale does not show the annotations of its job
            async with asyncio.timeout(LOOKUP_LIMIT_S):
                return self._scope.holds(await self._jobs.effective_job(namespace, name))
        except CALL_ERRORS:
            return False

    async def _queue(self, namespace: str, name: str) -> QueueFact | str | None:
        if not namespace or not name:
            return None
        try:
            async with asyncio.timeout(LOOKUP_LIMIT_S):
                found = await self._queues.read_local_queue(namespace, name)
        except CALL_ERRORS as error:
            if not isinstance(error, ApiError) or error.status != NOT_FOUND:
                return None  # the job's conditions say it later
            return QueueFact(name=name, exists=False) if f'"{name}"' in str(error) else KUEUE_MISSING
        return QueueTable([found], None).fact(namespace, name)

    def _load(self, pair: Pair) -> None:
        """Use a pair for all connections from now on."""
        if pair == self._loaded:
            return
        with tempfile.NamedTemporaryFile() as file:  # readable by this user only
            file.write(pair.key + b"\n" + pair.certificate)
            file.flush()
            self._context.load_cert_chain(file.name)
        self._loaded = pair
        log.info("the admission webhook has a new certificate")

    async def _listen(self) -> web.AppRunner:
        application = web.Application(client_max_size=MAX_REVIEW_BYTES)
        application.add_routes([web.post(PATH, self._handle)])
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=SHUTDOWN_LIMIT_S)
        await runner.setup()
        try:
            await web.TCPSite(runner, port=self._port, ssl_context=self._context).start()
        except OSError:
            await runner.cleanup()
            raise
        return runner

    async def _handle(self, request: web.Request) -> web.Response:
        try:
            body = await request.json()
        except (ValueError, RecursionError) as error:
            raise web.HTTPBadRequest(text="the body is no JSON that can be read") from error
        return web.json_response(await self.review(mapping(body)))

    def _tell(self, problem: str) -> None:
        if problem != self._problem:
            log.warning("the admission webhook does not serve: jobs are accepted without warnings: %s", problem)
        self._problem = problem
