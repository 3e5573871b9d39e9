"""kopf: its handlers, which pass watch events on, its settings and its task."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import Any, cast

import kopf

from .core.names import GROUP, LABEL_JOB, PLURAL, VERSION
from .kopf_storage import NoComparison, NoProgress
from .kube.reading import name_of
from .missed_node_deletions import MissedNodeDeletions
from .operator_errors import log_operator_error
from .options import Options
from .watch_events import WatchEvents

Handler = Callable[..., Awaitable[None]]

# Before a refused or failed request of a watch is repeated, as kopf's own.
BACKOFFS_S = (1.0, 1.0, 2.0, 3.0, 5.0, 8.0, 13.0, 21.0)
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


def handlers(events: WatchEvents, missed: MissedNodeDeletions | None = None) -> kopf.OperatorRegistry:
    """Give kopf's registry: event handlers only, which add no finalizer and no annotation.

    missed: gets each node that the watch shows.
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
    """Make a handler survive an object on which it fails."""

    @functools.wraps(handler)
    async def logging_errors(**event: Any) -> None:
        try:
            await handler(**event)
        except Exception as error:  # one object must not end the watch of all others
            log_operator_error("object", error)

    return logging_errors


def _service_account() -> kopf.ConnectionInfo | None:
    """Give the pod's credentials; None outside of a pod. kopf's own lookup would need cluster DNS, this uses the address."""
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not (SERVICE_ACCOUNT / "token").exists():
        return None
    return kopf.ConnectionInfo(
        server=f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}",
        ca_path=str(SERVICE_ACCOUNT / "ca.crt"),
        token=(SERVICE_ACCOUNT / "token").read_text().strip(),
    )


class EndlessBackoffs:
    """The delays before the retries of a request, the last one again and again. kopf would give up, and the operator end."""

    def __iter__(self) -> Iterator[float]:
        return chain(BACKOFFS_S, repeat(BACKOFFS_S[-1]))


def settings(namespaces: Sequence[str] = ()) -> kopf.OperatorSettings:
    """Give kopf's settings: kopf writes nothing, and the API server filters pods.

    namespaces: those to watch; empty for all. One that may not be read, because it was deleted and the operator's Role with it,
    must not end the watches of the others: it is tried again until it may be read.
    """
    wanted = kopf.OperatorSettings()
    wanted.posting.enabled = False
    wanted.scanning.disabled = True
    wanted.watching.label_selectors["pods"] = LABEL_JOB
    wanted.persistence.diffbase_storage = NoComparison()
    wanted.persistence.progress_storage = NoProgress()
    wanted.networking.error_backoffs = EndlessBackoffs() if namespaces else BACKOFFS_S
    return wanted


async def run_kopf(options: Options, registry: kopf.OperatorRegistry, stop: asyncio.Event) -> None:
    """Run kopf until cancelled. stop: set on SIGTERM and SIGINT."""
    others = asyncio.all_tasks()
    tasks = await kopf.spawn_tasks(
        registry=registry,
        settings=settings(options.namespaces),
        standalone=True,
        # kopf's default looks up the user's name, which a container's user need not have.
        identity=cast(Any, options.pod_name),
        clusterwide=not options.namespaces,
        namespaces=options.namespaces,
    )
    # Replaces kopf's signal handlers, whose slow shutdown would delay the release of the lease.
    stop_on_signals(stop)
    await kopf.run_tasks(tasks, ignored=others)


def stop_on_signals(stop: asyncio.Event) -> None:
    """Set `stop` on SIGTERM and SIGINT."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
