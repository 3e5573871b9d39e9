"""A node as a frozen dataclass for `core`, and the disruptions that it announces. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from ..core.snapshot import ObservedNode
from .node_signals import CONFIGURED, SignalEffect
from .reading import annotations_of, labels_of, mapping, mappings, name_of, shortened, text

HEALTH_LABEL = "sagemaker.amazonaws.com/node-health-status"
OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"
# Set by the node controller on nodes that stopped answering. The agents decide what that means, not the taint.
FAILURE_TAINTS = frozenset({"node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"})
# Termination notices with effect NoSchedule or PreferNoSchedule.
DISRUPTION_TAINTS = frozenset(
    {
        "karpenter.sh/disrupted",
        "karpenter.sh/disruption",
        "ToBeDeletedByClusterAutoscaler",
        "cloud.google.com/impending-node-termination",
        "aws-node-termination-handler/spot-itn",
        "aws-node-termination-handler/scheduled-maintenance",
        "aws-node-termination-handler/asg-lifecycle-termination",
        "sagemaker.amazonaws.com/node-health-status",
    }
)
# The cloud may take the machine back, or may not.
HINT_TAINTS = frozenset({"aws-node-termination-handler/rebalance-recommendation"})
# How taints that the scheduler heeds end.
HEEDED = (":NoSchedule", ":NoExecute")
# What NVSentinel writes on a node that it quarantines, and once its drainer waits for the pods to leave.
QUARANTINE, QUARANTINE_DRAINS = "annotation quarantineHealthEvent", "label dgxc.nvidia.com/nvsentinel-state=draining"
_DRAINS = {True: SignalEffect.DRAIN, False: SignalEffect.IGNORE}
# Notices with a known lead time, by which a Spot machine is taken back: two minutes at AWS, half a minute at Google.
NOTICES = {
    "aws-node-termination-handler/spot-itn": timedelta(seconds=120),
    "cloud.google.com/impending-node-termination": timedelta(seconds=30),
}


def observe_node(body: Mapping[str, Any], before: ObservedNode | None, now: datetime) -> ObservedNode:
    """Read a node. `not_ready_since`: when this operator first saw it not ready, because other clocks are not trusted."""
    spec, status = mapping(body.get("spec")), mapping(body.get("status"))
    conditions = mappings(status.get("conditions"))
    ready = any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions)
    since = None if ready else (before.not_ready_since if before and before.not_ready_since else now)
    return ObservedNode(
        name=name_of(body),
        ready=ready,
        not_ready_since=since,
        cordoned=bool(spec.get("unschedulable")) or SignalEffect.STOP_PLACING in signals_of(body).values(),
        out_of_service=any(t.get("key") == OUT_OF_SERVICE for t in mappings(spec.get("taints"))),
        disruption=disruption_of(body).reason_for(()),
        seen_since=before.seen_since if before is not None else now,
        leaves_at=_leaves_at(mappings(spec.get("taints")), before, now),
        closed=_why_closed(body),
    )


def _why_closed(body: Mapping[str, Any]) -> str:
    """Give the announcement of a node that the scheduler does not heed: no taint, or one that pods may tolerate or that only asks."""
    if mapping(body.get("spec")).get("unschedulable"):
        return ""
    effects = ((words, CONFIGURED.get(signal, usual), signal in CONFIGURED) for signal, words, usual in _signals(body))
    unheeded = ((words, does) for words, does, is_told in effects if is_told or not words.endswith(HEEDED))
    return next((words for words, does in unheeded if does is not SignalEffect.IGNORE), "")


def _leaves_at(taints: Sequence[Mapping[str, Any]], before: ObservedNode | None, now: datetime) -> datetime | None:
    keys = {str(t.get("key")) for t in taints}
    notices = [lead for key, lead in NOTICES.items() if key in keys and f"taint {key}" not in CONFIGURED]
    if not notices:
        return None
    return before.leaves_at if before is not None and before.leaves_at is not None else now + min(notices)


@dataclass(frozen=True, slots=True)
class Disruption:
    """Why pods must leave a node: termination notices, which concern all pods, and taints, which pods may tolerate."""

    announced: str
    taints: tuple[Mapping[str, Any], ...]

    def reason_for(self, tolerations: Sequence[Mapping[str, Any]]) -> str:
        """Say why pods with these tolerations must leave; empty when they may stay."""
        lasting = [one for one in tolerations if one.get("tolerationSeconds") is None]
        expelling = (t for t in self.taints if not any(tolerates(one, t) for one in lasting))
        taint = next(expelling, None)
        return self.announced or (_taint_text(taint) if taint is not None else "")


def disruption_of(body: Mapping[str, Any], configured: Mapping[str, SignalEffect] = CONFIGURED) -> Disruption:
    """Read the disruptions of a node. configured: what an administrator says of its announcements."""
    listed = mappings(mapping(body.get("spec")).get("taints"))
    taints = [t for t in listed if text(t.get("key")) not in {*FAILURE_TAINTS, OUT_OF_SERVICE}]
    effects = signals_of(body, configured).items()
    announced = next((words for words, does in effects if does is SignalEffect.DRAIN), "")
    plain = (t for t in taints if f"taint {text(t.get('key'))}" not in configured)
    return Disruption(announced, tuple(t for t in plain if t.get("effect") == "NoExecute"))


def signals_of(body: Mapping[str, Any], configured: Mapping[str, SignalEffect] = CONFIGURED) -> dict[str, SignalEffect]:
    """Give what a node announces that may have an effect, in words, and the effect."""
    return {words: configured.get(signal, usual) for signal, words, usual in _signals(body)}


def _signals(body: Mapping[str, Any]) -> Iterator[tuple[str, str, SignalEffect]]:
    """Give each signal as the configuration names it, in words, and its usual effect."""
    for taint in mappings(mapping(body.get("spec")).get("taints")):
        key = text(taint.get("key"))
        usual = SignalEffect.STOP_PLACING if key in HINT_TAINTS else _DRAINS[key in DISRUPTION_TAINTS]
        yield f"taint {key}", _taint_text(taint), usual
    for name, value in labels_of(body).items():
        label = f"label {name}={value}"
        yield label, label, _DRAINS[label == QUARANTINE_DRAINS or (name == HEALTH_LABEL and value != "Schedulable")]
    for annotation in (f"annotation {name}" for name, value in annotations_of(body).items() if value):
        yield annotation, annotation, SignalEffect.STOP_PLACING if annotation == QUARANTINE else SignalEffect.IGNORE
    for one in mappings(mapping(body.get("status")).get("conditions")):
        condition = f"condition {text(one.get('type'))}={text(one.get('status'))}"
        yield condition, condition, SignalEffect.IGNORE


def tolerates(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    """Whether a toleration concerns a taint, as in Kubernetes. With tolerationSeconds a pod must leave after that time."""
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    if toleration.get("operator") == "Exists":
        return toleration.get("key") in (None, "", taint.get("key"))
    same_value = (toleration.get("value") or "") == (taint.get("value") or "")
    return bool(toleration.get("key")) and toleration.get("key") == taint.get("key") and same_value


def _taint_text(taint: Mapping[str, Any]) -> str:
    return f"taint {shortened(taint.get('key', ''))}:{shortened(taint.get('effect', ''))}"
