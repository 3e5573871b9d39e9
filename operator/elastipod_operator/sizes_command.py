"""`elastipod sizes`: the sizes at which a job may train, with workers, batch and quota of each. Needs no cluster."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import yaml
from kubernetes.utils import quantity
from pydantic import ValidationError

from .api import HyperPodPyTorchJob, explain
from .core.names import KIND
from .core.quota import quota_requests_for
from .core.sizes import SizeError
from .core.snapshot import Policy
from .kube.job_policy import policy_of
from .kube.reading import mapping, mappings
from .kube.templates import worker_count

_UNITS = {"Gi": 2**30, "Mi": 2**20}
_BYTES = ("memory", "ephemeral-storage", "hugepages-")


class UnusableFile(Exception):
    """The file holds no job, or one that cannot run; the text is one sentence."""


@dataclass(frozen=True, slots=True)
class SizeRow:
    """One allowed size. workers, groups: None when the spec does not say how many workers a pod has. quota: by resource."""

    replicas: int
    workers: int | None
    groups: int | None
    quota: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class BatchRule:
    """Which sizes can train a global batch. ranks_in_group: data-parallel ranks of one model group (1, or the HSDP shard)."""

    global_batch: int
    even: bool = False
    ranks_in_group: int = 1

    def allows(self, groups: int) -> bool:
        """Whether each data-parallel rank gets a sample, and with `even` as many as every other."""
        ranks = groups * self.ranks_in_group
        return ranks <= self.global_batch and not (self.even and self.global_batch % ranks)


def main(argv: Sequence[str]) -> int:
    """Run `elastipod sizes` and give the exit status: 0 success, 1 a job that no size fits, 2 wrong usage."""
    options = _parser().parse_args(argv)
    rule = BatchRule(options.global_batch, options.even, options.shard) if options.global_batch else None
    try:
        jobs = [(body["metadata"]["name"], *size_rows(body, rule)) for body in _jobs(options.file)]
    except UnusableFile as error:
        print(f"elastipod sizes: {options.file}: {error}", file=sys.stderr)
        return 1
    for name, policy, rows in jobs:
        for warning in policy.sizes.warnings:
            print(f"elastipod sizes: {name}: warning: {warning}", file=sys.stderr)
        print(_as_json(name, policy, rows) if options.output == "json" else _as_table(name, policy, rows))
    return 0


def size_rows(body: Mapping[str, Any], rule: BatchRule | None = None) -> tuple[Policy, list[SizeRow]]:
    """Give the policy of a job and its sizes that can train the batch of the rule. Raises UnusableFile if there are none."""
    try:
        spec = HyperPodPyTorchJob.model_validate(body).spec
        policy = policy_of(spec)
    except ValidationError as error:
        raise UnusableFile(explain(error)) from error
    except SizeError as error:
        raise UnusableFile(str(error)) from error
    workers = worker_count(spec, policy.container)
    if rule and workers is None:
        raise UnusableFile("nothing says how many workers a pod has; write spec.nprocPerNode as a number")
    pods = {one.name: _pod_requests(one.template) for one in spec.replica_specs}
    rows, counts = [], dict.fromkeys(pods, 0)
    for size, request in zip(policy.sizes.allowed, quota_requests_for(policy.sizes.allowed, policy.specs), strict=True):
        for name, number in request.counts:
            counts[name] += number
        ranks = None if workers is None else size * workers
        groups = None if ranks is None else ranks // spec.elastipod.parallelism
        if rule is None or (groups is not None and rule.allows(groups)):
            rows.append(SizeRow(size, ranks, groups, _quota(pods, counts)))
    if not rows:
        assert rule is not None
        raise UnusableFile(_no_batch(rule, policy, (workers or 1), spec.elastipod.parallelism))
    return policy, rows


def _no_batch(rule: BatchRule, policy: Policy, workers: int, ranks_of_group: int) -> str:
    smallest = policy.sizes.minimum * workers // ranks_of_group * rule.ranks_in_group
    if rule.global_batch < smallest:
        return (
            f"a global batch of {rule.global_batch} leaves ranks without samples at every size: the smallest has {smallest} "
            f"data-parallel ranks; use a global batch of at least {smallest}, or allow smaller sizes"
        )
    return (
        f"a global batch of {rule.global_batch} divides by the data-parallel ranks of no size; use a multiple of {smallest}, or "
        "uneven parts (without --even)"
    )


def _jobs(file: str) -> Iterator[dict[str, Any]]:
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        documents = list(yaml.safe_load_all(text))
    except (OSError, UnicodeDecodeError) as error:
        raise UnusableFile(f"it cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except yaml.YAMLError as error:
        raise UnusableFile(f"it is not YAML: {getattr(error, 'problem', None) or error}") from error
    found = [one for one in documents if mapping(one).get("kind") == KIND]
    if not found:
        raise UnusableFile(f"it holds no {KIND}")
    for body in found:
        if not isinstance(mapping(body.get("metadata")).get("name"), str):
            raise UnusableFile("metadata.name is missing; add it")
        yield body


def _pod_requests(template: Mapping[str, Any]) -> dict[str, Decimal]:
    """Give what a pod requests, as the scheduler counts it: containers and sidecars together, at least each init container."""
    pod = mapping(template.get("spec"))
    total = _sum(_requests(one) for one in mappings(pod.get("containers")))
    highest: dict[str, Decimal] = {}
    sidecars: dict[str, Decimal] = {}
    for one in mappings(pod.get("initContainers")):
        needs = _requests(one)
        if one.get("restartPolicy") == "Always":
            sidecars = _sum((sidecars, needs))
            needs = {}
        highest = _maximum(highest, _sum((sidecars, needs)))
    overhead = _parsed(mapping(pod.get("overhead")))
    return _sum((_maximum(_sum((total, sidecars)), highest), overhead))


def _requests(container: Mapping[str, Any]) -> dict[str, Decimal]:
    resources = mapping(container.get("resources"))
    said = {**mapping(resources.get("limits")), **mapping(resources.get("requests"))}
    return _parsed(said)


def _parsed(quantities: Mapping[str, Any]) -> dict[str, Decimal]:
    parse: Callable[[Any], Decimal] = quantity.parse_quantity  # the client has no types
    try:
        return {name: parse(value) for name, value in quantities.items()}
    except ValueError as error:
        raise UnusableFile(f"the resources of a container cannot be read: {error}") from error


def _sum(parts: Any) -> dict[str, Decimal]:
    found: dict[str, Decimal] = {}
    for part in parts:
        for name, value in part.items():
            found[name] = found.get(name, Decimal(0)) + value
    return found


def _maximum(one: Mapping[str, Decimal], other: Mapping[str, Decimal]) -> dict[str, Decimal]:
    return {name: max(one.get(name, Decimal(0)), other.get(name, Decimal(0))) for name in {**one, **other}}


def _quota(pods: Mapping[str, Mapping[str, Decimal]], counts: Mapping[str, int]) -> dict[str, str]:
    total = _sum({name: value * counts[spec] for name, value in requests.items()} for spec, requests in pods.items())
    return {name: _written(name, value) for name, value in sorted(total.items()) if value}


def _written(name: str, value: Decimal) -> str:
    """Write a quantity the way people do: memory in GiB or MiB where it is a whole number of them."""
    if name.startswith(_BYTES):
        for suffix in _UNITS:
            number = value / _UNITS[suffix]
            if number % 1 == 0:
                return f"{number:f}{suffix}"
    return f"{value.normalize():f}"


def _as_table(name: str, policy: Policy, rows: Sequence[SizeRow]) -> str:
    lines = [("REPLICAS", "WORKERS", "MODEL GROUPS", "QUOTA")]
    for row in rows:
        quota = ", ".join(f"{resource} {value}" for resource, value in row.quota.items())
        start = " (start)" if row.replicas == policy.sizes.start else ""
        lines.append((f"{row.replicas}{start}", _or_dash(row.workers), _or_dash(row.groups), quota or "-"))
    widths = [max(len(line[at]) for line in lines) for at in range(3)]
    table = [
        "  ".join((*(text.ljust(width) for text, width in zip(line, widths, strict=False)), line[3])) for line in lines
    ]
    return "\n".join((name, *table))


def _or_dash(number: int | None) -> str:
    return "-" if number is None else str(number)


def _as_json(name: str, policy: Policy, rows: Sequence[SizeRow]) -> str:
    sizes = [
        {"replicas": row.replicas, "workers": row.workers, "modelGroups": row.groups, "quota": dict(row.quota)}
        for row in rows
    ]
    return json.dumps(
        {"job": name, "start": policy.sizes.start, "warnings": list(policy.sizes.warnings), "sizes": sizes}
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 1")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="elastipod sizes",
        description="Show the sizes at which a job may train, with the workers, model groups and quota of each. The quota "
        "includes spares.",
    )
    parser.add_argument("-f", "--file", required=True, help="manifest with one or more jobs; - reads standard input")
    parser.add_argument(
        "--global-batch", type=_positive, metavar="N", help="only sizes that can train N samples a step"
    )
    parser.add_argument("--even", action="store_true", help="with --global-batch: only sizes with equal parts")
    parser.add_argument(
        "--shard", type=_positive, default=1, metavar="N", help="data-parallel ranks in a model group, with HSDP (1)"
    )
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table", help="form of the result (table)")
    return parser
