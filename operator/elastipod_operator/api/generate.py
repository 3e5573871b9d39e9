"""Write what is generated from the models: `python -m elastipod_operator.api.generate [--check | --pod-schema-from KUBECONFIG]`.

Run in a checkout. Writes the CRD, the chart's copy of it, the API reference, the reference of reasons, and the chart's README.
"""

from __future__ import annotations

import argparse
import difflib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from elastipod_operator.api import chart_readme, crd, pod_schema, reasons_reference, reference

HEADER = "# Generated from the models in operator/elastipod_operator/api by `make generate`; edits are lost.\n"
CRD_FILE = Path("crds/hyperpodpytorchjobs.yaml")
CHART_CRD_FILE = Path("charts/elastipod/templates/crd.yaml")
REFERENCE_FILE = Path("docs/api-reference.md")
VALUES_FILE = Path("charts/elastipod/values.yaml")
CHART_README_FILE = Path("charts/elastipod/README.md")
REASONS_FILE = Path("docs/reference/reasons.md")

# Helm never upgrades what lies in a chart's crds/ folder, so the chart's copy is a template.
_CHART_HEAD = """{{- if .Values.crds.install }}
{{- $found := lookup "apiextensions.k8s.io/v1" "CustomResourceDefinition" "" "hyperpodpytorchjobs.sagemaker.amazonaws.com" }}
{{- if and $found (not .Values.crds.takeOver) }}
{{- $schema := dig "schema" "openAPIV3Schema" "properties" "spec" "properties" dict (first $found.spec.versions) }}
{{- if not (hasKey $schema "elastipod") }}
{{- $whose := "CRD hyperpodpytorchjobs.sagemaker.amazonaws.com belongs to another controller: its spec has no field elastipod." }}
{{- $remedy := "End that controller, then install with --take-ownership --set crds.takeOver=true: the CRD and its jobs stay." }}
{{- fail (printf "%s %s" $whose $remedy) }}
{{- end }}
{{- end }}
"""
_CHART_KEEP = """  {{- if .Values.crds.keep }}
  annotations:
    helm.sh/resource-policy: keep
  {{- end }}
"""
_CHART_TAIL = "{{- end }}\n"


def checkout() -> Path:
    """Give the top folder of the checkout that this package is imported from."""
    return Path(__file__).resolve().parents[3]


def generated() -> dict[Path, str]:
    """Give the text of every generated file by its path in the checkout; raises ValueError when the CRD is too large."""
    definition = crd.build()
    size = len(json.dumps(definition))
    if size > crd.MAX_JSON_BYTES:
        raise ValueError(f"the CRD is {size} bytes of JSON; a plain kubectl apply takes {crd.MAX_JSON_BYTES}")
    text = _yaml(definition)
    return {
        CRD_FILE: HEADER + text,
        CHART_CRD_FILE: HEADER + _as_template(text),
        REFERENCE_FILE: reference.render(crd.object_schema()),
        REASONS_FILE: reasons_reference.render(),
        CHART_README_FILE: chart_readme.render((checkout() / VALUES_FILE).read_text(encoding="utf-8")),
    }


def stale(root: Path) -> list[str]:
    """Give, for each generated file under `root` that is not current, the first lines of its difference."""
    hints = []
    for path, wanted in generated().items():
        found = (root / path).read_text(encoding="utf-8") if (root / path).exists() else ""
        if found != wanted:
            lines = difflib.unified_diff(
                found.splitlines(), wanted.splitlines(), str(path), "generated", lineterm="", n=1
            )
            hints.append("\n".join(list(lines)[:20]))
    return hints


def main(arguments: list[str] | None = None) -> int:
    """Run the command; gives its exit status."""
    parser = argparse.ArgumentParser(prog="python -m elastipod_operator.api.generate", description=__doc__)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="write nothing; exit 1 when a file is not current")
    mode.add_argument("--pod-schema-from", metavar="KUBECONFIG", help="first read the pod template from this cluster")
    options = parser.parse_args(arguments)
    if options.check:
        hints = stale(checkout())
        if hints:
            print("\n\n".join([*hints, "generated files are not current; run `make generate`"]), file=sys.stderr)
        return 1 if hints else 0
    if options.pod_schema_from:
        _refresh_pod_schema(options.pod_schema_from)
    for path, text in generated().items():
        target = checkout() / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    return 0


def _refresh_pod_schema(kubeconfig: str) -> None:
    command = ["kubectl", "--kubeconfig", kubeconfig, "get", "--raw", pod_schema.OPENAPI_PATH]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=60).stdout
    text = json.dumps(pod_schema.extract(json.loads(answer)), separators=(",", ":"), sort_keys=True)
    (Path(__file__).parent / pod_schema.FILE_NAME).write_text(text + "\n", encoding="utf-8")


def _yaml(value: Any) -> str:
    text: str = yaml.dump(value, Dumper=_PlainDumper, sort_keys=False, width=120, allow_unicode=True)
    return text


class _PlainDumper(yaml.SafeDumper):
    """Writes shared parts in full: anchors would hide what a reader looks for."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _as_template(text: str) -> str:
    assert "{{" not in text, "Helm would read this as a template"
    head, name, tail = text.partition(f"  name: {crd.CRD_NAME}\n")
    return _CHART_HEAD + head + name + _CHART_KEEP + tail + _CHART_TAIL


if __name__ == "__main__":
    sys.exit(main())
