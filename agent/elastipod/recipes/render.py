"""The manifest and the ConfigMap of a recipe, in the shape that HyperPod's launcher gives them. Writes and submits nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from elastipod.errors import RecipeError
from elastipod.recipes.checked_recipe import CheckedRecipe
from elastipod.recipes.present_config import CONFIG_FOLDER, FIXED_CONFIG, config_name

MAX_NAME = 63
MAX_CONFIG_BYTES = 1_000_000  # the API server refuses a ConfigMap above 1 MiB
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
COORDINATION_ENV = "HYPERPOD_SIGNAL_COORDINATION"
_CONTAINER = "pytorch"
_CONFIG_VOLUME = "training-config"


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderOptions:
    """What a recipe does not say about its job.

    name, namespace, queue: of the job; empty: not set. script: what hyperpodrun starts, in words. ranks_per_node: workers in each
    pod. model_parallel: ranks of one model group. resources: requests and limits of a pod. claims: names of
    PersistentVolumeClaims with mount paths; a claim may have several. instance_type: value of the node label
    node.kubernetes.io/instance-type; empty: any node. env: variables of the container.
    """

    name: str
    image: str
    script: tuple[str, ...]
    ranks_per_node: int
    model_parallel: int = 1
    namespace: str = ""
    queue: str = ""
    instance_type: str = ""
    resources: Mapping[str, str] = field(default_factory=dict)
    claims: tuple[tuple[str, str], ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


def render(checked: CheckedRecipe, options: RenderOptions) -> tuple[dict[str, Any], dict[str, Any]]:
    """Give the ConfigMap and the job, in the order in which they are applied. Raises RecipeError for what no cluster accepts."""
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", options.name) or len(options.name) > MAX_NAME:
        raise RecipeError(
            f"the name of the job is {options.name!r}; it must be at most {MAX_NAME} lower-case letters, digits and '-', beginning "
            "and ending with a letter or digit: give one with --name"
        )
    return _config_map(checked, options), _job(checked, options)


def configs(checked: CheckedRecipe) -> dict[str, str]:
    """Give the configurations as files of YAML: `config.yaml` for a fixed size, and one for each size of an elastic recipe."""
    recipe = checked.recipe
    found = {FIXED_CONFIG: _text(recipe.base)}
    if checked.is_elastic:
        found |= {config_name(nodes): _text(_at(checked, nodes)) for nodes in recipe.nodes}
    size = sum(len(text.encode()) for text in found.values())
    if size > MAX_CONFIG_BYTES:
        raise RecipeError(
            f"the configurations of {len(recipe.nodes)} sizes take {size} bytes, but a ConfigMap holds {MAX_CONFIG_BYTES}; allow "
            "fewer sizes, with scale_config or a larger elastic_policy.replica_increment_step"
        )
    return found


def _at(checked: CheckedRecipe, nodes: int) -> dict[str, Any]:
    config = checked.recipe.at(nodes)
    return {**config, "trainer": {**(config.get("trainer") or {}), "num_nodes": nodes}}


def _config_map(checked: CheckedRecipe, options: RenderOptions) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": _config_map_name(options), **_namespace(options)},
        "data": configs(checked),
    }


def _job(checked: CheckedRecipe, options: RenderOptions) -> dict[str, Any]:
    labels = {"app": options.name, **({QUEUE_LABEL: options.queue} if options.queue else {})}
    nodes = checked.recipe.nodes
    spec: dict[str, Any] = {"nprocPerNode": str(options.ranks_per_node)}
    replica_spec: dict[str, Any] = {"name": f"{checked.start}-nodes", "replicas": checked.start}
    if checked.is_elastic:
        spec["elasticPolicy"] = _elastic_policy(checked)
        replica_spec["maxReplicas"] = nodes[-1]
    if options.model_parallel > 1:
        spec["elastipod"] = {"parallelism": options.model_parallel}
    spec["replicaSpecs"] = [{**replica_spec, "template": _template(checked, options)}]
    return {
        "apiVersion": "sagemaker.amazonaws.com/v1",
        "kind": "HyperPodPyTorchJob",
        "metadata": {"name": options.name, **_namespace(options), "labels": labels},
        "spec": spec,
    }


def _elastic_policy(checked: CheckedRecipe) -> dict[str, Any]:
    nodes = checked.recipe.nodes
    policy: dict[str, Any] = {"minReplicas": nodes[0], "maxReplicas": nodes[-1]}
    if checked.recipe.scales:
        policy["replicaDiscreteValues"] = list(nodes)
    else:
        policy["replicaIncrementStep"] = nodes[1] - nodes[0] if len(nodes) > 1 else 1
    times = checked.times
    if times and times.scaling_s is not None:
        policy["scalingTimeoutInSeconds"] = times.scaling_s
    if times and not times.graceful:
        policy["gracefulShutdownTimeoutInSeconds"] = 0
    elif times and times.graceful_s is not None:
        policy["gracefulShutdownTimeoutInSeconds"] = times.graceful_s
    return policy


def _template(checked: CheckedRecipe, options: RenderOptions) -> dict[str, Any]:
    words = ["hyperpodrun", *options.script, f"--config-path={CONFIG_FOLDER}"]
    env = dict(options.env)
    if checked.times and checked.times.graceful:
        env.setdefault(COORDINATION_ENV, "distributed")
    container: dict[str, Any] = {"name": _CONTAINER, "image": options.image, "command": words}
    if env:
        container["env"] = [{"name": name, "value": value} for name, value in env.items()]
    if options.resources:
        container["resources"] = {"requests": dict(options.resources), "limits": dict(options.resources)}
    volume_of = _claim_volumes(claim for claim, _ in options.claims)
    container["volumeMounts"] = [
        {"name": _CONFIG_VOLUME, "mountPath": CONFIG_FOLDER},
        *({"name": volume_of[claim], "mountPath": path} for claim, path in options.claims),
    ]
    pod: dict[str, Any] = {
        "containers": [container],
        "volumes": [
            {"name": _CONFIG_VOLUME, "configMap": {"name": _config_map_name(options)}},
            *({"name": volume, "persistentVolumeClaim": {"claimName": claim}} for claim, volume in volume_of.items()),
        ],
    }
    if options.instance_type:
        pod["nodeSelector"] = {"node.kubernetes.io/instance-type": options.instance_type}
    return {"metadata": {"labels": {"app": options.name}}, "spec": pod}


def _claim_volumes(claims: Iterable[str]) -> dict[str, str]:
    """Name the volume of each claim. A claim's name may have dots and more characters, a volume's may not."""
    names: dict[str, str] = {}
    for number, claim in enumerate(dict.fromkeys(claims), start=1):
        name = f"{claim}-volume"
        names[claim] = name if "." not in name and len(name) <= 63 else f"claim-{number}"
    return names


def _config_map_name(options: RenderOptions) -> str:
    """Give the name that `hyp delete` removes together with the job."""
    return f"training-config-{options.name}"


def _namespace(options: RenderOptions) -> dict[str, str]:
    return {"namespace": options.namespace} if options.namespace else {}


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, and never an alias: Hydra and people read the result."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _as_block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _as_block)


def _text(config: Mapping[str, Any]) -> str:
    return yaml.dump(dict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def as_yaml(objects: tuple[dict[str, Any], ...]) -> str:
    """Give objects as one YAML stream for `kubectl apply -f -`."""
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
