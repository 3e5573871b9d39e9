"""`elastipod why` on real objects: those of every staged situation, written into a real API server and read with a real kubectl."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator

import pytest
import yaml
from tests.api.conftest import serve_jobs
from tests.api.staged_objects import StagedObjects
from tests.objects import is_served
from tests.patience import PATIENCE_S
from tests.sim.test_why import PARAGRAPHS, STAGES, without_times
from tests.slow import all_but_first

from elastipod import cli
from elastipod_local import binaries
from elastipod_local.cluster import Cluster
from elastipod_local.host import quiet, wait_until
from elastipod_operator.kube.api import Api, ApiError

KINDS = ("workloads", "localqueues")
# What the CRD refuses: the operator meets it only where the CRD is another one.
REFUSED = {"its spec was edited to nonsense": "nprocPerNode must be auto, cpu, gpu or a positive number"}


def kind_of_kueue(name: str) -> dict[str, object]:
    """Give the CRD of Kueue's chart without its webhook, because no Kueue runs here."""
    text = (binaries.kueue_chart(quiet) / "templates" / "crd" / f"kueue.x-k8s.io_{name}.yaml").read_text()
    plain = "\n".join(line for line in text.partition("*/ -}}")[2].splitlines() if "{{" not in line)
    crd: dict[str, object] = yaml.load(plain, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    spec = crd["spec"]
    assert isinstance(spec, dict)
    # One version: API servers take seconds to prepare the schemas of each.
    (newest,) = [{**one, "storage": True} for one in spec["versions"] if one["name"] == "v1beta2"]
    return {**crd, "spec": {**spec, "conversion": {"strategy": "None"}, "versions": [newest]}}


@pytest.fixture(scope="module")
def api_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """An API server of these tests' own that serves Workloads and LocalQueues: staged nodes and pods stay where they are."""
    with Cluster.up("api-staged", nodes=0, run_dir=tmp_path_factory.mktemp("staged") / "cluster") as cluster:
        serve_jobs(cluster)
        crds = [kind_of_kueue(name) for name in KINDS]
        cluster.kubectl("create", "-f", "-", input=json.dumps({"apiVersion": "v1", "kind": "List", "items": crds}))

        def are_served() -> bool:
            return all(is_served(cluster, kind) for kind in KINDS)

        wait_until(are_served, deadline_s=PATIENCE_S, what="the kinds of Kueue to be served", every_s=0.2)
        yield cluster


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastipod_operator.kube.api.CALL_TIMEOUT_S", PATIENCE_S)
    monkeypatch.setattr("elastipod_client.kubectl.REQUEST_TIMEOUT_S", int(PATIENCE_S))


def objects_of(name: str, api: Api) -> StagedObjects:
    return StagedObjects(api, 1 + list(STAGES).index(name))


@pytest.mark.parametrize("name", all_but_first((name for name in STAGES if name not in REFUSED), 4))
async def test_the_paragraph_is_that_of_the_stage(
    api_server: Cluster, api: Api, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = binaries.ensure(["kubectl"])["kubectl"].parent
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    objects = objects_of(name, api)
    # In a thread, because the simulator has an event loop of its own.
    await objects.write(await asyncio.to_thread(STAGES[name].objects))
    options = ["--kubeconfig", str(api_server.kubeconfig), "-n", objects.namespace, "-o", "json"]
    assert cli.main(["why", "train", *options]) in (0, 1)
    told = json.loads(capsys.readouterr().out)
    assert without_times(objects.plain(told["text"])) == PARAGRAPHS[name]
    assert not told["notRead"]


@pytest.mark.parametrize(("name", "words"), REFUSED.items())
async def test_what_the_api_server_does_not_hold(api: Api, name: str, words: str) -> None:
    staged = await asyncio.to_thread(STAGES[name].objects)
    with pytest.raises(ApiError, match=words):
        await objects_of(name, api).write(staged)
