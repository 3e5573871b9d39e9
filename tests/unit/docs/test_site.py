"""The documentation site: it builds without a warning, and its pages load nothing from another host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from docs.site import hooks
from PIL import Image
from pymdownx.superfences import SuperFencesException
from tests.nonempty import some
from tests.unit.docs.pages import ROOT, pages

# What a browser fetches by itself when it opens a page; links that a reader follows are not among it.
FETCHED = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*?\bsrc=\"([^\"]+)\"|<link\b[^>]*?\bhref=\"([^\"]+)\"", re.DOTALL
)
DIAGRAMS = [
    block for path in sorted((ROOT / "docs").rglob("*.md")) for block in re.findall(r"```mermaid\n(.*?)```", path.read_text(), re.DOTALL)
]  # fmt: skip


def build(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder), *options]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return folder


def fetched(page: str) -> Iterator[str]:
    return (address for found in FETCHED.findall(page) for address in found if address)


@pytest.mark.slow
def test_every_page_is_built_and_loads_nothing_from_another_host(site: Path) -> None:
    pages = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")}
    for page in some(sorted(pages)):
        text = (site / page.with_suffix(".html")).read_text()
        strange = [address for address in some(fetched(text)) if address.startswith(("http:", "https:", "//"))]
        assert strange == [], page


def test_styles_load_nothing_from_another_host(site: Path) -> None:
    for sheet in some(site.rglob("*.css")):
        assert not re.search(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", sheet.read_text()), sheet


def test_the_address_of_another_host_is_found() -> None:
    page = '<script async src="https://example.com/a.js"></script><link rel="x" href="//example.com/b.css"><a href="https://c">'
    assert list(fetched(page)) == ["https://example.com/a.js", "//example.com/b.css"]


@pytest.mark.parametrize(
    ("page", "link", "there"),
    [
        pytest.param("docs/cli.md", "[a](user-guide.md#data)", "[a](user-guide.md#data)", id="a page of the site"),
        pytest.param("docs/design/data.md", "[a](../cli.md)", "[a](../cli.md)", id="a page above"),
        pytest.param("docs/cli.md", "[a](../Makefile)", "[a](repository/Makefile.md)", id="a file"),
        pytest.param("docs/cli.md", "[a](../examples/digits)", "[a](repository/examples/digits/index.md)", id="a folder"),
        pytest.param("CONTRIBUTING.md", "[a](docs/cli.md)", "[a](../cli.md)", id="from outside into the site"),
        pytest.param("examples/README.md", "[a](../CHANGELOG.md)", "[a](../CHANGELOG.md)", id="between pages outside"),
        pytest.param("docs/cli.md", "[a](https://b/c.md)", "[a](https://b/c.md)", id="an address"),
        pytest.param("docs/cli.md", "[a](nowhere.md)", "[a](nowhere.md)", id="nothing is made of what does not exist"),
        pytest.param("docs/cli.md", "```\n[a](../Makefile)\n```", "```\n[a](../Makefile)\n```", id="code"),
    ],
)  # fmt: skip
def test_links_of_the_repository_lead_to_pages_of_the_site(page: str, link: str, there: str) -> None:
    assert hooks.rewritten(link, page) == there


@pytest.mark.parametrize(
    "path", ["docs/cli.md", "CONTRIBUTING.md", "examples/README.md", "bench/operator_load", "Makefile"]
)
def test_a_page_knows_where_it_comes_from(path: str) -> None:
    assert hooks.repository_path(hooks.site_path(path)) == path


PICTURES = [
    (page.path, title, page.path.rpartition("/")[0], link)
    for page in pages()
    for title, link in re.findall(r"!\[(.*?)\]\((\S+?)\)", page.text)
]


@pytest.mark.parametrize(("page", "title", "folder", "link"), some(PICTURES))
def test_pictures_have_a_title_and_a_background_for_dark_pages(page: str, title: str, folder: str, link: str) -> None:
    assert len(title.split()) >= 4, page
    if link.endswith(".png"):
        with Image.open(ROOT / folder / link) as image:
            assert image.convert("RGBA").getchannel("A").getextrema() == (255, 255), f"{link} is transparent"
            assert image.convert("RGB").getpixel((0, 0)) == (255, 255, 255)
        return
    background = ElementTree.parse(ROOT / folder / link).find(".//{*}g[@id='patch_1']/{*}path")
    assert background is not None
    assert background.attrib["style"] == "fill: #ffffff", f"{link} is drawn on what the page has behind it"


@pytest.mark.parametrize("source", some(DIAGRAMS), ids=lambda source: str(source)[:60])
def test_diagrams_can_be_drawn_and_read_aloud(source: str) -> None:
    assert '<img alt="' in hooks.drawn(source, "mermaid", "mermaid", {}, None)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        pytest.param("flowchart LR\n  a --> b", "no accTitle", id="without a title"),
        pytest.param("sequenceDiagram\n  accTitle: x\n  Note over A: a; b c", "cannot be drawn", id="not Mermaid"),
    ],
)
def test_a_diagram_that_readers_could_not_read_fails_the_build(source: str, message: str) -> None:
    with pytest.raises(SuperFencesException, match=message):
        hooks.drawn(source, "mermaid", "mermaid", {}, None)
