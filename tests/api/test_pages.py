"""What the pages let a reader paste, against a real API server with Kueue: manifests are accepted strictly, options exist."""

from __future__ import annotations

import json
import re
import subprocess
from functools import cache

import pytest
from tests.nonempty import some
from tests.patience import PATIENCE_S
from tests.unit.client.kubeflow_jobs import JOBS
from tests.unit.docs.blocks import commands, manifests
from tests.unit.docs.pages import pages

from elastipod import cli
from elastipod_local import binaries
from elastipod_local.cluster import Cluster

# Kinds of others that no API server here serves, each with where they are checked.
ELSEWHERE = {"NodePool": "tests/unit/docs/test_aws.py", "EC2NodeClass": "tests/unit/docs/test_aws.py"}
MANIFESTS = [(page.path, body) for page in pages() for body in manifests(page) if body["kind"] not in ELSEWHERE]
OPTION = re.compile(r"--?[A-Za-z][a-z-]*")


@pytest.mark.parametrize(
    ("path", "body"), some(MANIFESTS), ids=lambda each: each if isinstance(each, str) else each["kind"]
)
def test_manifests_are_accepted(
    kueue_server: Cluster, kueue_namespace: str, path: str, body: dict[str, object]
) -> None:
    metadata = {key: value for key, value in dict(body["metadata"]).items() if key != "namespace"}  # type: ignore[call-overload]
    text = json.dumps({**body, "metadata": metadata})
    said = kueue_server.kubectl(
        "-n", kueue_namespace, "apply", "--dry-run=server", "--validate=strict", "-f", "-", input=text
    )
    assert "(server dry run)" in said, path


@pytest.mark.parametrize("text", JOBS.values(), ids=JOBS)
def test_imported_jobs_are_accepted(
    kueue_server: Cluster,
    kueue_namespace: str,
    text: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import io

    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert cli.main(["import", "-", "-o", "json"]) in (0, 1)
    job = json.loads(capsys.readouterr().out)
    job["metadata"].pop("namespace", None)
    # Nothing is created: operators of other tests would take the job on.
    said = kueue_server.kubectl(
        "-n", kueue_namespace, "apply", "--dry-run=server", "--validate=strict", "-f", "-", input=json.dumps(job)
    )
    assert "created (server dry run)" in said


@cache
def help_of(program: str, *words: str) -> str:
    """Give the help of a subcommand of kubectl or helm, with the options that all have; empty where there is none."""
    binary = str(binaries.ensure([program])[program])
    texts = []
    for arguments in ([*words, "--help"], ["options"] if program == "kubectl" else ["--help"]):
        done = subprocess.run([binary, *arguments], capture_output=True, text=True, timeout=PATIENCE_S)
        texts.append(done.stdout if done.returncode == 0 else "")
    return "\n".join(texts)


def subcommand(words: list[str]) -> list[str]:
    """Give the words of a command line that name the subcommand."""
    two = {"create"} if words[0] == "kubectl" else set()
    return words[1:3] if words[1] in two else words[1:2]


@pytest.mark.parametrize("program", ["kubectl", "helm"])
def test_subcommands_and_options_exist(program: str) -> None:
    lines = [words for page in pages() for words in commands(page) if words[0] == program and words[1] != "elastipod"]
    for words in some(lines):
        text = help_of(program, *subcommand(words))
        assert "Usage:" in text, words
        known = set(OPTION.findall(text))
        assert [
            word for word in words if word.startswith("-") and word != "-" and word.split("=")[0] not in known
        ] == []
