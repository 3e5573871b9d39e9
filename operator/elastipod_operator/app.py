"""The operator's process: kopf handlers, the watch of Workloads, leader lease, health and metrics endpoint. Wiring and nothing else."""

from __future__ import annotations

import argparse
import asyncio
import functools
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import kopf
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from .agents.agent_ports import agents_over
from .agents.status_cache import open_session
from .core.names import GROUP, LABEL_JOB, PLURAL, VERSION
from .garbage_collection import collect_garbage, manual_collection
from .kopf_storage import NoComparison, NoProgress
from .kube.api import CALL_ERRORS, Api, ApiError, connect
from .kube.events import Events
from .kube.job_keys import InvalidInstallKey, JobKeys, read_install_keys
from .kube.lease import Lease
from .kube.queue_api import QueueApi
from .kube.reading import name_of
from .kube.store import Store
from .kube.workload_watch import WorkloadWatch
from .logs import set_up_logging
from .missed_node_deletions import MissedNodeDeletions
from .operator_errors import log_operator_error
from .reconciler import Reconciler
from .watch_events import WatchEvents

log = logging.getLogger(__name__)

Handler = Callable[..., Awaitable[None]]

LEASE_NAME = "elastipod-operator"
LABEL_TIMEOUT_S = 2.0
LIST_RETRY_S = 1.0
TOO_MANY_REQUESTS = 429
# `hyp get-operator-logs` finds the operator by this label: only the leader's pod bears it.
LEADER_LABEL = "hp-training-control-plane"
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line and the pod's environment say."""

    namespaces: tuple[str, ...]
    metrics_port: int
    log_level: str
    pod_name: str
    pod_namespace: str
    is_pod: bool = False
    install_key_file: str = ""


@dataclass(slots=True)
class Leadership:
    """Whether this process leads. leading: it holds the lease."""

    leading: bool = False


def parse(argv: list[str] | None) -> Options:
    """Read the command line; defaults come from the environment that the chart sets."""
    env = os.environ
    parser = argparse.ArgumentParser(
        prog="elastipod operator",
        description="Run the Elastipod operator: it watches HyperPodPyTorchJobs and keeps their pods and workers as they "
        "should be. Runs with the pod's service account, or with the current kubeconfig outside of a cluster.",
    )
    parser.add_argument(
        "--namespaces",
        default=env.get("WATCH_NAMESPACES", ""),
        help="comma-separated namespaces to watch; empty means all (default: $WATCH_NAMESPACES)",
    )
    parser.add_argument(
        "--metrics-port",
        type=int,
        default=int(env.get("METRICS_PORT", "8081")),
        help="port of /healthz, /readyz and /metrics; 0 turns the endpoint off (default: %(default)s)",
    )
    parser.add_argument(
        "--log-level",
        default=env.get("LOG_LEVEL", "info"),
        choices=("debug", "info", "warning", "error"),
        help="how much is logged, one JSON object a line (default: %(default)s)",
    )
    parser.add_argument(
        "--install-key-file",
        default=env.get("ELASTIPOD_INSTALL_KEY_FILE", ""),
        help="file with the key from which the jobs' keys are derived; empty: no authentication (default: $ELASTIPOD_INSTALL_KEY_FILE)",
    )
    args = parser.parse_args(argv)
    return Options(
        namespaces=tuple(name.strip() for name in args.namespaces.split(",") if name.strip()),
        metrics_port=args.metrics_port,
        log_level=args.log_level,
        # Two operators that are started by hand on one machine are not the same holder of the lease.
        pod_name=env.get("POD_NAME") or f"{socket.gethostname()}-{os.getpid()}",
        pod_namespace=env.get("POD_NAMESPACE", "default"),
        is_pod=bool(env.get("POD_NAME")),
        install_key_file=args.install_key_file,
    )


