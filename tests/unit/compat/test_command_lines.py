"""hyperpodrun takes the command line of every manifest in tests/api/compat, as a container's shell hands it over."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.api.compat_jobs import EXPECTED, job_of, name_of
from tests.patience import PATIENCE_S

from elastipod_agent.arguments import parse
from elastipod_agent.settings import read_settings
from elastipod_operator.core.names import PodId
from elastipod_operator.kube.observed_job import observe_job
from elastipod_operator.kube.pods import pod_manifest

WRITE_DOWN = f"""#!{sys.executable} -S
import json, os, sys
with open(os.environ["WRITTEN"], "w") as file:
    json.dump([sys.argv[1:], dict(os.environ)], file)
"""
INPROCESS = {m for m in EXPECTED if m.startswith("checkpointless-")}
# What the shells of these manifests call beside hyperpodrun, and what would change this machine.
OF_THE_IMAGE = {
    "tee": "exec cat",
    "ip": 'case "$*" in *route*) echo "default via 10.0.0.1 dev eth7" ;; esac',
    "sysctl": "echo $2",
    "mkdir": "",
    "ln": "",
}
REFERENCE = re.compile(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)")


def container_of(manifest: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Give the container of the job's first pod as the operator makes it, and its environment of plain values."""
    body = job_of(manifest)
    body["metadata"] |= {"uid": "u", "namespace": "n", "creationTimestamp": "2026-01-01T00:00:00Z"}
    fact = observe_job(body)
    assert fact.policy is not None
    spec = body["spec"]["replicaSpecs"][0]["name"]
    pod = pod_manifest(fact, body["spec"], fact.policy, PodId(spec, 0, 0), fact.policy.sizes.start)
    container = pod["spec"]["containers"][0]
    environ: dict[str, str] = {}
    for entry in container["env"]:
        if "value" in entry:  # as kubelet: $(NAME) is a variable above it, or stays as it is
            environ[entry["name"]] = REFERENCE.sub(lambda name: environ.get(name[1], name[0]), entry["value"])
    return container, environ


def run_container(words: list[str], environ: dict[str, str], folder: Path) -> tuple[list[str], dict[str, str]]:
    """Run a container's command with a hyperpodrun that only notes its arguments and environment."""
    for name, text in (("hyperpodrun", WRITE_DOWN), *((n, f"#!/bin/sh\n{t}\n") for n, t in OF_THE_IMAGE.items())):
        path = folder / name
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)
    written = folder / "written.json"
    environ = {**environ, "PATH": f"{folder}{os.pathsep}{os.defpath}", "WRITTEN": str(written)}
    subprocess.run(
        words, env=environ, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE_S, check=True
    )
    arguments, seen = json.loads(written.read_text(encoding="utf-8"))
    return arguments, seen


@pytest.mark.parametrize("manifest", EXPECTED)
def test_command_line(manifest: str, tmp_path: Path) -> None:
    container, environ = container_of(manifest)
    arguments, seen = run_container([*container["command"], *container.get("args", ())], environ, tmp_path)
    line = parse(arguments, seen)  # a second look into torch's options is never needed
    settings, warnings = read_settings(line, seen)
    assert settings.layout.nproc == EXPECTED[manifest].workers
    assert settings.is_inprocess == (manifest in INPROCESS)
    assert settings.port == 8080
    assert settings.job == f"n/{name_of(manifest)}"
    assert line.script
    assert not [text for text in warnings if "unknown" in text]


def test_details_of_command_lines(tmp_path: Path) -> None:
    """What is easily lost: an abbreviation, a time-out in a variable, nodes that the pod's environment names, a shell's exports."""
    container, environ = container_of("checkpointless-pretrain")
    arguments, seen = run_container([*container["command"], *container["args"]], environ, tmp_path)
    settings, warnings = read_settings(parse(arguments, seen), seen)
    assert settings.inprocess_timeout_s == 1800
    assert settings.server_log_level == "warning"
    assert (settings.logs.redirects.of(0), settings.logs.tee.of(0)) == (3, 3)
    logs = "/data/trainer/output/logs/llama-pretrain/checkpointless"
    assert str(settings.logs.directory).startswith(logs)
    assert "trainer.num_nodes=16" in settings.command
    assert seen["CHECKPOINT_DIR"] == "/data/$(user)/checkpoints/llama_pretrain/llama-pretrain"
    assert (seen["GLOO_SOCKET_IFNAME"], seen["MASTER_ADDR"]) == ("eth7", ""), "the pod has no address of a master"
    assert [warning.split()[0] for warning in warnings] == ["HPCT_USE_ROOTLESS"]
