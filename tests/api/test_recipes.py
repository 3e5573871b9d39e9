"""The jobs of all recipes apply as they are rendered, with strict validation by a real API server."""

from __future__ import annotations

import json

import yaml
from tests.unit.recipes.documents import RANKS_PER_NODE, all_recipes

from elastipod.recipes.checked_recipe import check_recipe
from elastipod.recipes.recipe_command import overridden
from elastipod.recipes.render import RenderOptions, as_yaml, render
from elastipod_local.cluster import Cluster
from elastipod_operator.api import HyperPodPyTorchJob
from elastipod_operator.kube.job_policy import policy_of

BOUNDS = ("elastic_policy.is_elastic=true", "elastic_policy.min_nodes=2")


def test_every_rendered_recipe_applies_and_keeps_its_sizes(api_server: Cluster, namespace: str) -> None:
    expected, texts = {}, []
    for number, (_, config, sizes) in enumerate(all_recipes()):
        checked = check_recipe(overridden(config, BOUNDS), ranks_per_node=RANKS_PER_NODE)
        options = RenderOptions(
            name=f"recipe-{number}",
            image="registry.example.com/recipes:1",
            script=("/opt/train/sft.py",),
            ranks_per_node=RANKS_PER_NODE,
            queue="team",
            resources={"nvidia.com/gpu": "8"},
            claims=(("fsx", "/data"), ("my.claim", "/more"), ("my.claim", "/checkpoints")),
        )
        texts.append(as_yaml(render(checked, options)))
        expected[options.name] = tuple(size for size in sizes if size >= 2)
    said = api_server.kubectl("-n", namespace, "apply", "--validate=strict", "-f", "-", input="---\n".join(texts))
    assert said.count(" created") == 2 * len(expected) == 92
    stored = json.loads(api_server.kubectl("-n", namespace, "get", "hpjob", "-o", "json"))["items"]
    specs = {body["metadata"]["name"]: HyperPodPyTorchJob.model_validate(body).spec for body in stored}
    assert {name: tuple(policy_of(spec).sizes.allowed) for name, spec in specs.items()} == expected
    maps = json.loads(api_server.kubectl("-n", namespace, "get", "configmap", "-o", "json"))["items"]
    held = {body["metadata"]["name"]: body["data"] for body in maps}
    for name, sizes in expected.items():
        for size in sizes:
            config = yaml.safe_load(held[f"training-config-{name}"][f"config-n{size}.yaml"])
            assert config["trainer"]["num_nodes"] == size
