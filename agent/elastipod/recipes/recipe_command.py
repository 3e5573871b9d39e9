"""`elastipod recipe`: renders the job of a HyperPod recipe. Needs no cluster and no torch."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from elastipod.errors import BatchSizeError, RecipeError
from elastipod.recipes.checked_recipe import check_recipe
from elastipod.recipes.render import MAX_NAME, RenderOptions, as_yaml, render

DEFAULT_DEVICE = "nvidia.com/gpu"
_OVERRIDE = re.compile(r"\+{0,2}(?:recipes\.)?([A-Za-z_][\w.]*)=(.*)", re.DOTALL)


def main(argv: Sequence[str]) -> int:
    """Run `elastipod recipe` and give the exit status: 0 success, 1 a recipe that contradicts itself, 2 wrong usage."""
    parser = _parser()
    options, rest = parser.parse_known_args(argv)
    if unknown := [text for text in rest if text.startswith("-")]:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    options.override += rest  # those behind options
    try:
        devices = [f"trainer.devices={options.ranks_per_node}"] if options.ranks_per_node else []
        config = overridden(_read(options.file), [*options.override, *devices])
        ranks = _devices(config)
        checked = check_recipe(config, ranks_per_node=ranks, model_parallel=options.model_parallel)
        objects = render(checked, _render_options(options, config, ranks))
    except (RecipeError, BatchSizeError) as error:
        print(f"elastipod recipe: {options.file}: {error}", file=sys.stderr)
        return 1
    for warning in checked.warnings:
        print(f"elastipod recipe: warning: {warning}", file=sys.stderr)
    print(as_yaml(objects), end="")
    return 0


def overridden(config: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Give the recipe with values replaced as HyperPod's launcher does it: `recipes.elastic_policy.is_elastic=true`.

    A value is YAML. Raises RecipeError for text that is no override, and for a path through something that is no block.
    """
    result = dict(config)
    for text in overrides:
        match = _OVERRIDE.fullmatch(text)
        if not match:
            raise RecipeError(f"{text!r} replaces nothing; write it as elastic_policy.is_elastic=true")
        names = match[1].split(".")
        try:
            value = yaml.safe_load(match[2])
        except yaml.YAMLError as error:
            raise RecipeError(f"the value of {text!r} is not YAML; put it in quotes") from error
        result = _replaced(result, names, value, match[1])
    return result


def _replaced(config: Mapping[Any, Any], names: Sequence[str], value: object, path: str) -> dict[Any, Any]:
    first, *rest = names
    key: Any = int(first) if first.isdecimal() and int(first) in config else first
    if not rest:
        return {**config, key: value}
    inner = config.get(key)
    if inner is not None and not isinstance(inner, Mapping):
        raise RecipeError(f"{path} cannot be set, because {first} is {inner!r} and not a block of names and values")
    return {**config, key: _replaced(inner or {}, rest, value, path)}


def _read(file: str) -> Mapping[str, Any]:
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        config = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"it cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f" at line {mark.line + 1}" if mark else ""
        raise RecipeError(f"it is not YAML{at}: {getattr(error, 'problem', None) or error}") from error
    if not isinstance(config, Mapping):
        raise RecipeError("it holds no recipe; a recipe is a block with trainer, training_config and elastic_policy")
    return config


def _devices(config: Mapping[str, Any]) -> int:
    trainer = config.get("trainer")
    devices = trainer.get("devices") if isinstance(trainer, Mapping) else None
    if not isinstance(devices, int) or isinstance(devices, bool) or devices < 1:
        raise RecipeError(f"trainer.devices is {devices!r}; set it to the ranks of a node, or give --ranks-per-node")
    return devices


def _render_options(options: argparse.Namespace, config: Mapping[str, Any], ranks: int) -> RenderOptions:
    return RenderOptions(
        name=options.name or _name_of(config),
        image=options.image,
        script=_words(options.script),
        ranks_per_node=ranks,
        model_parallel=options.model_parallel,
        namespace=options.namespace,
        queue=options.queue,
        instance_type=options.instance_type,
        resources=dict(options.resource) if options.resource else {DEFAULT_DEVICE: str(ranks)},
        claims=tuple(options.claim),
        env=dict(options.env),
    )


def _words(script: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(script))
    except ValueError as error:
        raise RecipeError(f"--script {script!r} cannot be divided into words: {error}") from error


def _name_of(config: Mapping[str, Any]) -> str:
    run = config.get("run")
    name = run.get("name") if isinstance(run, Mapping) else None
    if not isinstance(name, str) or not name:
        raise RecipeError("run.name is missing; add it, or give the job a name with --name")
    return re.sub(r"[^a-z0-9]+", "-", name.lower())[:MAX_NAME].strip("-")


def _pair(separator: str, what: str) -> Callable[[str], tuple[str, str]]:
    def parse(text: str) -> tuple[str, str]:
        name, found, value = text.partition(separator)
        if not name or not found or not value:
            raise argparse.ArgumentTypeError(f"{text!r} is not of the form {what}")
        return name, value

    return parse


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 1")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="elastipod recipe", description="Work with HyperPod recipes.")
    actions = parser.add_subparsers(dest="action", required=True, title="commands", metavar="COMMAND")
    one = actions.add_parser(
        "render",
        help="print the job of a recipe and the ConfigMap with the configuration of every size",
        description="Print the job of a recipe and the ConfigMap with the configuration of every size, for kubectl apply -f -. "
        "A recipe that contradicts itself is refused, with what to change.",
    )
    one.add_argument("file", metavar="FILE", help="the recipe, in YAML; - reads standard input")
    one.add_argument(
        "override", nargs="*", metavar="PATH=VALUE", help="replace a value, for example elastic_policy.is_elastic=true"
    )
    one.add_argument("--image", required=True, help="image of the training container")
    one.add_argument("--script", required=True, help="script that hyperpodrun starts, with its arguments in one word")
    one.add_argument("--name", default="", help="name of the job (run.name of the recipe)")
    one.add_argument("--namespace", default="", help="namespace of both objects (kubectl's)")
    one.add_argument("--queue", default="", help="LocalQueue of Kueue (none)")
    one.add_argument("--ranks-per-node", type=_positive, metavar="N", help="workers in each pod (trainer.devices)")
    one.add_argument(
        "--model-parallel",
        type=_positive,
        default=1,
        metavar="N",
        help="ranks of one model group, as spec.elastipod.parallelism (1)",
    )
    one.add_argument("--instance-type", default="", help="node label node.kubernetes.io/instance-type (any node)")
    one.add_argument(
        "--resource",
        action="append",
        default=[],
        type=_pair("=", "NAME=QUANTITY"),
        metavar="NAME=QUANTITY",
        help=f"a resource of each pod; may be repeated ({DEFAULT_DEVICE}, one for each rank)",
    )
    one.add_argument(
        "--claim",
        action="append",
        default=[],
        type=_pair(":", "CLAIM:PATH"),
        metavar="CLAIM:PATH",
        help="a PersistentVolumeClaim and where it is mounted; may be repeated",
    )
    one.add_argument(
        "--env",
        action="append",
        default=[],
        type=_pair("=", "NAME=VALUE"),
        metavar="NAME=VALUE",
        help="a variable of the container; may be repeated",
    )
    return parser
