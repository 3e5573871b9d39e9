"""Rules over several fields that the API server checks at apply time, in CEL.

They agree with the models and the core (`core.sizes`); a test compares them on a real API server. Anything that existing
documents and generators of manifests produce is accepted: step and values together, values outside the range,
a minimum above the sum of replicas, bounds of policy and specs that differ. In CEL a null field is an absent one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from elastipod_operator.api.base import MAX_COUNT
from elastipod_operator.api.models import DNS_LABEL_PATTERN, NPROC_PATTERN


@dataclass(frozen=True, slots=True)
class Rule:
    """One CEL rule: what must hold, the sentence for the user if it does not, and the field.

    message: a sentence; with `values`, a format whose %d are replaced by those CEL expressions. field: path relative to the rule,
    empty for the object itself.
    """

    holds: str
    message: str
    values: tuple[str, ...] = ()
    field: str = ""

    def to_schema(self) -> dict[str, Any]:
        """Give the entry of `x-kubernetes-validations`."""
        entry: dict[str, Any] = {"rule": self.holds}
        if self.values:
            entry["messageExpression"] = f"{_quoted(self.message)}.format([{', '.join(self.values)}])"
        else:
            entry["message"] = self.message
        if self.field:
            entry["fieldPath"] = f".{self.field}"
        return entry


def _quoted(text: str) -> str:
    return "'" + text.replace("'", r"\'") + "'"


# Parts of the rules on sizes, each in parentheses where it has operators.
_POLICY = "self.elasticPolicy"
_REPLICAS = "(has(s.replicas) ? s.replicas : 0)"
_MOST = f"(has(s.maxReplicas) && s.maxReplicas > {_REPLICAS} ? s.maxReplicas : {_REPLICAS})"
_WANTED = f"self.replicaSpecs.map(s, {_REPLICAS}).sum()"
_ROOM = f"self.replicaSpecs.map(s, {_MOST}).sum()"
_ELASTIC = f"has({_POLICY})"
_HAS_MIN = f"({_ELASTIC} && has({_POLICY}.minReplicas))"
_HAS_MAX = f"({_ELASTIC} && has({_POLICY}.maxReplicas))"
_HAS_VALUES = f"({_ELASTIC} && has({_POLICY}.replicaDiscreteValues) && size({_POLICY}.replicaDiscreteValues) > 0)"
_LOW = f"([1, {_HAS_MIN} ? {_POLICY}.minReplicas : {_WANTED}].max())"
# The policy's maximum applies alone if no spec has one; otherwise the smaller of the two applies.
_SPECS_STATE_MAX = "self.replicaSpecs.exists(s, has(s.maxReplicas))"
_HIGH = (
    f"(!{_HAS_MAX} ? [1, {_ROOM}].max()"
    f" : {_SPECS_STATE_MAX} ? [[1, {_ROOM}].max(), {_POLICY}.maxReplicas].min()"
    f" : [1, {_POLICY}.maxReplicas].max())"
)
_ALLOWED = f"({_HAS_VALUES} ? {_POLICY}.replicaDiscreteValues.filter(v, v >= {_LOW} && v <= {_HIGH}) : [{_LOW}])"
_BOUNDS_IN_ORDER = f"(!{_HAS_MIN} || !{_HAS_MAX} || {_POLICY}.minReplicas <= {_POLICY}.maxReplicas)"

JOB_RULES = (
    Rule(
        "size(self.metadata.name) <= 63",
        "metadata.name is longer than 63 characters; pods carry it in a label, so choose a shorter one",
    ),
)

_SPARES = "self.replicaSpecs.map(s, has(s.spares) ? s.spares : 0).sum()"
_MOST_PODS = f"(({_ELASTIC} ? {_HIGH} : [1, {_WANTED}].max()) + {_SPARES})"

# Model groups, where the spec says how many workers a pod has; a template may override the number, and the operator checks that.
_MOST_WORKERS = 64  # no machine has more accelerators; the divisors up to here are a list that a rule can go through
_GROUPED = (
    "(has(self.elastipod) && self.elastipod.parallelism > 1 && self.nprocPerNode.matches('^[0-9]{1,2}$')"
    f" && int(self.nprocPerNode) <= {_MOST_WORKERS})"
)
_WORKERS = "int(self.nprocPerNode)"
_DIVISORS = ", ".join(map(str, range(1, _MOST_WORKERS + 1)))
_EVERY = (
    f"(self.elastipod.parallelism / [{_DIVISORS}]"
    f".filter(d, self.elastipod.parallelism % d == 0 && {_WORKERS} % d == 0).max())"
)
_HAS_STEP = f"(has({_POLICY}.replicaIncrementStep) && {_POLICY}.replicaIncrementStep > 1)"
_IS_GRID = f"({_ELASTIC} && !{_HAS_VALUES})"

JOB_SPEC_RULES = (
    Rule(
        f"{_MOST_PODS} <= {MAX_COUNT}",
        f"replicas and spares of the job add up to %d; a job has at most {MAX_COUNT} pods, so lower maxReplicas, replicas or spares",
        values=(_MOST_PODS,),
        field="replicaSpecs",
    ),
    Rule(
        f"!{_ELASTIC} || !{_BOUNDS_IN_ORDER} || {_LOW} <= {_HIGH}",
        "the minimum size is %d but the maximum is %d; lower elasticPolicy.minReplicas, or raise maxReplicas of "
        "elasticPolicy and replicaSpecs",
        values=(_LOW, _HIGH),
        field="elasticPolicy",
    ),
    Rule(
        f"!{_HAS_VALUES} || {_LOW} > {_HIGH} || size({_ALLOWED}) > 0",
        "replicaDiscreteValues holds no size from %d to %d; add one, or change minReplicas or maxReplicas",
        values=(_LOW, _HIGH),
        field="elasticPolicy.replicaDiscreteValues",
    ),
    Rule(
        f"self.replicas == 0 || size({_ALLOWED}) == 0 || {_ALLOWED}.exists(v, v <= self.replicas)",
        "replicas is %d but the smallest allowed size is %d; set at least that, or 0 for no ceiling",
        values=("self.replicas", f"{_ALLOWED}.min()"),
        field="replicas",
    ),
    # Of sizes in larger steps the operator says it: a rule cannot count through them.
    Rule(
        f"!{_GROUPED} || {_LOW} > {_HIGH} || size({_ALLOWED}) == 0 || ({_IS_GRID}"
        f" ? {_HAS_STEP} || {_HIGH} / {_EVERY} * {_EVERY} >= {_LOW}"
        f" : {_ALLOWED}.exists(v, v * {_WORKERS} % self.elastipod.parallelism == 0))",
        "no size of the job forms whole model groups of %d ranks (parallelism) with nprocPerNode %d; sizes that fit are multiples of %d",
        values=("self.elastipod.parallelism", _WORKERS, _EVERY),
        field="elastipod",
    ),
)

ELASTIC_POLICY_RULES = (
    Rule(
        "!has(self.minReplicas) || !has(self.maxReplicas) || self.minReplicas <= self.maxReplicas",
        "minReplicas is %d but maxReplicas is %d; raise maxReplicas or lower minReplicas",
        values=("self.minReplicas", "self.maxReplicas"),
        field="minReplicas",
    ),
)

REPLICA_SPECS_RULES = (
    Rule(
        "self.map(s, s.name) == oldSelf.map(s, s.name)",
        "the number and the names of replicaSpecs cannot change; delete the job and create it again",
    ),
)

NPROC_RULES = (
    Rule(f"self.matches('{NPROC_PATTERN}')", "nprocPerNode must be auto, cpu, gpu or a positive number up to 9999"),
)

SPEC_NAME_RULES = (
    Rule(
        f"self.matches('{DNS_LABEL_PATTERN}')",
        "name must be lower-case letters, digits and '-', and begin and end with a letter or digit",
    ),
)
