"""Which jobs a release runs, what its lease says of that, and whose CRD it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elastipod_operator.api import crd
from elastipod_operator.core.names import ANNOTATION_CONTROLLER, ANNOTATION_SCOPE
from elastipod_operator.kube.scope import Scope, is_foreign, scope_of

ALL = Scope("one")
NAMED = Scope("one", controller="canary", only_named=True)


def job(controller: str | None) -> dict[str, Any]:
    return {"metadata": {"annotations": {} if controller is None else {ANNOTATION_CONTROLLER: controller}}}


@pytest.mark.parametrize(
    ("scope", "controller", "runs"),
    [
        pytest.param(ALL, None, True, id="a job that names nobody"),
        pytest.param(ALL, "", True, id="an empty name is none"),
        pytest.param(ALL, "elastipod", True, id="a job that names it"),
        pytest.param(ALL, "canary", False, id="a job of another controller"),
        pytest.param(NAMED, None, False, id="jobs without a name are another's"),
        pytest.param(NAMED, "canary", True, id="only jobs that name it"),
    ],
)
def test_who_runs_a_job(scope: Scope, controller: str | None, runs: bool) -> None:
    assert scope.holds(job(controller)) is runs


@pytest.mark.parametrize(
    ("one", "other", "shares"),
    [
        pytest.param(ALL, ALL, True, id="both run all jobs"),
        pytest.param(
            replace(ALL, namespaces=("a", "b")), replace(ALL, namespaces=("b",)), True, id="a namespace of both"
        ),
        pytest.param(replace(ALL, namespaces=("a",)), replace(ALL, namespaces=("b",)), False, id="other namespaces"),
        pytest.param(ALL, replace(ALL, namespaces=("b",)), True, id="one of them runs in all namespaces"),
        pytest.param(ALL, NAMED, False, id="other names, and one runs those that name it only"),
        pytest.param(
            ALL, replace(ALL, controller="canary"), True, id="other names, and jobs that name nobody are both's"
        ),
        pytest.param(NAMED, replace(NAMED, only_named=False), True, id="the same name"),
    ],
)
def test_two_releases_share_jobs(one: Scope, other: Scope, shares: bool) -> None:
    assert one.overlaps(other) is shares
    assert other.overlaps(one) is shares


@pytest.mark.parametrize("scope", [ALL, NAMED, replace(ALL, namespaces=("a", "b"))])
@pytest.mark.parametrize("leads", [False, True])
def test_a_lease_says_it_to_others(scope: Scope, leads: bool) -> None:
    assert scope_of({"metadata": {"annotations": scope.annotations(leads=leads)}}) == (scope, leads)


@pytest.mark.parametrize("annotations", [{}, {ANNOTATION_SCOPE: "{"}])
def test_a_lease_of_an_earlier_version_is_of_one_who_runs_all_jobs(annotations: dict[str, str]) -> None:
    scope, leads = scope_of({"metadata": {"annotations": annotations}})
    assert (scope.release, leads, scope.overlaps(ALL)) == ("", True, True)


def test_whose_crd_it_is() -> None:
    ours = crd.build()
    assert not is_foreign(ours)
    foreign = crd.build()
    del foreign["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["elastipod"]
    assert is_foreign(foreign)
    assert is_foreign({})
