"""Renders the chart with helm, and finds objects in the result."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import yaml
from tests.patience import PATIENCE_S

from elastipod_local import binaries

CHART = Path(__file__).resolve().parents[2] / "charts" / "elastipod"
Objects = dict[tuple[str, str, str], dict[str, Any]]


def helm(
    *arguments: str, values: dict[str, Any] | None = None, chart: Path = CHART, namespace: str = "aws-hyperpod"
) -> subprocess.CompletedProcess[str]:
    """Run a helm command on the chart, or on another one."""
    program = binaries.ensure(["helm"])["helm"]
    command = [str(program), *arguments, str(chart), "--namespace", namespace, "--values", "-"]
    return subprocess.run(command, input=json.dumps(values or {}), capture_output=True, text=True, timeout=PATIENCE_S)


def render(
    values: dict[str, Any] | None = None, release: str = "elastipod", namespace: str = "aws-hyperpod"
) -> Objects:
    """Give the objects of the chart by kind, namespace and name."""
    done = helm("template", release, values=values, namespace=namespace)
    assert done.returncode == 0, done.stderr
    # The CRD is long: the loader in C takes a fifteenth of the other's time.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    objects = [body for body in yaml.load_all(done.stdout, Loader=loader) if body]
    keys = [(body["kind"], body["metadata"].get("namespace", ""), body["metadata"]["name"]) for body in objects]
    assert len(set(keys)) == len(keys)
    return dict(zip(keys, objects, strict=True))


def deployment(objects: Objects) -> dict[str, Any]:
    """Give the operator's Deployment."""
    (found,) = (body for (kind, _, _), body in objects.items() if kind == "Deployment")
    return found


def container(objects: Objects) -> dict[str, Any]:
    """Give the operator's container."""
    (only,) = deployment(objects)["spec"]["template"]["spec"]["containers"]
    assert isinstance(only, dict)
    return only
