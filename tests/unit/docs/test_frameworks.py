"""The pages about frameworks: the number of changed lines is that of the two scripts, and the examples' jobs can be applied."""

from __future__ import annotations

import difflib
import re
from collections import Counter

import pytest
import yaml
from tests.unit.docs.pages import ROOT, page

from elastipod_operator.api.models import HyperPodPyTorchJob

ROW = re.compile(r"\]\((frameworks-\w+\.md)\) \| (\d+) \|")
PAGES = {name: int(lines) for name, lines in ROW.findall(page("docs/frameworks.md").text)}
EXAMPLES = (
    "hf_trainer",
    "lora",
    "accelerate",
    "lightning",
    "streaming",
    "deepspeed",
    "torchtitan",
    "plain",
    "two_lines",
)
PEERS = ("frameworks", "deepspeed", "streaming", "torchtitan")
ONE_SCREEN = 40  # lines of a README, most of them long
COUNTS = {2: "two lines", 3: "three lines", 8: "eight lines"}


@pytest.mark.parametrize("name", sorted(PAGES))
def test_the_number_of_changed_lines_is_that_of_the_page(name: str) -> None:
    before, after, *_ = (
        Counter(filter(None, map(str.strip, block.splitlines()))) for block in page(f"docs/{name}").blocks("python")
    )
    assert (after - before).total() == PAGES[name]


@pytest.mark.parametrize("name", sorted(PAGES))
def test_a_page_begins_with_the_number_of_changed_lines(name: str) -> None:
    introduction, *_ = page(f"docs/{name}").text.partition("<table>")
    assert f"{COUNTS.get(PAGES[name], f'{PAGES[name]} lines')} change" in introduction


def test_every_page_is_in_the_table() -> None:
    assert sorted(PAGES) == sorted(path.name for path in (ROOT / "docs").glob("frameworks-*.md"))


def test_the_versions_that_the_table_names_are_those_of_the_tests() -> None:
    pins = "".join((ROOT / "requirements" / f"peer-{peer}.txt").read_text() for peer in PEERS)
    text = page("docs/frameworks.md").text.replace("MosaicML's StreamingDataset (tested:", "`mosaicml-streaming`")
    named = re.findall(r"`(datasets|deepspeed|mosaicml-streaming|torchtitan)` ([\d.]+)", text)
    assert {package for package, _ in named} == {"datasets", "deepspeed", "mosaicml-streaming", "torchtitan"}
    for package, version in named:
        assert re.search(rf"^{package}=={re.escape(version)}(\.|\b)", pins, re.MULTILINE), (package, version)


@pytest.mark.parametrize("name", [*EXAMPLES, "tensor_parallel", "pipeline_parallel", "recipe", "grpo"])
def test_an_example_has_a_job_a_script_and_a_page_of_one_screen(name: str) -> None:
    folder = ROOT / "examples" / name
    assert (folder / "job.yaml").is_file()
    assert (folder / "train.py").is_file()
    text = (folder / "README.md").read_text()
    assert "\nkubectl apply -f job.yaml" in text
    assert len(text.splitlines()) <= ONE_SCREEN
    assert f"| `{name}/` |" in (ROOT / "examples" / "README.md").read_text()


def test_the_script_with_two_lines_is_the_plain_one_with_those_that_its_page_shows() -> None:
    plain, elastic = (
        (ROOT / "examples" / name / "train.py").read_text().partition("\nfrom __future__")[2].splitlines()
        for name in ("plain", "two_lines")
    )
    changes = [line for line in difflib.ndiff(plain, elastic) if line[0] in "+-" and line[2:].strip()]
    (shown,) = page("examples/two_lines/README.md").blocks("python")
    assert [line[2:].strip() for line in changes] == [line.strip() for line in shown.splitlines() if line]
    assert {line[0] for line in changes} == {"+"}
    assert "elastipod" not in "\n".join(plain)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_job_of_an_example_is_valid_and_runs_its_script_with_options_that_exist(name: str) -> None:
    folder = ROOT / "examples" / name
    job = HyperPodPyTorchJob.model_validate(yaml.safe_load((folder / "job.yaml").read_text()))
    (container,) = job.spec.replica_specs[0].template["spec"]["containers"]
    launcher, script, *options = container["args"]
    assert (launcher, script) == ("--nproc-per-node=1", f"/opt/elastipod/examples/{name}/train.py")
    known = set(re.findall(r'add_argument\(\s*"(--[a-z-]+)"', (folder / "train.py").read_text()))
    assert options
    assert {option.split("=")[0] for option in options} <= known
