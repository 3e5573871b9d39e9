"""The page of tested versions has the rows of the matrix, and the versions that the local cluster is made of."""

from __future__ import annotations

import pytest
from tests.e2e.test_matrix import PYTHONS, TORCHES
from tests.nonempty import every
from tests.unit.docs.pages import page

from elastipod_local.versions import KUBERNETES_VERSION, KUEUE_VERSION

PAGE = page("docs/reference/versions.md")


def rows(heading: str) -> list[list[str]]:
    _, *found = PAGE.table_rows(f"## {heading}")
    return found


def test_the_rows_are_those_of_the_matrix() -> None:
    assert tuple(python for python, *_ in rows("Python")) == PYTHONS
    assert {torch: python for torch, python, _ in rows("torch")} == TORCHES
    assert every("tested" in said for *_, said in rows("torch"))


@pytest.mark.parametrize(("heading", "version"), [("Kubernetes", KUBERNETES_VERSION), ("Kueue", KUEUE_VERSION)])
def test_the_tested_version_is_the_local_clusters(heading: str, version: str) -> None:
    minor = version.lstrip("v").rsplit(".", 1)[0]
    assert [number for number, said in rows(heading) if said.startswith("tested")] == [minor]
