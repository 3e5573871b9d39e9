"""Allowed sizes: what users write, in all the ways they write it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.nonempty import every

from elastipod_operator.core.sizes import SizeError, SizeRequest, Sizes, resolve


def request(replicas: int = 0, most: int | None = None, **policy: Any) -> SizeRequest:
    return SizeRequest(spec_replicas=(replicas,), spec_max_replicas=(most,), elastic=True, **policy)


@pytest.mark.parametrize(
    ("wish", "allowed", "start"),
    [
        pytest.param(SizeRequest((3,), (None,)), (3,), 3, id="without a policy the size is fixed"),
        pytest.param(SizeRequest((0,), (None,)), (1,), 1, id="without any replicas one is meant"),
        pytest.param(SizeRequest((2, 1), (None, None)), (3,), 3, id="specs add up"),
        pytest.param(request(2, 4), (2, 3, 4), 2, id="a missing minimum is the sum of replicas, the step one"),
        pytest.param(request(0, 4), (1, 2, 3, 4), 1, id="a missing minimum is at least one"),
        pytest.param(request(2, 8, min_replicas=1, step=1, values=(2, 4, 8)), (2, 4, 8), 2,
                     id="the documents' sample: values win over the step"),
        pytest.param(request(1, None, max_replicas=4, step=1, values=(2, 4, 8)), (2, 4), 2,
                     id="the documents' sample: values are clipped to the maximum"),
        pytest.param(request(1, 8, values=(2, 4, 8)), (2, 4, 8), 2, id="the client's job: no minimum, replicas below the values"),
        pytest.param(request(2, 8, min_replicas=4, max_replicas=8, values=(2, 4, 8, 16)), (4, 8), 4,
                     id="the recipe: values outside of the range, replicas below the minimum"),
        pytest.param(request(4, 8, values=(8, 4, 4, 6)), (4, 6, 8), 4, id="values are sorted, each once"),
        pytest.param(request(2, 9, min_replicas=2, step=3), (2, 5, 8), 2, id="sizes are the minimum and steps from there"),
        pytest.param(request(4, 9, min_replicas=2, step=3), (2, 5, 8), 2, id="replicas between two sizes round down"),
        pytest.param(request(2, 4, max_replicas=9), (2, 3, 4), 2, id="a stated maximum of the specs binds"),
        pytest.param(request(2, 9, max_replicas=4), (2, 3, 4), 2, id="a smaller maximum of the policy binds"),
        pytest.param(request(2, None, max_replicas=4), (2, 3, 4), 2, id="the policy's maximum alone is meant"),
        pytest.param(request(2, 8, ceiling=5), (2, 3, 4, 5), 2, id="a ceiling cuts the sizes above it"),
        pytest.param(request(6, 8, min_replicas=2, ceiling=4), (2, 3, 4), 4, id="a ceiling bounds the start too"),
        pytest.param(request(2, 8, ceiling=99), (2, 3, 4, 5, 6, 7, 8), 2, id="a ceiling above the maximum changes nothing"),
        pytest.param(SizeRequest((2, 0), (None, 2), elastic=True), (2, 3, 4), 2, id="base and extra: the base is the minimum"),
        pytest.param(request(2, 2), (2,), 2, id="a minimum that is the maximum is one size"),
        pytest.param(request(0, 0), (1,), 1, id="a maximum of nothing that nobody insists on is one"),
    ],
)  # fmt: skip
def test_allowed_sizes(wish: SizeRequest, allowed: tuple[int, ...], start: int) -> None:
    sizes = resolve(wish)
    assert (sizes.allowed, sizes.start) == (allowed, start)
    assert (sizes.minimum, sizes.maximum) == (allowed[0], allowed[-1])


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        pytest.param(request(2, None, min_replicas=6, max_replicas=4), ("minReplicas is 6", "maximum is 4"),
                     id="a minimum above the maximum"),
        pytest.param(request(2, 8, values=(16, 32)), ("replicaDiscreteValues [16, 32]", "minimum 2", "maximum 8"),
                     id="no value inside of the range"),
        pytest.param(request(2, 8, ceiling=1), ("spec.replicas is 1", "smallest allowed size 2", "0 for no ceiling"),
                     id="a ceiling below the minimum"),
        pytest.param(SizeRequest((4,), (None,), ceiling=2), ("spec.replicas is 2", "size 4"), id="a ceiling on a fixed size"),
        pytest.param(request(0, 0, min_replicas=0, max_replicas=0), ("minReplicas is 1", "maximum is 0"), id="a maximum of nothing"),
        pytest.param(request(2, 8, step=0), ("replicaIncrementStep is 0", "1 or more"), id="a step of nothing"),
    ],
)  # fmt: skip
def test_a_refusal_names_fields_and_figures(wish: SizeRequest, words: tuple[str, ...]) -> None:
    with pytest.raises(SizeError) as refusal:
        resolve(wish)
    assert every(word in str(refusal.value) for word in words), str(refusal.value)


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        pytest.param(request(2, 9, step=4), ("maxReplicas 9", "steps of 4", "largest size is 6"), id="an unreachable maximum"),
        pytest.param(request(2, 8, step=1, values=(2, 8)), ("replicaDiscreteValues is used",), id="step and values"),
        pytest.param(request(3, 8, values=(2, 8), min_replicas=2), ("starts at 2", "[2, 8]"), id="replicas off the grid"),
        pytest.param(request(2, 8, ceiling=20), ("spec.replicas is 20", "largest size 8", "maxReplicas"), id="a ceiling above the maximum"),
        pytest.param(SizeRequest((3,), (None,), ceiling=4), ("spec.replicas is 4", "largest size 3"), id="a ceiling above a fixed size"),
        pytest.param(request(2, 4, max_replicas=9), ("maxReplicas is 9", "add up to 4"), id="two maxima"),
    ],
)  # fmt: skip
def test_what_is_odd_is_said(wish: SizeRequest, words: tuple[str, ...]) -> None:
    told = " ".join(resolve(wish).warnings)
    assert every(word in told for word in words), told


def test_what_is_odd_is_said_under_a_ceiling_too() -> None:
    assert resolve(request(2, 9, step=4)).warnings == resolve(request(2, 9, step=4, ceiling=6)).warnings
    assert resolve(SizeRequest((3,), (None,))).warnings == ()


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        pytest.param(8, "[16, 17, 18, 19, 20, 21, 22, 23]", id="eight are listed"),
        pytest.param(9, "[16, 17, ..., 24]", id="of nine the first two and the last"),
    ],
)
def test_long_lists_of_sizes_are_shortened(number: int, shown: str) -> None:
    with pytest.raises(SizeError) as refusal:
        resolve(request(2, 8, values=tuple(range(16, 16 + number))))
    assert f"replicaDiscreteValues {shown} holds no size" in str(refusal.value)


def test_each_spec_needs_its_maximum() -> None:
    with pytest.raises(ValueError, match="shorter"):
        resolve(SizeRequest((1, 2), (None,), elastic=True))


@given(
    low=st.none() | st.integers(0, 40), high=st.none() | st.integers(0, 60), step=st.none() | st.integers(1, 9),
    values=st.lists(st.integers(1, 60), max_size=6), replicas=st.integers(0, 50), most=st.none() | st.integers(0, 60),
    ceiling=st.integers(0, 60),
)  # fmt: skip
def test_sizes_are_ascending_bounded_and_startable(
    low: int | None,
    high: int | None,
    step: int | None,
    values: list[int],
    replicas: int,
    most: int | None,
    ceiling: int,
) -> None:
    wish = request(
        replicas, most, min_replicas=low, max_replicas=high, step=step, values=tuple(values), ceiling=ceiling
    )  # fmt: skip
    try:
        sizes = resolve(wish)
    except SizeError:
        return
    assert list(sizes.allowed) == sorted(set(sizes.allowed))
    assert sizes.minimum >= max(1, low or 0)
    assert high is None or sizes.maximum <= max(1, high)
    assert not ceiling or sizes.maximum <= ceiling
    assert sizes.start in sizes.allowed
    assert not values or set(sizes.allowed) <= set(values)


@given(st.sets(st.integers(1, 100), min_size=1), st.integers(0, 120))
def test_fit_gives_the_largest_size_that_fits(sizes: set[int], available: int) -> None:
    allowed = tuple(sorted(sizes))
    fitting = [size for size in allowed if size <= available]
    assert Sizes(allowed, allowed[0]).fit(available) == (fitting[-1] if fitting else 0)


@pytest.mark.parametrize(
    ("request_", "bound"),
    [
        ({"elastic": True, "min_replicas": 1, "max_replicas": 8}, "spec.elasticPolicy.maxReplicas=8"),
        ({"elastic": True, "min_replicas": 1, "max_replicas": 8, "ceiling": 4}, "spec.replicas=4 (kubectl scale)"),
        ({"elastic": True, "min_replicas": 1, "max_replicas": 8, "ceiling": 9}, "spec.elasticPolicy.maxReplicas=8"),
        ({"elastic": True, "min_replicas": 1, "values": (1, 2)}, "spec.elasticPolicy.replicaDiscreteValues"),
        ({"elastic": True, "min_replicas": 1}, "spec.replicaSpecs[], which add up to 2"),
        ({}, "spec.replicaSpecs[].replicas without an elasticPolicy"),
    ],
)
def test_the_field_that_sets_the_maximum_is_known(request_: dict[str, Any], bound: str) -> None:
    assert resolve(SizeRequest(spec_replicas=(2,), spec_max_replicas=(None,), **request_)).bound == bound
