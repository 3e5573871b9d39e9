"""Checks of Kueue and of ResourceQuotas. Pure: objects in, results out."""

from __future__ import annotations

from collections.abc import Sequence

from elastipod_operator.core.names import API_VERSION, KIND
from elastipod_operator.kube.reading import Body, condition_of, mapping, mappings, name_of, text

from .check import Check, error, ok, unknown, warning

KUEUE_API = "v1beta2"
FRAMEWORK = f"{KIND}.{API_VERSION.split('/')[1]}.{API_VERSION.split('/')[0]}"


def check_kueue(crd: Body | None) -> Check:
    """Check Kueue's version by the CRD of its Workloads; None: there is no Kueue."""
    if crd is None:
        return ok("Kueue", "it is not installed; jobs run without queues")
    served = [text(one.get("name")) for one in mappings(mapping(crd.get("spec")).get("versions")) if one.get("served")]
    if KUEUE_API not in served:
        message = f"it serves {', '.join(served)} and not {KUEUE_API}"
        return error("Kueue", message, "Upgrade Kueue to 0.15 or newer; until then jobs with a queue stay suspended.")
    return ok("Kueue", f"it serves {KUEUE_API}")


def check_kueue_config(config: Body | None) -> list[Check]:
    """Check the settings of Kueue's manager. config: its ConfigMap; None if it could not be found."""
    if config is None:
        return [unknown("Kueue settings", "the ConfigMap kueue-system/kueue-manager-config could not be read")]
    # A comment is no setting. YAML is not parsed: this needs the presence of two names, and no package.
    written = "\n".join(text(value) for value in mapping(config.get("data")).values())
    lines = [line.split("#")[0].strip().replace('"', "").replace("'", "") for line in written.splitlines()]
    found = []
    if any(line == "- pod" or ("frameworks: [" in line and "pod" in line) for line in lines) and not any(
        FRAMEWORK in line for line in lines
    ):
        advice = f"Add {FRAMEWORK} to `integrations.externalFrameworks` of Kueue, and set `kueue.externalFramework=true` in the chart."
        found.append(
            warning(
                "Kueue settings",
                "its pod integration is on, and it does not know the jobs: it may gate their pods",
                advice,
            )
        )
    if any(line.replace(" ", "") == "blockAdmission:true" for line in lines):
        advice = (
            "Set `waitForPodsReady.blockAdmission` to false: an increment whose pods start slowly blocks every queue."
        )
        found.append(warning("Kueue settings", "waitForPodsReady.blockAdmission is true", advice))
    return found or [ok("Kueue settings", "nothing in them stands in the way of elastic jobs")]


def check_cluster_queues(queues: Sequence[Body]) -> list[Check]:
    """Check each ClusterQueue for what keeps it from admitting jobs, or from taking increments back."""
    found = []
    for queue in queues:
        what, spec = f"ClusterQueue {name_of(queue)}", mapping(queue.get("spec"))
        active = condition_of(queue, "Active")
        if active.get("status") == "False":
            advice = "Repair what the message names, or set `stopPolicy` to `None`."
            found.append(error(what, f"it admits nothing: {text(active.get('message'))}", advice))
        if text(mapping(spec.get("preemption")).get("withinClusterQueue")) in ("", "Never"):
            advice = (
                "Set `preemption.withinClusterQueue: LowerPriority`, so that a new job gets the increments of others."
            )
            found.append(warning(what, "increments are never preempted for other jobs", advice))
        if spec.get("queueingStrategy") == "StrictFIFO":
            advice = "Set `queueingStrategy: BestEffortFIFO`."
            found.append(warning(what, "waiting increments block the Workloads behind them (StrictFIFO)", advice))
    return found or [ok("ClusterQueues", f"nothing stands in the way of elastic jobs ({len(queues)} read)")]


def check_quotas(quotas: Sequence[Body]) -> Check:
    """Find keys of ResourceQuotas that limit nothing: Kubernetes counts extended resources by `requests.` only."""
    idle = [
        f"{key} in {text(mapping(quota.get('metadata')).get('namespace'))}/{name_of(quota)}"
        for quota in quotas
        for key in sorted(mapping(mapping(quota.get("spec")).get("hard")))
        if not _is_enforced(key)
    ]
    if idle:
        advice = "Write `requests.` in front of the resource, as in requests.nvidia.com/gpu."
        return warning("ResourceQuotas", f"keys that limit nothing: {', '.join(idle)}", advice)
    return ok("ResourceQuotas", f"every key is enforced ({len(quotas)} read)")


def _is_enforced(key: str) -> bool:
    """Whether Kubernetes counts a key. An extended resource has a domain, as nvidia.com/gpu, and no limits of its own."""
    bare = key.removeprefix("limits.")
    domain = bare.split("/", 1)[0]
    is_extended = "/" in bare and not domain.endswith(("kubernetes.io", "k8s.io")) and "." in domain
    return not is_extended or key.startswith(("requests.", "count/"))
