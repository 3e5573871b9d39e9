"""Names that users type or read (variables, labels, annotations, metrics, reasons, fields) are the same in code and documentation."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import yaml
from prometheus_client import REGISTRY
from tests.nonempty import some
from tests.unit.docs.metric_names import operator_metrics
from tests.unit.docs.pages import ROOT, Page, page, pages, sources

from elastipod_agent.metrics import FAMILIES
from elastipod_operator.api.models import HyperPodPyTorchJob
from elastipod_operator.core.phase_accounting import Phase

PAGES = pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.path))
PRODUCT = ("operator", "agent", "localcluster", "charts", "examples")
VARIABLE = re.compile(r"\bELASTIPOD_[A-Z_]+[A-Z]\b")
KEY = re.compile(r"\belastipod\.io/[a-z][a-z-]*")
# Names that only the parts of Elastipod use among themselves, each with the reason.
INTERNAL_VARIABLES = {"ELASTIPOD_ROOM": "the fork server names itself in its environment, to make room for a title"}
INTERNAL_KEYS = {"elastipod.io/localcluster": "the Go modules that pin what the local cluster compiles"}
RESERVED_KEYS = {"elastipod.io/drain-requested": "reserved for later"}


@cache
def product() -> str:
    return sources(*PRODUCT, suffixes=(".py", ".yaml", ".tpl", ".txt"))


@cache
def product_names(pattern: re.Pattern[str]) -> frozenset[str]:
    return frozenset(pattern.findall(product()))


@cache
def documented() -> str:
    return "\n".join(page.text for page in pages())


@PAGES
def test_environment_variables_exist(page: Page) -> None:
    assert set(VARIABLE.findall(page.text)) <= product_names(VARIABLE)


def test_every_environment_variable_is_documented() -> None:
    assert product_names(VARIABLE) - set(VARIABLE.findall(documented())) == set(INTERNAL_VARIABLES)


@PAGES
def test_labels_and_annotations_exist(page: Page) -> None:
    assert set(KEY.findall(page.text)) <= product_names(KEY) | set(RESERVED_KEYS)


def test_every_label_and_annotation_is_documented() -> None:
    keys = set(KEY.findall(sources("operator", "agent", "localcluster")))
    assert keys - set(KEY.findall(documented())) <= set(INTERNAL_KEYS)


def exported() -> dict[str, frozenset[str]]:
    """Give the labels of the operator's metrics by name, without the common prefix."""
    return {metric.name.removeprefix("elastipod_"): metric.labels for metric in operator_metrics()}


def names_in_table(heading: str) -> dict[str, set[str]]:
    """Give the metrics of a table of the operations guide, each with the labels of its row."""
    rows = [row for row in page("docs/operations.md").table_rows("## Metrics")]
    starts = [at for at, row in enumerate(rows) if row[0].startswith("metric (")]
    at = next(at for at in starts if heading in rows[at][0])
    end = next((other for other in starts if other > at), len(rows))
    return {
        name: set(re.findall(r"`([^`]+)`", row[1]))
        for row in rows[at + 1 : end]
        for name in re.findall(r"`([a-z_]+)`", row[0])
    }


def test_the_operations_guide_lists_every_phase_and_no_other() -> None:
    rows = page("docs/operations.md").table_rows("## Where the time goes")
    assert [row[0].strip(" `") for row in rows][1:] == list(Phase)


def test_the_operations_guide_lists_every_metric_of_the_operator_and_no_other() -> None:
    assert REGISTRY is not None
    listed = names_in_table("`elastipod_...`")
    assert set(listed) == set(exported())
    for name, labels in exported().items():
        assert labels <= listed[name], name


def test_the_operations_guide_lists_every_metric_of_the_agent_and_no_other() -> None:
    assert set(names_in_table("`elastipod_agent_...`")) == set(FAMILIES)


def named_metrics(page: Page) -> set[str]:
    named = set(re.findall(r"(?<![\w./])elastipod_[a-z_]+[a-z](?![\w/.])", page.text))
    return named - {"elastipod_operator", "elastipod_agent", "elastipod_client", "elastipod_local"}


@PAGES
def test_metrics_that_are_named_in_full_exist(page: Page) -> None:
    known = {f"elastipod_{name}" for name in exported()} | {f"elastipod_agent_{name}" for name in FAMILIES}
    assert {name.removesuffix("_bucket") for name in named_metrics(page) - known} <= known