def handlers(events: WatchEvents, missed: MissedNodeDeletions | None = None) -> kopf.OperatorRegistry:
    """Give kopf's registry: event handlers only, which add no finalizer and no annotation.

    missed: is told of each node that is shown.
    """
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    def login(**kwargs: Any) -> Any:
        return _service_account() or kopf.login_with_kubeconfig(**kwargs)

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    @_logging_errors
    async def job_seen(type: str | None, body: Mapping[str, Any], **_: Any) -> None:
        events.job(dict(body), is_gone=type == "DELETED")

    @kopf.on.event("", "v1", "pods", labels={LABEL_JOB: kopf.PRESENT}, registry=registry)
    @_logging_errors
    async def pod_seen(type: str | None, body: Mapping[str, Any], **_: Any) -> None:
        events.pod(dict(body), is_gone=type == "DELETED")

    @kopf.on.event("", "v1", "nodes", registry=registry)
    @_logging_errors
    async def node_seen(type: str | None, body: Mapping[str, Any], **_: Any) -> None:
        events.node(dict(body), is_gone=type == "DELETED")
        if missed is not None:
            missed.observe(name_of(body), is_listed=type is None)

    return registry


def _logging_errors(handler: Handler) -> Handler:
    """Have a handler outlive an object that it fails at: others come after it."""

    @functools.wraps(handler)
    async def logging_errors(**event: Any) -> None:
        try:
            await handler(**event)
        except Exception as error:  # one odd object must not end the watch of all others
            log_operator_error("object", error)

    return logging_errors


def _service_account() -> kopf.ConnectionInfo | None:
    """Give the pod's own access; the API server by its address, for kopf's way needs a cluster DNS. None outside of a pod."""
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not (SERVICE_ACCOUNT / "token").exists():
        return None
    return kopf.ConnectionInfo(
        server=f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}",
        ca_path=str(SERVICE_ACCOUNT / "ca.crt"),
        token=(SERVICE_ACCOUNT / "token").read_text().strip(),
    )


def settings() -> kopf.OperatorSettings:
    """Give kopf's settings: nothing is written by kopf itself, and pods are filtered by the API server."""
    wanted = kopf.OperatorSettings()
    wanted.posting.enabled = False
    wanted.scanning.disabled = True
    wanted.watching.label_selectors["pods"] = LABEL_JOB
    wanted.persistence.diffbase_storage = NoComparison()
    wanted.persistence.progress_storage = NoProgress()
    return wanted


async def watch(options: Options, api: Api, stop: asyncio.Event) -> None:
    """Run the watches and the decisions until cancelled. Only the leader calls this."""
    store = Store()
    async with open_session() as session:
        keys = JobKeys(read_install_keys(options.install_key_file))
        reconciler = Reconciler(api, store, agents_over(session), Events(api), keys)
        # A pod on a node that was not seen yet would look like one on a deleted node.
        for node in await _all_nodes(api):
            store.put_node(node)
        quota = WorkloadWatch(QueueApi(api), store, reconciler.wake, reconciler.retry_queues, reconciler.queues_needed)
        missed = MissedNodeDeletions(store, QueueApi(api).read_node, reconciler.wake)
        watches = [
            asyncio.create_task(_kopf(options, handlers(WatchEvents(store, reconciler), missed), stop)),
            asyncio.create_task(missed.run()),
            asyncio.create_task(quota.run(options.namespaces)),
            asyncio.create_task(reconciler.poll_queues(options.namespaces)),
            asyncio.create_task(collect_garbage(reconciler.no_pass_running)),
        ]
        try:
            done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                one.result()
        finally:
            # Decisions end first: kopf takes its time, and the lease may be somebody else's by then.
            await reconciler.close()
            for one in watches:
                one.cancel()
            await asyncio.gather(*watches, return_exceptions=True)


async def _all_nodes(api: Api) -> list[dict[str, Any]]:
    """Give all nodes; an API server that is out of order is waited for, as long as the lease lasts.

    To end here would cost the back-off of a container that crashes, which outlasts most outages.
    """
    while True:
        try:
            return await api.list_nodes()
        except CALL_ERRORS as error:
            if isinstance(error, ApiError) and error.status < 500 and error.status != TOO_MANY_REQUESTS:
                raise
            log.warning("cannot list the nodes yet: %s %s", type(error).__name__, error)
        await asyncio.sleep(LIST_RETRY_S)


