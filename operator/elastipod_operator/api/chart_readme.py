"""The chart's README, with a table of all values that is made from the comments of values.yaml."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

HEAD = """<!-- Generated from values.yaml by `make generate`; edits are lost. -->
# The Elastipod chart

Installs the operator for elastic PyTorch training: the CustomResourceDefinition HyperPodPyTorchJob, two replicas of the operator, and
their permissions.

```
helm install elastipod charts/elastipod --namespace aws-hyperpod --create-namespace \\
  --set image.repository=REGISTRY/elastipod/operator --set image.tag=TAG
helm test elastipod --namespace aws-hyperpod       # an operator answers, and one of them leads
```

Uninstalling keeps the CustomResourceDefinition, and with it all jobs; pods that train continue. The
[operations guide](../../docs/operations.md) has the rest: images, Kueue, keys, upgrades, metrics, troubleshooting.

- `alerts/elastipod.yaml`: the alerts, for a Prometheus without the Prometheus operator.
- `dashboards/elastipod.json`: the dashboard, to import into Grafana by hand.

## Values

| value | default | meaning |
|---|---|---|
"""
_MAX_DEFAULT = 60


def render(values_text: str) -> str:
    """Give the README for a values.yaml. Raises ValueError for a value that no comment describes."""
    values = yaml.safe_load(values_text)
    return HEAD + "".join(f"{row}\n" for row in _rows(values, comments_of(values_text), ()))


def comments_of(values_text: str) -> dict[tuple[str, ...], str]:
    """Give the comment above each key, by the key's path."""
    comments: dict[tuple[str, ...], str] = {}
    path: list[tuple[int, str]] = []
    lines: list[str] = []
    for line in values_text.splitlines():
        text = line.strip()
        if text.startswith("#"):
            lines.append(text.removeprefix("#").strip())
            continue
        key, colon, _ = text.partition(":")
        if colon and not text.startswith("- "):
            indent = len(line) - len(line.lstrip())
            path = [*(part for part in path if part[0] < indent), (indent, key)]
            if lines:
                comments[tuple(name for _, name in path)] = " ".join(lines)
        lines = []
    return comments


def _rows(values: Mapping[str, Any], comments: Mapping[tuple[str, ...], str], above: tuple[str, ...]) -> Iterator[str]:
    for key, value in values.items():
        path = (*above, key)
        comment = comments.get(path, "")
        if isinstance(value, Mapping) and any(known[: len(path)] == path and known != path for known in comments):
            if comment:
                yield f"| `{'.'.join(path)}` | | {_cell(comment)} |"
            yield from _rows(value, comments, path)
        elif comment:
            yield f"| `{'.'.join(path)}` | {_default(value)} | {_cell(comment)} |"
        else:
            raise ValueError(f"values.yaml: {'.'.join(path)} has no comment")


def _default(value: object) -> str:
    text = json.dumps(value)
    return f"`{text}`" if len(text) <= _MAX_DEFAULT else "see values.yaml"


def _cell(comment: str) -> str:
    return comment.replace("|", "\\|")
