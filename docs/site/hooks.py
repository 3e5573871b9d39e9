"""Hooks of mkdocs: links to files of the repository lead to pages of the site, and diagrams are drawn while it is built.

Pages of `docs/` are read in the repository too, so their links are those of the repository. What a page of the site links to
and `docs/` does not hold becomes a page below `repository/`: Markdown as it is, anything else as a listing.
"""

from __future__ import annotations

import base64
import html
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mmdr
from mkdocs.structure.files import File, Files
from pymdownx.superfences import SuperFencesException

ROOT = Path(__file__).resolve().parents[2]
DOCS = "docs"
OUTSIDE = "repository"
LINK = re.compile(r"(\[[^\]]*\]\()([^)\s#]+)((?:#[^)]*)?\))")
FENCE = re.compile(r"(^```.*?^```[^\n]*$)", re.MULTILINE | re.DOTALL)
TITLE = re.compile(r"^\s*accTitle:\s*(.+?)\s*$", re.MULTILINE)
LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".toml": "toml"}
MAX_LISTING = 200_000  # bytes; nothing longer is meant to be read


def on_config(config: Any) -> Any:
    """Have diagrams drawn by `drawn`."""
    fences = {"name": "mermaid", "class": "mermaid", "format": drawn}
    config["mdx_configs"].setdefault("pymdownx.superfences", {})["custom_fences"] = [fences]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add a page for every file of the repository that a page links to, and for those that these link to."""
    waiting = [(path, (ROOT / path).read_text(encoding="utf-8")) for path in _own_pages(files)]
    known = {path for path, _ in waiting}
    while waiting:
        path, text = waiting.pop()
        for target in linked_paths(path, text):
            if target in known or target.startswith(f"{DOCS}/"):
                continue
            known.add(target)
            content = page_of(target)
            files.append(File.generated(config, site_path(target), content=content))
            if target.endswith(".md"):
                waiting.append((target, content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links of the repository into links of the site."""
    return rewritten(markdown, repository_path(page.file.src_uri))


def _own_pages(files: Files) -> list[str]:
    return [f"{DOCS}/{file.src_uri}" for file in files.documentation_pages()]


def linked_paths(path: str, text: str) -> Iterator[str]:
    """Give the paths in the repository to which a page links. path: of the page, in the repository."""
    for piece in FENCE.split(text):
        if not piece.startswith("```"):
            for _, target, _ in LINK.findall(piece):
                found = _resolved(path, target)
                if found is not None:
                    yield found


def rewritten(text: str, path: str) -> str:
    """Give a page's text with links that lead to pages of the site. path: of the page, in the repository."""
    here = posixpath.dirname(site_path(path))

    def link(match: re.Match[str]) -> str:
        target = _resolved(path, match[2])
        if target is None:
            return match[0]
        return match[1] + posixpath.relpath(site_path(target), here or ".") + match[3]

    return "".join(piece if piece.startswith("```") else LINK.sub(link, piece) for piece in FENCE.split(text))


def _resolved(path: str, target: str) -> str | None:
    """Give the path in the repository that a relative link names; None for an address, and for what does not exist."""
    if "://" in target or target.startswith(("mailto:", "/")):
        return None
    found = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
    return found if (ROOT / found).exists() else None


def site_path(path: str) -> str:
    """Give where the site has a path of the repository."""
    if path.startswith(f"{DOCS}/"):
        return path.removeprefix(f"{DOCS}/")
    if (ROOT / path).is_dir():
        return f"{OUTSIDE}/{path}/index.md"
    if path.endswith("/README.md"):
        return f"{OUTSIDE}/{path.removesuffix('README.md')}index.md"
    return f"{OUTSIDE}/{path if path.endswith('.md') else path + '.md'}"


def repository_path(src_uri: str) -> str:
    """Give the path in the repository from which a page of the site comes."""
    if not src_uri.startswith(f"{OUTSIDE}/"):
        return f"{DOCS}/{src_uri}"
    path = src_uri.removeprefix(f"{OUTSIDE}/")
    folder = path.removesuffix("/index.md")
    if folder != path:
        return f"{folder}/README.md" if (ROOT / folder / "README.md").exists() else folder
    return path if (ROOT / path).exists() else path.removesuffix(".md")


def page_of(path: str) -> str:
    """Give the Markdown of a path outside of `docs/`: a page, a listing of a file, or the contents of a folder."""
    where = ROOT / path
    if where.is_dir():
        readme = where / "README.md"
        return readme.read_text(encoding="utf-8") if readme.exists() else _contents(where, path)
    text = where.read_text(encoding="utf-8")
    if path.endswith(".md"):
        return text
    assert len(text) <= MAX_LISTING, f"{path} is too long for a page; link to a folder, or name it without a link"
    return f"# `{path}`\n\n````{LANGUAGES.get(where.suffix, '')}\n{text.rstrip()}\n````\n"


def _contents(folder: Path, path: str) -> str:
    """Give every text file of a folder, one after the other: an example is read as a whole."""
    files = sorted(one for one in folder.iterdir() if one.suffix in LANGUAGES)
    listings = (page_of(f"{path}/{one.name}").replace("# ", "## ", 1) for one in files)
    return "\n".join([f"# `{path}/`\n", *listings])


def drawn(source: str, _language: str, _css: str, _options: Any, _md: Any, **_: Any) -> str:
    """Draw a Mermaid block, for pymdownx.superfences; the picture has a light ground, so it is readable in dark mode too."""
    title = TITLE.search(source)
    if title is None:
        raise SuperFencesException(f"a diagram has no accTitle, which is read to those who do not see it:\n{source}")
    try:
        svg = mmdr.render(source).svg()
    except ValueError as error:
        raise SuperFencesException(f"the diagram '{title[1]}' cannot be drawn: {error}") from error
    picture = base64.b64encode(svg.encode()).decode()
    return f'<p class="diagram"><img alt="{html.escape(title[1])}" src="data:image/svg+xml;base64,{picture}"></p>'
