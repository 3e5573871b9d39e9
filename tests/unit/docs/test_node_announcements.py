"""The table of what nodes announce says what the operator does, and leaves nothing out that it knows."""

from __future__ import annotations

import re
from datetime import UTC, datetime

import pytest
from tests.nonempty import some
from tests.unit.docs.pages import ROOT
from tests.unit.kube.bodies import Body, node_body

from elastipod_operator.core.snapshot import ObservedNode
from elastipod_operator.kube.observed_node import (
    DISRUPTION_TAINTS,
    FAILURE_TAINTS,
    HINT_TAINTS,
    NOTICES,
    OUT_OF_SERVICE,
    QUARANTINE,
    QUARANTINE_DRAINS,
    observe_node,
)

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
PAGE = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
SECTION = PAGE.split("## What nodes announce", 1)[1].split("\n## ", 1)[0]
ROWS = [line.strip("|").split("|") for line in SECTION.splitlines() if line.startswith("| `")]
SAID = [(one, effect.strip()) for signs, _, effect in ROWS for one in re.findall(r"`([^`]+)`", signs)]


def announced(sign: str) -> Body:
    """Give a node that announces this."""
    kind, _, what = sign.partition(" ")
    if kind == "cordon":
        return node_body(unschedulable=True)
    if kind == "taint":
        key, effect = what.rsplit(":", 1)
        return node_body(taints=[{"key": key, "effect": effect}])
    if kind == "annotation":
        body = node_body()
        body["metadata"]["annotations"] = {what: '[{"agent": "gpu-health-monitor", "isFatal": true}]'}
        return body
    key, value = what.split("=")
    if kind == "label":
        return node_body(labels={key: value})
    assert kind == "condition"
    body = node_body()
    body["status"]["conditions"].append({"type": key, "status": value})
    return body


def effect_of(node: ObservedNode) -> str:
    """Say what the operator does, in the words of the table."""
    if node.out_of_service:
        return "the pods are lost at once, without a drain"
    if node.leaves_at is not None:
        return f"drains, within {(node.leaves_at - NOW).total_seconds():.0f} s after the operator first sees it"
    return "drains" if node.disruption else "stops placing" if node.cordoned else "nothing by itself"


@pytest.mark.parametrize(("sign", "effect"), some(SAID))
def test_the_table_says_what_happens(sign: str, effect: str) -> None:
    assert effect_of(observe_node(announced(sign), None, NOW)) == effect


def test_the_table_is_complete() -> None:
    assert {QUARANTINE, QUARANTINE_DRAINS} <= {sign for sign, _ in SAID}
    named = {sign.split(" ")[1].rsplit(":", 1)[0] for sign, _ in SAID if sign.startswith("taint ")}
    assert named >= {*DISRUPTION_TAINTS, *HINT_TAINTS, *FAILURE_TAINTS, *NOTICES, OUT_OF_SERVICE}
