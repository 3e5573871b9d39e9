"""The operator's process: it takes the lease, and runs the watches and the reconciler while it holds it. Wiring only."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from . import metrics
from .admission.serving import webhook_beside
from .agents.agent_ports import agents_over
from .agents.status_requests import open_session
from .garbage_collection import collect_garbage, manual_collection
from .job_handover import JobHandover
from .kopf_handlers import handlers, run_kopf, stop_on_signals
from .kube.api import CALL_ERRORS, Api, connect, may_pass
from .kube.events import Events
from .kube.job_keys import InvalidInstallKey, JobKeys, read_install_keys
from .kube.lease import Lease
from .kube.namespace_check import NamespaceCheck
from .kube.node_signals import CONFIGURED
from .kube.preflight import Refusal, check_crd, check_releases, wait_for_crd
from .kube.queue_api import QueueApi
from .kube.store import Store
from .kube.workload_watch import WorkloadWatch
from .leadership import Leadership, mark_leader, serve_health
from .logs import set_up_logging
from .missed_node_deletions import MissedNodeDeletions
from .options import Options, parse
from .reconciler import Reconciler
from .watch_events import WatchEvents

log = logging.getLogger(__name__)

LEASE_NAME = "elastipod-operator"
LIST_RETRY_S = 1.0


async def watch(options: Options, api: Api, stop: asyncio.Event) -> None:
    """Run the watches and the decisions until cancelled. Only the leader calls this."""
    await wait_for_crd(api, takes_over=options.takes_over)
    store = Store()
    async with open_session() as session:
        keys = JobKeys(read_install_keys(options.install_key_file))
        namespaces = NamespaceCheck(api, options.namespaces)
        await namespaces.first()
        handover = JobHandover(api, options.scope.holds)
        reconciler = Reconciler(
            api, store, agents_over(session), Events(api), keys, runs=options.scope.holds, hand_over=handover.begin
        )
        # Nodes come first: a pod on an unknown node would look like a pod on a deleted node.
        for node in await _all_nodes(api):
            store.put_node(node)
        quota = WorkloadWatch(QueueApi(api), store, reconciler.wake, reconciler.retry_queues, reconciler.queues_needed)
        missed = MissedNodeDeletions(store, QueueApi(api).read_node, reconciler.wake)
        events = WatchEvents(store, reconciler)
        watches = [
            asyncio.create_task(run_kopf(options, handlers(events, missed), stop)),
            asyncio.create_task(missed.run()),
            asyncio.create_task(namespaces.run()),
            asyncio.create_task(quota.run(options.namespaces)),
            asyncio.create_task(reconciler.poll_queues(options.namespaces)),
            asyncio.create_task(collect_garbage(reconciler.no_pass_running)),
        ]
        try:
            done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                one.result()
        finally:
            # Decisions end first: kopf stops slowly, and another operator may hold the lease by then.
            await reconciler.close()
            await handover.close()
            for one in watches:
                one.cancel()
            await asyncio.gather(*watches, return_exceptions=True)


async def _all_nodes(api: Api) -> list[dict[str, Any]]:
    """Give all nodes. While the API server does not answer, retry as long as the lease lasts.

    An exit would cost the container's crash back-off, which is longer than most outages.
    """
    while True:
        try:
            return await api.list_nodes()
        except CALL_ERRORS as error:
            if not may_pass(error):
                raise
            log.warning("cannot list the nodes yet: %s %s", type(error).__name__, error)
        await asyncio.sleep(LIST_RETRY_S)


async def lead(options: Options, stop: asyncio.Event) -> int:
    """Take the lease, watch while it is held, and end as soon as it is lost. Gives the exit code."""
    leadership = Leadership()
    runner = await serve_health(options.metrics_port, leadership)
    # The lease has its own connection, so that a thousand waiting writes do not delay its renewal, and so have watches, each of
    # which holds one for minutes.
    api_client, lease_client, watch_client = await connect(), await connect(), await connect(is_unlimited=True)
    api = Api(api_client, watch_client)
    lease = Lease(Api(lease_client), options.pod_namespace, LEASE_NAME, options.pod_name, options.scope)
    try:
        await check_crd(api, takes_over=options.takes_over)
        await mark_leader(api, options, leads=False)  # a restarted container may still have the label
        async with webhook_beside(options, api, lambda: leadership.leading):
            if await _race(lease.acquire(), stop.wait()) == 1:
                return 0
            await _check_releases(lease)
            leadership.leading = True
            metrics.LEADING.set(1)
            await mark_leader(api, options, leads=True)
            with manual_collection():
                return await _watch_while_leading(lease, options, api, stop)
    finally:
        if runner is not None:
            await runner.cleanup()
        for client in (api_client, lease_client, watch_client):
            await client.close()  # type: ignore[no-untyped-call]  # the client has no annotations here


async def _check_releases(lease: Lease) -> None:
    """Let the lease say that its holder leads, unless another release runs the same jobs. Raises Refusal."""
    try:
        await check_releases(lease.api, lease.namespace, lease.name, lease.scope)
        lease.leads = True
    finally:
        if not lease.leads:
            await lease.release()


async def _watch_while_leading(lease: Lease, options: Options, api: Api, stop: asyncio.Event) -> int:
    is_lost = False
    try:
        first = await _race(lease.hold(), watch(options, api, stop), stop.wait())
        is_lost = first == 0
    finally:
        if not is_lost:
            await lease.release()
    if is_lost:
        log.error("the lease was lost; the operator ends at once, and training continues")
    elif not stop.is_set():
        log.error("the watches ended unexpectedly")
    return 0 if stop.is_set() and not is_lost else 1


async def _race(*contestants: Coroutine[Any, Any, Any]) -> int:
    """Run all until the first is done, cancel the others, and give the position of the first. Raises what it raised."""
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
    stop_on_signals(stop)
    return await lead(options, stop)


def main(argv: list[str] | None = None) -> int:
    """Run the operator until a signal (0), or until it loses its lease or cannot use the API server (1)."""
    options = parse(argv)
    CONFIGURED.update(options.node_signals)
    set_up_logging(options.log_level)
    try:
        read_install_keys(options.install_key_file)  # an operator on standby checks its key too
        return asyncio.run(_run(options))
    except (InvalidInstallKey, Refusal) as error:
        log.error("the operator cannot continue: %s", error)
        return 1
    except CALL_ERRORS as error:
        log.error("the operator cannot continue: %s %s", type(error).__name__, error)
        return 1
