"""What readers paste: manifests are valid, Python compiles and imports what exists, and a shell block runs known programs."""

from __future__ import annotations

import ast
import re

import pytest
import tomllib
from tests.nonempty import some
from tests.unit.docs.blocks import commands, manifests
from tests.unit.docs.pages import ROOT, Page, page, pages

import elastipod
from elastipod_operator.api.models import HyperPodPyTorchJob
from elastipod_operator.kube.job_policy import policy_of

PAGES = pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.path))
# Their options are checked elsewhere: elastipod and hyperpodrun in test_commands, kubectl and helm in tests/api/test_pages.py.
PROGRAMS = frozenset(
    {
        *("elastipod", "hyperpodrun", "kubectl", "helm", "docker", "pip", "python3"),
        *("export", "sed", "mkdir", "make", "source"),
    }
)


def jobs(page: Page) -> list[HyperPodPyTorchJob]:
    return [HyperPodPyTorchJob.model_validate(body) for body in manifests(page) if body["kind"] == "HyperPodPyTorchJob"]


@PAGES
def test_jobs_are_valid_and_have_sizes(page: Page) -> None:
    assert [job.spec for job in jobs(page) if not policy_of(job.spec).sizes.allowed] == []


@PAGES
def test_jobs_start_the_agent_in_their_first_container(page: Page) -> None:
    first = [spec.template["spec"]["containers"][0] for job in jobs(page) for spec in job.spec.replica_specs]
    assert [one["name"] for one in first if "hyperpodrun" not in one.get("command", ())] == []


def missing_names(block: str) -> list[str]:
    """Give what a block of Python takes from the library and the library does not have. Raises SyntaxError."""
    # Parts of a script may return.
    tree = ast.parse("def script():\n" + "".join(f"    {line}" for line in block.splitlines(keepends=True)))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "elastipod"]
    names = [alias.name for node in imports for alias in node.names]
    used = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    names += [node.attr for node in used if isinstance(node.value, ast.Name) and node.value.id == "elastipod"]
    return [name for name in names if not hasattr(elastipod, name)]


@PAGES
def test_python_compiles_and_names_what_the_library_has(page: Page) -> None:
    assert [missing_names(block) for block in page.blocks("python") if missing_names(block)] == []


def test_a_name_that_the_library_does_not_have_is_found() -> None:
    assert missing_names("from elastipod import State, Stat\nelastipod.report(1)\nelastipod.rapport(1)") == [
        "Stat",
        "rapport",
    ]


@PAGES
def test_shell_blocks_run_known_programs(page: Page) -> None:
    assert {words[0] for words in commands(page)} <= PROGRAMS


@pytest.mark.parametrize("path", ["docs/quick-start.md", "docs/cli.md", "docs/tutorial.md", "docs/troubleshooting.md"])
def test_who_is_told_to_install_is_told_of_a_virtual_environment(path: str) -> None:
    """Python of Debian 12 and Ubuntu 24.04 refuses pip outside of one."""
    before, installs, _ = page(path).text.partition("pip install .")
    assert installs
    assert "-m venv" in before or "virtual environment" in page(path).text


def test_the_pages_are_searched_with_success() -> None:
    assert len([job for one in pages() for job in jobs(one)]) >= 4
    assert len([words for one in pages() for words in commands(one)]) >= 15


def test_targets_of_docker_exist() -> None:
    stages = set(re.findall(r"^FROM \S+ AS (\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE))
    built = [
        words[words.index("--target") + 1]
        for one in pages()
        for words in commands(one)
        if words[:2] == ["docker", "build"]
    ]
    assert set(some(built)) <= stages


def test_build_arguments_exist_and_name_extras() -> None:
    declared = set(re.findall(r"^ARG (\w+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    given = [found for one in pages() for found in re.findall(r"--build-arg (\w+)=(\"[^\"]+\"|\S+)", one.text)]
    assert {name for name, _ in some(given)} <= declared
    named = {extra for name, value in given if name == "EXTRAS" for extra in value.strip('"').split()}
    assert {"transformers", "trl"} <= named <= set(extras)


def test_nobody_is_told_to_install_from_an_index_what_is_not_there() -> None:
    """Before the first release; afterwards the pages may name the index, and this test goes."""
    told = re.compile(r"pip install (?:--\S+ )*'?elastipod(?:-agent)?\b(?!_agent)")
    assert told.search("RUN pip install 'elastipod[trl]'")
    assert [one.path for one in some(pages()) if told.search(one.text) and one.path != "CHANGELOG.md"] == []
    sources = [path for part in ("agent", "operator", "localcluster") for path in (ROOT / part).rglob("*.py")]
    assert [path for path in some(sources) if told.search(path.read_text())] == []


def test_values_that_a_page_gives_helm_are_the_charts() -> None:
    import yaml

    values = yaml.safe_load((ROOT / "charts" / "elastipod" / "values.yaml").read_text())
    given = [
        words[at + 1].split("=")[0] for one in pages() for words in commands(one) if words[0] == "helm"
        for at, word in enumerate(words) if word == "--set"
    ]  # fmt: skip
    for name in some(given):
        found = values
        for part in name.split("."):
            if found == {}:
                break  # a map in which users choose the names
            assert part in found, name
            found = found[part]


def test_the_job_of_the_readme_differs_from_none_of_the_quick_start_in_how_it_is_written() -> None:
    """Both show a reader the same shape: what stands in one and means something else in the other would confuse."""
    (readme,) = jobs(page("README.md"))
    (smoke,) = jobs(page("docs/quick-start.md"))
    ours, theirs = (job.spec.replica_specs[0].template["spec"]["containers"][0]["command"] for job in (readme, smoke))
    assert ours == theirs
