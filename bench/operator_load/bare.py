"""Bare writes: the time that another client needs for writes to the API server at the same time.

What the operator writes to a job is written to an object of a kind that is the same in all but its name, so that the API
server has as much to do, and nobody but us looks at it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml
from bench.operator_load.api import ApiClient, Refused
from bench.operator_load.cluster import CHECKOUT, NAMESPACE
from bench.operator_load.jobs import BARE_LABEL, PODS, bare_pod

from elastipod_operator.core.names import ANNOTATION_STATE, API_VERSION, KIND, PLURAL, VERSION

GROUP = "bare.example.com"
NAME = "bare"
OBJECTS = f"/apis/{GROUP}/{VERSION}/namespaces/{NAMESPACE}/{PLURAL}"
# So few that they are no load: in a minute 80 of each kind, and 40 passes.
EVERY_S, PASS_EVERY_S = 0.25, 1.5
WHOLE, POD_ORDERS = "whole pass", "pod orders"
GROUP_OF_PODS = "bare-pass"
SERVED_WITHIN_S = 30.0
# A kind that was just defined is unknown, and then not ready, for a moment.
NOT_YET = (404, 429)
Taken = dict[str, list[float]]
Call = tuple[str, str, Mapping[str, Any] | None]


@asynccontextmanager
async def bare_writes(
    kubeconfig: Path, like: Mapping[str, Any], pod: Mapping[str, Any], pods: int
) -> AsyncIterator[Taken]:
    """Write until the end, and give the seconds of each write by kind: a record, a status and an Event in turn.

    Beside them what a pass of the operator that makes or deletes all pods of a job writes at least: a record, and then a
    status beside so many pods at once. WHOLE: until the status is answered; POD_ORDERS: until each pod is, from when the
    record was. like, pod: a job of the operator's and one of its pods; what is written is as large as they are. Raises
    Refused when nothing can be written.
    """
    taken: Taken = {"record": [], "status": [], "event": [], WHOLE: [], POD_ORDERS: []}
    async with ApiClient(kubeconfig, parallel=1) as single, ApiClient(kubeconfig, parallel=16) as many:
        await _create(single, like)
        writing = (
            asyncio.create_task(_write(single, like, taken)),
            asyncio.create_task(_passes(many, like, pod, pods, taken)),
        )
        try:
            yield taken
        finally:
            for task in writing:
                task.cancel()
            await asyncio.gather(*writing, return_exceptions=True)
            await many.call("DELETE", f"{PODS}?labelSelector={BARE_LABEL}%3D{GROUP_OF_PODS}")


async def _create(api: ApiClient, like: Mapping[str, Any]) -> None:
    text = (CHECKOUT / "crds" / f"{PLURAL}.yaml").read_text(encoding="utf-8")
    definition = yaml.safe_load(text)
    definition["metadata"]["name"] = f"{PLURAL}.{GROUP}"
    definition["spec"]["group"] = GROUP
    definition["spec"]["names"].pop("shortNames")
    await api.call("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition)
    end = time.monotonic() + SERVED_WITHIN_S
    while "items" not in await api.call("GET", OBJECTS, fine=NOT_YET):
        if time.monotonic() > end:
            raise Refused(f"{OBJECTS} is not served after {SERVED_WITHIN_S:g} s")
        await asyncio.sleep(0.2)
    body = {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "metadata": {"name": NAME}, "spec": like["spec"]}
    await api.call("POST", OBJECTS, body)


async def _write(api: ApiClient, like: Mapping[str, Any], taken: Taken) -> None:
    for number in itertools.count():
        # As the operator's: a merge patch of an annotation, an apply patch of the whole status, a new Event.
        record = _record(like, number)
        event = {
            "apiVersion": "v1", "kind": "Event", "metadata": {"name": f"{NAME}.{number}", "namespace": NAMESPACE},
            "involvedObject": {"apiVersion": API_VERSION, "kind": KIND, "name": NAME, "namespace": NAMESPACE},
            "type": "Normal", "reason": "Bare", "message": "a write of the benchmark", "source": {"component": NAME},
        }  # fmt: skip
        calls = (
            ("record", "PATCH", f"{OBJECTS}/{NAME}", json.dumps(record), "application/merge-patch+json"),
            ("status", *_status(like, number)),
            ("event", "POST", f"/api/v1/namespaces/{NAMESPACE}/events", json.dumps(event), "application/json"),
        )
        for kind, method, path, text, content in calls:
            began = time.monotonic()
            await api.send(method, path, text, content)
            taken[kind].append(time.monotonic() - began)
            await asyncio.sleep(EVERY_S)


async def _passes(api: ApiClient, like: Mapping[str, Any], pod: Mapping[str, Any], pods: int, taken: Taken) -> None:
    for number in itertools.count():
        names = [f"{GROUP_OF_PODS}-{number}-{n}" for n in range(pods)]
        make: list[Call] = [("POST", PODS, bare_pod(pod, GROUP_OF_PODS, name)) for name in names]
        delete: list[Call] = [("DELETE", f"{PODS}/{name}", None) for name in names]
        for calls in (make, delete):
            began = time.monotonic()
            await api.call("PATCH", f"{OBJECTS}/{NAME}", _record(like, number))
            ordered = time.monotonic()
            whole, *times = await asyncio.gather(
                _timed(api.send(*_status(like, number)), began), *(_timed(api.call(*call), ordered) for call in calls)
            )
            taken[WHOLE].append(whole)
            taken[POD_ORDERS] += times
            await asyncio.sleep(PASS_EVERY_S)


async def _timed(call: Awaitable[object], since: float) -> float:
    await call
    return time.monotonic() - since


def _status(like: Mapping[str, Any], number: int) -> tuple[str, str, str, str]:
    status = {
        "apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "metadata": {"name": NAME},
        "status": _changed(like["status"], number),
    }  # fmt: skip
    path = f"{OBJECTS}/{NAME}/status?fieldManager={NAME}&force=true"
    return "PATCH", path, json.dumps(status), "application/apply-patch+yaml"


def _record(like: Mapping[str, Any], number: int) -> dict[str, Any]:
    state = like["metadata"]["annotations"][ANNOTATION_STATE]
    return {"metadata": {"annotations": {ANNOTATION_STATE: f"{state[:-6]}{number:06}"}}}


def _changed(status: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Give a status of the same size whose last condition says something else."""
    *others, last = status["conditions"]
    return {**status, "conditions": [*others, {**last, "message": f"{number:06}{last['message'][6:]}"}]}
