"""What the user does to the job, and what somebody does to its annotations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from pydantic import ValidationError
from tests.sim.events import Event
from tests.sim.fault_targets import DELAYS, ENDS_OF_PODS, touch
from tests.sim.objects import Body

from elastipod_operator.api import JobSpec
from elastipod_operator.api.models import MAX_LOG_RULES, MAX_PATTERN
from elastipod_operator.core.names import ANNOTATION_DRAIN_ON_DELETE
from elastipod_operator.core.sizes import SizeError, Sizes
from elastipod_operator.kube.applied import last_good_spec
from elastipod_operator.kube.job_policy import policy_of
from elastipod_operator.kube.limits import MAX_TEMPLATE_BYTES

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation

EDITS: tuple[tuple[str, str, tuple[object, ...]], ...] = (
    ("elasticPolicy", "scalingTimeoutInSeconds", (0, 5, 40)),
    ("elasticPolicy", "gracefulShutdownTimeoutInSeconds", (40, 120)),
    ("elasticPolicy", "faultyScaleDownTimeoutInSeconds", (5, 40)),
    ("runPolicy", "cleanPodPolicy", ("All", "None", "Running", "OnlyComplete")),
    ("runPolicy", "restartPolicy", ({"scaleUpSnoozeTimeInSeconds": 60}, {"maxNumRepeatOffendersToAvoid": 1})),
    ("runPolicy", "ttlSecondsAfterFinished", (20, 0)),
    ("elastipod", "payback", ("Off", "Auto")),
    ("elastipod", "minStableSeconds", (0, 30)),
)


# An operator is back after so long, and has heard everybody.
RETURN_S = 140.0


def sizes(spec: Body) -> Sizes:
    """Give the allowed sizes of a spec. Raises SizeError."""
    return policy_of(JobSpec.model_validate(spec)).sizes


def edit_times(sim: Simulation, event: Event) -> str:
    """Time-outs, budgets and policies that act at once."""
    where, field, values = EDITS[event.number % len(EDITS)]
    value = values[event.number // len(EDITS) % len(values)]
    if sim.cluster.job is None or where not in sim.cluster.job.spec:
        return ""
    sim.cluster.edit_job(lambda spec: spec[where].update({field: value}))
    return f"{where}.{field} = {value}"


def edit_worker_count(sim: Simulation, event: Event) -> str:
    """Another number of workers in each pod: pods get it when the job is suspended and resumed."""
    if sim.cluster.job is None or sim.is_spec_broken:
        return ""
    count = (1, 2, 4, 8)[event.number % 4]
    sim.cluster.edit_job(lambda spec: spec.update(nprocPerNode=str(count)))
    return str(count)


def break_spec(sim: Simulation, event: Event) -> str:
    """An edit that cannot be used, mended later."""
    if sim.cluster.job is None or sim.is_spec_broken or last_good_spec(sim.cluster.job_body()) is None:
        return ""
    sim.is_spec_broken = True
    if sim.cluster.tenant is not None:  # nobody drains what Kueue takes back meanwhile
        for pod in sim.cluster.pods.values():
            touch(sim, pod, event)
    what, edit = _BAD_EDITS[event.number % len(_BAD_EDITS)]
    sim.checker.met[f"edit: {what}"] += 1
    sim.cluster.edit_job(edit)
    sim.kernel.after(event.seconds, lambda: mend_spec(sim))
    return f"{what} for {event.seconds:g} s"


def _rename(spec: Body) -> None:
    spec["replicaSpecs"][0]["name"] = "other"


def _swell_template(spec: Body) -> None:
    spec["replicaSpecs"][0]["template"]["spec"]["containers"][0]["command"] = ["x" * 2 * MAX_TEMPLATE_BYTES]


def _swell_rules(spec: Body) -> None:
    rules = [{"name": f"rule-{n}", "logPattern": "x" * MAX_PATTERN} for n in range(MAX_LOG_RULES)]
    spec["runPolicy"]["logMonitoringConfiguration"] = rules


def _spoil_template(spec: Body) -> None:
    spec["replicaSpecs"][0]["template"]["metadata"] = "nonsense"


def _spoil_worker_count(spec: Body) -> None:
    spec["nprocPerNode"] = "many"


_BAD_EDITS: tuple[tuple[str, Callable[[Body], None]], ...] = (
    ("replicaSpecs are renamed", _rename),
    ("a template without end", _swell_template),
    ("log rules without end", _swell_rules),
    ("an invalid template", _spoil_template),
    ("a worker count that is none", _spoil_worker_count),
)


def mend_spec(sim: Simulation) -> None:
    """Take a broken edit back."""
    if not sim.is_spec_broken:
        return

    def mend(spec: Body) -> None:
        first = spec["replicaSpecs"][0]
        first["name"] = sim.schedule.specs[0]["name"]
        first["template"]["spec"]["containers"][0].pop("command", None)
        first["template"].pop("metadata", None)
        spec["nprocPerNode"] = sim.schedule.spec()["nprocPerNode"]
        spec["runPolicy"].pop("logMonitoringConfiguration", None)

    sim.is_spec_broken = False
    sim.cluster.edit_job(mend)


def scale(sim: Simulation, event: Event) -> str:
    job = sim.cluster.job
    if job is None:
        return ""
    spec = {**sim.cluster.spec_in_force(), "replicas": 0}
    allowed = sizes(spec).allowed
    ceiling = (0, *allowed, allowed[-1] + 1)[event.number % (len(allowed) + 2)]
    sim.cluster.edit_job(lambda spec: spec.update(replicas=ceiling))
    return str(ceiling)


def set_bounds(sim: Simulation, event: Event) -> str:
    job = sim.cluster.job
    if job is None or "elasticPolicy" not in job.spec:
        return ""
    low, high = 1 + event.number % 3, 1 + event.number % 3 + event.number // 3 % 3
    wish = {**job.spec, "elasticPolicy": {**job.spec["elasticPolicy"], "minReplicas": low, "maxReplicas": high}}
    try:
        sizes(wish)
    except (SizeError, ValidationError):
        return "refused"
    sim.cluster.edit_job(lambda spec: spec["elasticPolicy"].update(minReplicas=low, maxReplicas=high))
    return f"{low} to {high}"


def set_spares(sim: Simulation, event: Event) -> str:
    """Another number of spares of the first spec: with a queue it acts with the next request for the base."""
    spares = event.number % 3
    sim.cluster.edit_job(lambda spec: spec["replicaSpecs"][0].update(spares=spares))
    return str(spares)


def suspend(sim: Simulation, event: Event) -> str:
    sim.cluster.edit_job(lambda spec: spec["runPolicy"].update(suspend=True))
    sim.kernel.after(event.seconds, partial(resume, sim, event))
    return f"for {event.seconds:g} s"


def resume(sim: Simulation, event: Event) -> str:
    sim.cluster.edit_job(lambda spec: spec["runPolicy"].update(suspend=False))
    return "resumed"


def touch_job(sim: Simulation, event: Event) -> str:
    sim.cluster.edit_job(lambda spec: None)
    return "resourceVersion moves"


def wipe_record(sim: Simulation, event: Event) -> str:
    if sim.is_spec_broken or not sim.checker.record.generation or not _will_be_told(sim, event):
        return ""  # nobody could tell the generation, or which spec the pods are of
    for run in sim.training.runs.values():
        run.spoiled.add(event.what)
    sim.cluster.wipe_record(leaves_history=False)
    return "annotations are gone"


def _will_be_told(sim: Simulation, event: Event) -> bool:
    """Whether an agent knows the generation, and nothing that comes soon keeps it from telling an operator that is away."""
    now = sim.kernel.now
    knowing = [
        pod
        for pod in sim.cluster.pods.values()
        if pod.agent is not None
        and pod.agent.generation >= sim.checker.record.generation
        and pod.answers()
        and pod.deleted_at is None
        and max(pod.agent.lies_until, pod.agent.lags_until) <= now
    ]
    comes = [e.what for e in sim.schedule.events if event.at < e.at < event.at + RETURN_S]
    return bool(knowing) and not any(what in ENDS_OF_PODS or what in DELAYS for what in comes)


def wipe_state(sim: Simulation, event: Event) -> str:
    """Only the state is gone: the history tells the generation, whether or not an agent lives."""
    if not sim.checker.record.generation:
        return ""
    for run in sim.training.runs.values():
        run.spoiled.add(event.what)
    sim.cluster.wipe_record(leaves_history=True)
    return "the state is gone"


def edit_template(sim: Simulation, event: Event) -> str:
    """Another image: it acts when the job is resumed, or at once where it never trained. In a queue it needs other quota, too."""

    def edit(spec: Body) -> None:
        for one in spec["replicaSpecs"]:
            pod = one["template"]["spec"]
            pod["containers"][0]["image"] = f"train:{event.number}"
            if sim.cluster.tenant is not None:
                pod["tolerations"] = [{"key": f"nobody-has-{event.number}", "operator": "Exists"}]

    sim.cluster.edit_job(edit)
    return f"train:{event.number}"


def drain_and_delete_job(sim: Simulation, event: Event) -> str:
    sim.cluster.annotate_job(ANNOTATION_DRAIN_ON_DELETE, "true")
    return delete_job(sim, event)


def delete_job(sim: Simulation, event: Event) -> str:
    if sim.cluster.job is None or sim.cluster.job.deleted_at is not None:
        return ""
    sim.cluster.delete_job()
    return "deleted"
