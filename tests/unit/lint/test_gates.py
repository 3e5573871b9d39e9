"""Each gate of `make lint` finds what it is for, and lets pass what is right."""

from __future__ import annotations

import importlib

import pytest
from tests.lint import bounds, code, glossary, phrases, references
from tests.lint.__main__ import GATES
from tests.lint.sources import ROOT, Finding, Repository, Source

GLOSSARY = """
| term | meaning | not |
|---|---|---|
| increment | some replicas | `lump`, step |
| disruption | an announced end | `Doom`, `hands_on` |
"""
TERMS = glossary.terms_of(GLOSSARY)


def texts(findings: object) -> list[str]:
    assert hasattr(findings, "__iter__")
    return [finding.text for finding in findings if isinstance(finding, Finding)]


def python(text: str, path: str = "operator/elastipod_operator/core/one.py") -> Source:
    return Source(path, text)


def test_make_lint_runs_every_gate() -> None:
    modules = [importlib.import_module(f"tests.lint.{path.stem}") for path in (ROOT / "tests/lint").glob("[a-z]*.py")]
    assert {module for module in modules if hasattr(module, "check")} == set(GATES)


@pytest.mark.parametrize(
    "text",
    [
        "class AgentLump: ...",
        "def next_lump(): ...",
        "def f(lump): ...",
        "lump = 1",
        "LUMP_S = 1",
        "self.lump_of = 1",
        "is_hands_on = True",
    ],
)
def test_a_forbidden_term_is_found_in_every_kind_of_name(text: str) -> None:
    (found,) = glossary.forbidden_names(python(text), TERMS)
    assert "the glossary's term is:" in found.text


def test_a_forbidden_term_is_found_in_the_name_of_a_file() -> None:
    (found,) = glossary.forbidden_names(python("", "agent/elastipod/doom.py"), TERMS)
    assert (found.path, found.line) == ("agent/elastipod/doom.py", 1)
    assert "disruption" in found.text


@pytest.mark.parametrize(
    "text", ["doom = 1", "class Doomed: ...", "lumps = 1", "step = 1", "hands = on = 1", "use(thing.lump)", "plump = 1"]
)
def test_other_words_and_names_of_others_pass(text: str) -> None:
    assert not list(glossary.forbidden_names(python(text), TERMS))


def test_a_term_with_a_capital_is_forbidden_in_names_of_classes_also_of_tests() -> None:
    (found,) = glossary.forbidden_names(
        python("class NodeDoom: ...\ndoom = lump = 1", "tests/unit/core/test_x.py"), TERMS
    )
    assert "NodeDoom" in found.text


SPOKEN = glossary.spoken_terms_of(
    "| term | meaning | not |\n|---|---|---|\n| newcomer | one that joins | joiner, step, scaling (in names) |\n| pod | | `Doom` |"
)


def test_words_that_pages_do_not_say_are_the_plain_ones_without_another_meaning() -> None:
    assert dict(SPOKEN) == {"joiner": "newcomer"}


def test_a_forbidden_word_is_found_in_prose_and_not_in_code() -> None:
    text = "# Page\n\n```\na joiner\n```\nThe `joiner` is a field.\nA Joiner waits.\n"
    (found,) = glossary.forbidden_words(Source("docs/page.md", text), SPOKEN)
    assert (found.line, found.text) == (7, "the page says 'joiner'; the glossary's term is: newcomer")


def test_the_gate_reads_the_real_glossary() -> None:
    assert len(glossary.spoken_terms_of((ROOT / glossary.GLOSSARY).read_text())) >= 10
    terms = glossary.terms_of((ROOT / glossary.GLOSSARY).read_text())
    assert len(terms) > 10


def test_a_function_of_more_than_70_lines_is_found() -> None:
    body = "    x = 1\n"
    assert not list(code.long_functions(python("def f():\n" + body * 69)))
    (found,) = code.long_functions(python("def f():\n" + body * 70))
    assert "71 lines" in found.text


@pytest.mark.parametrize(
    "text",
    [
        "try:\n    f()\nexcept OSError:\n    pass",
        "for x in y:\n    try:\n        f()\n    except OSError:\n        continue",
        "try:\n    f()\nexcept Exception:\n    g()",
        "try:\n    f()\nexcept:\n    g()",
        "with suppress(Exception):\n    f()",
        "with contextlib.suppress(BaseException):\n    f()",
        "try:\n    f()\nexcept OSError:  # noqa: S110\n    pass",
    ],
)
def test_a_lost_exception_is_found(text: str) -> None:
    assert len(list(code.lost_exceptions(python(text)))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "try:\n    f()\nexcept OSError:\n    pass  # it has ended already",
        "try:\n    f()\nexcept Exception:  # the outer edge of a task\n    g()",
        "try:\n    f()\nexcept Exception:\n    undo()\n    raise",
        "try:\n    f()\nexcept OSError:\n    g()",
        "with suppress(OSError):\n    f()",
    ],
)
def test_exceptions_that_are_handled_or_explained_pass(text: str) -> None:
    assert not list(code.lost_exceptions(python(text)))


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("torch.empty(3, dtype=torch.uint8)", True),
        ("torch.full((2,), torch.nan)", True),
        ('torch.empty(3, device="cpu")', False),
        ("torch.zeros(3, device=each.device)", False),
        ("torch.empty_like(each)", False),
        ("numpy.zeros(3)", False),
        ("torch.Generator()", False),
    ],
)
def test_a_tensor_on_the_default_device_is_found(text: str, is_found: bool) -> None:
    assert bool(texts(code.tensors_on_the_default_device(python(text)))) is is_found


