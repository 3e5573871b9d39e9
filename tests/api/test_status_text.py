"""Whatever a program printed may stand in a status: no text keeps the operator from writing it."""

from __future__ import annotations

from tests.api.jobs import apply, get, job

from elastipod_local.cluster import Cluster
from elastipod_operator.kube.api import Api
from elastipod_operator.kube.observed_job import observe_job

TEXTS = {
    "Emoji": "GLHF! \U0001f3d6\ufe0f",
    "Control": "\x00 \x1b[31m \x7f \x85 \t \n",
    "Lines": "a\u2028b\u2029c",
    "Marks": "\ufeff \ufffe \uffff \U0001ffff",
    "Yaml": "- a: [b, {c: \"d\"}] # &e *f !g %h \\ud83d 'i'",
    "Letters": "caf\u00e9 \u4e2d\u6587",
}


async def test_any_text_can_be_told(api: Api, api_server: Cluster, namespace: str) -> None:
    apply(api_server, namespace, job())
    texts = {**TEXTS, "Half": "a\udc80b"}
    conditions = [
        {"type": kind, "status": "True", "reason": kind, "message": text, "lastTransitionTime": "2025-01-01T00:00:00Z"}
        for kind, text in texts.items()
    ]
    await api.apply_status(observe_job(get(api_server, namespace)), {"conditions": conditions})
    found = {c["type"]: c["message"] for c in get(api_server, namespace)["status"]["conditions"]}
    assert found == {**TEXTS, "Half": "a\ufffdb"}
