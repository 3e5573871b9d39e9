"""The page of tested versions has the rows of the matrix, and the versions that the local cluster is made of."""

from __future__ import annotations

import re

import pytest
from tests import tested_versions
from tests.chart.foreign_kinds import CERT_MANAGER, PROMETHEUS_OPERATOR
from tests.e2e.test_matrix import PYTHONS, TORCHES
from tests.go_programs import offered_minors
from tests.nonempty import every, some
from tests.unit.docs.pages import page, pages

from elastipod_local.versions import KUBERNETES_VERSION, KUEUE_VERSION

PAGE = page("docs/reference/versions.md")
# A promise of a version, and what has to follow it at once.
PROMISE = re.compile(r"\b(Kubernetes|Kueue)\b[^\n.]*?(?:\]\(\S+\)[^\n.]*?)?(?<!install Kueue )\b\d\.\d+ or newer(.*)")
MARK = re.compile(r"[ ,(\[]+tested with (\d\.\d+ only|\d\.\d+(?:, \d\.\d+)* and \d\.\d+)")


def rows(heading: str) -> list[list[str]]:
    _, *found = PAGE.table_rows(f"## {heading}")
    return [[re.sub(r"<!-- .*? --> ", "", cell) for cell in row] for row in found]


def test_the_rows_are_those_of_the_matrix() -> None:
    assert tuple(python for python, *_ in rows("Python")) == PYTHONS
    assert {torch.split(",")[0]: python for torch, python, _ in rows("torch")} == TORCHES
    assert {minor for minor, _ in rows("Kubernetes")} >= {*offered_minors()}


def test_the_states_are_those_of_the_reports() -> None:
    """All but that of what `make test` itself runs on; there is a place for each version that is kept."""
    kept = tested_versions.read()
    assert tested_versions.filled(PAGE.text, kept) == PAGE.text
    places = set(some(re.findall(r"<!-- (\S+) (\S+) -->", PAGE.text)))
    assert {(kind, version) for kind, versions in kept.items() for version in versions} <= places
    assert every(f"<!-- torch {torch} -->" in PAGE.text for torch in [*TORCHES][:-1])


MATRIX = {
    "commit": "abc",
    "counts": {
        "torch 2.6.1, python 3.13: drained and continued": 1,
        "torch 2.6.1, python 3.13: in memory, 2 to 3 to 1": 150000,
        "torch 2.7.0, python 3.10: drained and continued": 1,
        "python 3.14: elastipod-agent installed": 1,
        "python 3.14: operator installed": 1,
    },
}
CLUSTERS = {
    "commit": "def",
    "counts": {
        **{f"kubernetes 1.35.4, kueue 0.16.1: tests/{tier}": 10 for tier in ("api", "chart", "e2e")},
        "kubernetes 1.36.3, kueue 0.17.0: tests/api": 10,
    },
}


def test_a_report_is_kept_and_half_of_one_is_not() -> None:
    before = {"torch": {"2.5": {"python": "3.12", "commit": "old"}, "2.6": {"python": "3.13", "commit": "old"}}}
    kept = tested_versions.with_reports(before, {"matrix": MATRIX, "kubernetes": CLUSTERS})
    assert kept["torch"] == {
        "2.5": {"python": "3.12", "commit": "old"},
        "2.6": {"python": "3.13", "commit": "abc"},
    }
    assert kept["elastipod-agent"] == {"3.14": {"commit": "abc"}}
    assert "elastipod" not in kept
    text = "| <!-- kubernetes 1.35 --> x |\n| <!-- kubernetes 1.36 --> x |\n| <!-- kueue 0.16 --> x |"
    assert tested_versions.filled(text, kept).splitlines() == [
        "| <!-- kubernetes 1.35 --> 30 tests passed on 1.35.4 with Kueue 0.16.1, at def |",
        "| <!-- kubernetes 1.36 --> untested |",
        "| <!-- kueue 0.16 --> 30 tests passed on 0.16.1 with Kubernetes 1.35.4, at def |",
    ]


@pytest.mark.parametrize(("heading", "version"), [("Kubernetes", KUBERNETES_VERSION), ("Kueue", KUEUE_VERSION)])
def test_the_tested_version_is_the_local_clusters(heading: str, version: str) -> None:
    minor = version.lstrip("v").rsplit(".", 1)[0]
    assert [number for number, said in rows(heading) if said.startswith("tested")] == [minor]


def minor_of(version: str) -> str:
    return version.lstrip("v").rsplit(".", 1)[0]


def in_words(local: str, kept: dict[str, dict[str, object]]) -> str:
    """Say which minor versions are tested: that of the local cluster, and those of which a report is kept."""
    *others, last = sorted({minor_of(local), *kept}, key=lambda minor: int(minor.split(".")[1]))
    return f"{', '.join(others)} and {last}" if others else f"{last} only"


def words_of_reports() -> dict[str, str]:
    kept = tested_versions.read()
    local = {"Kubernetes": KUBERNETES_VERSION, "Kueue": KUEUE_VERSION}
    return {name: in_words(version, kept.get(name.lower(), {})) for name, version in local.items()}


TESTED = words_of_reports()


def unmarked(text: str) -> list[str]:
    """Give the promises of a text that do not say at once which version is tested."""
    found = []
    for promise in PROMISE.finditer(text):
        mark = MARK.match(promise[2])
        if mark is None or mark[1] != TESTED[promise[1]]:
            found.append(promise[0])
    return found


@pytest.mark.parametrize(
    ("kept", "words"), [((), "1.34 only"), (("1.35",), "1.34 and 1.35"), (("1.36", "1.33"), "1.33, 1.34 and 1.36")]
)
def test_versions_in_words(kept: tuple[str, ...], words: str) -> None:
    assert in_words("v1.34.2", {minor: {} for minor in kept}) == words


def test_every_promise_of_a_version_says_which_one_is_tested() -> None:
    promising = {one.path: one.text for one in pages() if one != PAGE and PROMISE.search(one.text)}
    assert len(promising) >= 7
    assert {path: found for path, text in promising.items() if (found := unmarked(text))} == {}
    assert [path for path, text in promising.items() if "reference/versions.md" not in text] == []


@pytest.mark.parametrize(
    "text",
    [
        "Elastipod needs Kubernetes 1.30 or newer.",
        "With [Kueue](https://kueue.sigs.k8s.io) 0.15 or newer, a job",
        "| Kueue | 0.15 or newer, tested with 0.14 only |",
    ],
)
def test_a_promise_without_its_mark_is_found(text: str) -> None:
    assert len(unmarked(text)) == 1


def test_the_other_projects_are_those_whose_crds_are_served() -> None:
    told = " ".join(project for project, _ in some(rows("cert-manager and the Prometheus operator")))
    for kinds in (CERT_MANAGER, PROMETHEUS_OPERATOR):
        assert minor_of(kinds.module.partition("@")[2]) in told, kinds.module