def test_two_classes_or_modules_of_one_family_that_share_a_name_are_found() -> None:
    sources = [
        python("class Status: ...", "operator/elastipod_operator/core/plan.py"),
        python("class Status: ...", "operator/elastipod_operator/kube/plan.py"),
        python("class Status: ...", "localcluster/elastipod_local/plan.py"),
    ]
    assert len(texts(code.shared_names(sources, set()))) == 2
    assert not texts(code.shared_names(sources, {"plan", "Status"}))


def test_private_classes_and_package_files_may_share_a_name() -> None:
    sources = [
        python("class _Status: ...", "operator/elastipod_operator/core/__init__.py"),
        python("class _Status: ...", "operator/elastipod_operator/kube/__init__.py"),
    ]
    assert not texts(code.shared_names(sources, set()))


@pytest.mark.parametrize(
    "text", ["see decision" + " 26", "(Decisions" + " 5, 6)", "spec" + " 40 item 1", "As 05-decisions" + " 3"]
)
def test_a_document_that_is_not_in_the_repository_is_found(text: str) -> None:
    assert len(texts(references.documents_outside(python(f"# {text}")))) == 1


@pytest.mark.parametrize(
    ("text", "stale"),
    [
        ("# see docs/design/gone.md", 1),
        ('"""See `core/gone.py`."""', 1),
        ("# gone.py does it", 1),
        ("# see docs/design/here.md and here.md", 0),
        ("# see design/here.md", 0),
        ("# https://example.com/docs/gone.md, /docs/gone.md, .run/gone.md, gen-<n>.md", 0),
        ('open("docs/gone.md")', 0),
    ],
)
def test_a_path_without_a_file_is_found_in_comments_and_docstrings(text: str, stale: int) -> None:
    repository = Repository([], ["docs/design/here.md", "operator/elastipod_operator/core/one.py"])
    assert len(texts(references.missing_files(python(text), repository))) == stale


@pytest.mark.parametrize(
    ("link", "broken"),
    [
        ("here.md", 0),
        ("../here.md", 1),
        ("here.md#what-it-does-in-30-s", 0),
        ("here.md#nothing", 1),
        ("#top", 0),
        ("#nothing", 1),
        ("https://example.com/x.md", 0),
    ],
)
def test_a_link_without_a_file_or_heading_is_found(link: str, broken: int) -> None:
    page = Source("docs/page.md", f"# Top\nSee [it]({link}).\n```\n[it](gone.md)\n```\n")
    here = Source("docs/here.md", "# Here\n## What `it` does, in 30 s\n")
    repository = Repository([page, here], ["docs/page.md", "docs/here.md"])
    assert len(texts(references.broken_links(page, repository))) == broken


def test_a_bound_that_is_on_one_side_only_is_found() -> None:
    page = Source(
        bounds.PAGE,
        "| replicas | 16 | `core.one.MAX_REPLICAS` | refused |\n| sizes | 4 | `core.one.MAX_GONE` | kept |\n",
    )
    module = python("MAX_REPLICAS, MAX_NEW = 16, 5\nMAX_OTHER: int = 1\nLEAST = 1")
    found = texts(bounds.compare(page, [module], frozenset({"core.one.MAX_OTHER"})))
    assert [text.split(";")[0] for text in found] == [
        "there is no constant core.one.MAX_GONE",
        "the limit core.one.MAX_NEW is not in the table of docs/design/bounds.md",
    ]


@pytest.mark.parametrize(
    "line",
    [
        "# all pods are made anew",
        "Whoever evicts it waits.",
        "others in wait are placed first",
        "a job with an own queue",
        '    message = f"{text} (and 1 replicas)"',
    ],
)
def test_a_phrase_that_is_never_right_is_found_with_what_to_write(line: str) -> None:
    (found,) = phrases.phrases(Source("docs/page.md", f"A first line.\n{line}\n"))
    assert found.line == 2
    assert "; write: " in found.text


@pytest.mark.parametrize(
    "line", ["all pods are recreated", "2.1 replicas", "21 replicas", "its own queue", "the manewver"]
)
def test_other_texts_pass(line: str) -> None:
    assert list(phrases.phrases(Source("docs/page.md", line))) == []


@pytest.mark.parametrize(
    ("path", "is_checked"), [("docs/page.md", True), ("CHANGELOG.md", False), ("tests/unit/a.py", False)]
)
def test_texts_of_the_product_are_checked_for_phrases(path: str, is_checked: bool) -> None:
    repository = Repository([Source(path, "made anew")], [path])
    assert bool(list(phrases.check(repository))) is is_checked
