"""The kinds of cert-manager and of the Prometheus operator, from the sources that these projects publish as Go modules."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.patience import PATIENCE_S

from elastipod_local.errors import LocalClusterError
from elastipod_local.golang import go_environment, go_program


@dataclass(frozen=True, slots=True)
class Kinds:
    """Where a project keeps its CRDs. checksum: of the module, as in a go.sum."""

    module: str
    checksum: str
    folder: str
    files: tuple[str, ...]


CERT_MANAGER = Kinds(
    "github.com/cert-manager/cert-manager@v1.19.1",
    "h1:Txh8L/nLWTDcb7ZnXuXbTe15BxQnLbLirXmbNk0fGgY=",
    "deploy/crds",
    ("cert-manager.io_certificates", "cert-manager.io_issuers"),
)
PROMETHEUS_OPERATOR = Kinds(
    "github.com/prometheus-operator/prometheus-operator@v0.85.0",
    "h1:M5xLCLEoaW2IJfnuCwFzzpL+jSVQu3KGT84Pye+fW8s=",
    "example/prometheus-operator-crd",
    tuple(f"monitoring.coreos.com_{kind}" for kind in ("podmonitors", "prometheusrules", "servicemonitors")),
)


def definitions(kinds: Kinds) -> list[Path]:
    """Give the files of the CRDs, fetched once. Skips the test where no Go module proxy can be reached."""
    # The checksum is ours, so that no other host has to vouch for the module.
    environment = {**go_environment(), "GOFLAGS": "-mod=mod", "GOSUMDB": "off"}
    try:
        command = [str(go_program()), "mod", "download", "-json", kinds.module]
    except LocalClusterError as failed:
        pytest.skip(str(failed))
    done = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    found = json.loads(done.stdout or "{}")
    if "Dir" not in found:
        pytest.skip(f"{kinds.module} cannot be fetched: {found.get('Error') or done.stderr}")
    assert found["Sum"] == kinds.checksum, f"{kinds.module} is not what it was"
    return [Path(found["Dir"], kinds.folder, f"{name}.yaml") for name in kinds.files]