async def _kopf(options: Options, registry: kopf.OperatorRegistry, stop: asyncio.Event) -> None:
    others = asyncio.all_tasks()
    tasks = await kopf.spawn_tasks(
        registry=registry,
        settings=settings(),
        standalone=True,
        # Given, because kopf's own guess asks for the user's name, and a container's user need not have one.
        identity=cast(Any, options.pod_name),
        clusterwide=not options.namespaces,
        namespaces=options.namespaces,
    )
    # kopf has just put its own handlers of signals in place, whose slow farewell would keep the lease from a successor.
    _stop_on_signals(stop)
    await kopf.run_tasks(tasks, ignored=others)


async def serve_health(port: int, leadership: Leadership) -> web.AppRunner | None:
    """Serve /healthz, /readyz and /metrics; None when the port is 0."""
    if not port:
        return None

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def readyz(_: web.Request) -> web.Response:
        return web.Response(text="leading\n" if leadership.leading else "standing by\n")

    application = web.Application()
    application.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", metrics)])
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, port=port).start()
    return runner


async def lead(options: Options, stop: asyncio.Event) -> int:
    """Take the lease, watch while it is held, and end the moment it lapses. Gives the exit code."""
    leadership = Leadership()
    runner = await serve_health(options.metrics_port, leadership)
    # The lease has a connection of its own: a thousand writes that wait must not keep it from being renewed.
    api_client, lease_client = await connect(), await connect()
    api = Api(api_client)
    lease = Lease(Api(lease_client), options.pod_namespace, LEASE_NAME, options.pod_name)
    try:
        await mark_leader(api, options, leads=False)  # a container that was restarted may bear it yet
        if await _race(lease.acquire(), stop.wait()) == 1:
            return 0
        leadership.leading = True
        await mark_leader(api, options, leads=True)
        with manual_collection():
            return await _watch_while_leading(lease, options, api, stop)
    finally:
        if runner is not None:
            await runner.cleanup()
        for client in (api_client, lease_client):
            await client.close()  # type: ignore[no-untyped-call]  # the client has no annotations here


async def mark_leader(api: Api, options: Options, *, leads: bool) -> None:
    """Put the leader's label on this pod, or take it off. That fails nothing: it only helps people to find the right log."""
    if not options.is_pod:
        return
    try:
        async with asyncio.timeout(LABEL_TIMEOUT_S):
            await api.label_pod(options.pod_namespace, options.pod_name, {LEADER_LABEL: "true" if leads else None})
    except CALL_ERRORS as error:
        log.warning("cannot %s label %s: %s", "set" if leads else "remove", LEADER_LABEL, error)


async def _watch_while_leading(lease: Lease, options: Options, api: Api, stop: asyncio.Event) -> int:
    is_lost = False
    try:
        first = await _race(lease.hold(), watch(options, api, stop), stop.wait())
        is_lost = first == 0
    finally:
        if not is_lost:
            await lease.release()
    if is_lost:
        log.error("the lease was lost; ending at once, training goes on")
    elif not stop.is_set():
        log.error("the watches ended by themselves")
    return 0 if stop.is_set() and not is_lost else 1


async def _race(*contestants: Coroutine[Any, Any, Any]) -> int:
    """Run all until the first is done, end the others, and give the winner's place. Raises what the winner raised."""
    tasks = [asyncio.create_task(contestant) for contestant in contestants]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    winner = next(at for at, task in enumerate(tasks) if task in done)
    tasks[winner].result()
    return winner


async def _run(options: Options) -> int:
    stop = asyncio.Event()
    _stop_on_signals(stop)
    return await lead(options, stop)


def _stop_on_signals(stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)


def main(argv: list[str] | None = None) -> int:
    """Run the operator until a signal (0), the loss of its lease, or an API server that it may not or cannot use (1)."""
    options = parse(argv)
    set_up_logging(options.log_level)
    try:
        read_install_keys(options.install_key_file)  # one that stands by says so too, not only once it leads
        return asyncio.run(_run(options))
    except InvalidInstallKey as error:
        log.error("the operator cannot go on: %s", error)
        return 1
    except CALL_ERRORS as error:
        log.error("the operator cannot go on: %s %s", type(error).__name__, error)
        return 1