@cache
def constants() -> frozenset[str]:
    """Give those classes of all pages that are a text, or a name that is defined, in the code of the product and its tests."""
    sought = set().union(*(named_classes(page) for page in pages()))
    found: set[str] = set()
    for folder in ("operator", "agent", "localcluster", "tests", "bench", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            # To parse all of the code takes ten seconds; most names are found in the first files that have them.
            if any(name in text for name in sought - found):
                found |= sought & names_in(text)
    return frozenset(found)


def names_in(code: str) -> set[str]:
    """Give every text, and every name that is defined, in some code."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.update(re.findall(r"[A-Za-z]+", node.value) if len(node.value) < 2000 else ())
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            found.update(alias.name for alias in node.names)
    return found


# Names of Kubernetes, Kueue and torch that the pages mention and the code does not.
OF_OTHERS = frozenset({"BestEffortFIFO", "FileSystemReader", "IterableDataset"})


def named_classes(page: Page) -> set[str]:
    return {span for span in page.spans() if re.fullmatch(r"(?:[A-Z][a-z0-9]+){2,}(?:[A-Z]+)?", span)}


@PAGES
def test_reasons_and_classes_exist(page: Page) -> None:
    assert named_classes(page) <= constants() | OF_OTHERS


@cache
def schema() -> dict[str, Any]:
    crd = yaml.load((ROOT / "crds" / "hyperpodpytorchjobs.yaml").read_text(), yaml.CSafeLoader)
    (version,) = [version for version in crd["spec"]["versions"] if version["storage"]]
    found: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    return found


def children(node: dict[str, Any]) -> dict[str, Any]:
    while "items" in node:
        node = node["items"]
    return dict(node.get("properties") or {})


@cache
def parents() -> dict[str, list[dict[str, Any]]]:
    """Give every field of the resource by its name, with what is below it."""
    found: dict[str, list[dict[str, Any]]] = {}
    waiting = [schema()]
    while waiting:
        for name, below in children(waiting.pop()).items():
            found.setdefault(name, []).append(below)
            waiting.append(below)
    return found


def is_field(path: str) -> bool:
    """Whether a path of fields exists in the resource, from its top or from any field of that name on."""
    first, *rest = path.replace("[]", "").split(".")
    nodes = parents().get(first, [])
    for name in rest:
        maps = [node["additionalProperties"] for node in nodes if node.get("additionalProperties")]
        nodes = [children(node)[name] for node in nodes if name in children(node)] or maps
    return bool(nodes)


OWN_BLOCKS = r"(?:spec|status|elasticPolicy|runPolicy|replicaSpecs(?:\[\])?|restartPolicy|elasticScalingStatus)"
# Paths of other resources that begin like ours.
OTHER_PATHS = frozenset(
    {"spec.template", "status.admission", "spec.active"}  # of Kueue and of pods
    | {
        "elasticPolicy.maxRestarts",
        "elasticPolicy.metrics",
        "elasticPolicy.rdzv",
        "runPolicy.backoffLimit",
    }  # of Kubeflow
)


def named_fields(page: Page) -> set[str]:
    own = re.compile(rf"\.?({OWN_BLOCKS}(?:\.[a-zA-Z]+(?:\[\])?)+)(?=$|[: =])")
    return {path[1] for span in page.spans() if (path := own.match(span))} - OTHER_PATHS


@PAGES
def test_fields_of_the_resource_exist(page: Page) -> None:
    assert [path for path in named_fields(page) if not is_field(path)] == []


@pytest.mark.parametrize("found", [named_metrics, named_classes, named_fields])
def test_the_pages_are_searched_with_success(found: Callable[[Page], set[str]]) -> None:
    assert len({one for page in pages() for one in found(page)}) >= 5, (
        "a page that names nothing passes every test here"
    )


def test_the_table_of_fields_in_the_user_guide_names_fields() -> None:
    rows = page("docs/user-guide.md").table_rows("## The job")
    for name in some(name for row in rows for name in re.findall(r"`([a-z][a-zA-Z.\[\]]+)`", row[0])):
        assert is_field(name.removesuffix("[]")), name


def test_the_job_of_the_readme_is_valid() -> None:
    (manifest,) = [yaml.safe_load(block) for block in page("README.md").blocks("yaml")]
    job = HyperPodPyTorchJob.model_validate(manifest)
    assert job.spec.elastic_policy is not None


def test_the_values_in_the_operations_guide_are_the_charts() -> None:
    values = yaml.safe_load((ROOT / "charts" / "elastipod" / "values.yaml").read_text())
    rows = page("docs/operations.md").table_rows("## Install")
    for name in some(name for row in rows for name in re.findall(r"`([a-zA-Z.]+)`", row[0])):
        found = values
        for part in name.split("."):
            assert part in found, name
            found = found[part]


def test_nobody_is_told_to_delete_the_crd() -> None:
    """Other controllers may share it, and all jobs of the cluster go with it."""
    texts = [path.read_text(encoding="utf-8") for path in (*ROOT.glob("*.md"), *ROOT.rglob("docs/**/*.md"))]
    texts += [path.read_text(encoding="utf-8") for path in (ROOT / "charts").rglob("*") if path.is_file()]
    assert len(texts) > 30
    assert not [
        text for text in texts if re.search(r"delete (-f )?(crds?\b|customresourcedefinition)", text, re.IGNORECASE)
    ]
