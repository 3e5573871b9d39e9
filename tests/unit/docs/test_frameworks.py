"""The pages about frameworks: the number of changed lines is that of the two scripts, and the examples' jobs can be applied."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import yaml
from tests.unit.docs.pages import ROOT, page

from elastipod_operator.api.models import HyperPodPyTorchJob

ROW = re.compile(r"\]\((frameworks-\w+\.md)\) \| (\d+) \|")
PAGES = {name: int(lines) for name, lines in ROW.findall(page("docs/frameworks.md").text)}
EXAMPLES = ("hf_trainer", "lora", "accelerate", "lightning", "streaming", "deepspeed")


@pytest.mark.parametrize("name", sorted(PAGES))
def test_the_number_of_changed_lines_is_that_of_the_page(name: str) -> None:
    before, after, *_ = (
        Counter(filter(None, map(str.strip, block.splitlines()))) for block in page(f"docs/{name}").blocks("python")
    )
    assert (after - before).total() == PAGES[name]


def test_every_page_is_in_the_table() -> None:
    assert sorted(PAGES) == sorted(path.name for path in (ROOT / "docs").glob("frameworks-*.md"))


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
