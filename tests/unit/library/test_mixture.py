"""Weighted mixtures: the weights are met exactly, and every source is gone through pass by pass."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.library.sample_logs import Job, Sampler

from elastipod.audit.log_reader import read_logs
from elastipod.audit.report import AuditReport, audit
from elastipod.data import Batch, ElasticBatches
from elastipod.data.mixture import Mixture
from elastipod.data.shards import Shards
from elastipod.errors import DataError

WEIGHTS = st.lists(st.integers(1, 12), min_size=1, max_size=5)


@given(weights=WEIGHTS, rounds=st.integers(1, 12), epochs=st.integers(1, 3), data=st.data())
def test_weights_are_met_exactly_and_no_sample_is_two_passes_ahead(
    weights: list[int], rounds: int, epochs: int, data: st.DataObject
) -> None:
    sizes = {f"s{number}": data.draw(st.integers(1, 40)) for number in range(len(weights))}
    by_name = dict(zip(sizes, weights, strict=True))
    mixture = Mixture(sizes, by_name, samples=sum(weights) * rounds, seed=1)
    drawn = Counter(mixture.order(epoch)[position] for epoch in range(epochs) for position in range(len(mixture)))
    for name, size, draws in mixture.draws_by_source(epochs):
        counts = [drawn[index] for index in range(mixture.num_indices) if mixture.locate(index)[0] == name]
        assert (len(counts), sum(counts)) == (size, draws)
        assert draws * sum(weights) == by_name[name] * len(mixture) * epochs
        assert max(counts) - min(counts) <= 1


def test_every_stretch_of_the_order_is_mixed() -> None:
    mixture = Mixture({"much": 1000, "little": 1000}, {"much": 9, "little": 1}, samples=1000, seed=5)
    names = [mixture.locate(mixture.order(0)[position])[0] for position in range(1000)]
    for first in range(0, 1000, 10):
        assert names[first : first + 10].count("little") == 1
    assert len({tuple(names[first : first + 10]) for first in range(0, 1000, 10)}) > 5, "not always at the same place"


def test_sources_may_be_shards() -> None:
    mixture = Mixture({"files": Shards([5, 5], lanes=2), "rows": 4}, {"files": 5, "rows": 2}, samples=14, seed=0)
    drawn = sorted(mixture.order(0)[position] for position in range(14))
    assert drawn == list(range(14))
    assert mixture.locate(11) == ("rows", 1)


PLAN = ElasticBatches.over(Mixture({"a": 10, "b": 7}, {"a": 3, "b": 1}, samples=40, seed=2), 8)


def test_sources_named_in_another_order_are_another_mixture() -> None:
    sources = {name: Shards([10, 10], lanes=2) for name in ("a", "b")}
    weights = {"a": 1, "b": 1}
    plan = ElasticBatches.over(Mixture(sources, weights, samples=20), 4)
    other = ElasticBatches.over(Mixture(dict(reversed(sources.items())), weights, samples=20), 4)
    with pytest.raises(DataError, match=r"was saved with order \['a', 'b'\], but now it is \['b', 'a'\]"):
        other.resumed(plan.state_dict(2))


def audited(folder: Path, sampler: Sampler | None = None) -> AuditReport:
    job = Job(folder, PLAN, sampler)
    job.run(1, 2, range(1, 3))
    job.run(2, 3, range(3, 6), resumed_from=1, end="completed")
    return audit(read_logs(folder))


def test_the_audit_knows_what_a_mixture_must_hold(tmp_path: Path) -> None:
    report = audited(tmp_path)
    assert report.exact
    assert report.samples_expected == report.samples_unique == 40


def shifted(step: int, rank: int, world_size: int) -> Batch:
    """Another sampler: in one step it takes one sample of the first source instead of all its own."""
    batch = PLAN.batch(step, rank, world_size)
    return replace(batch, indices=(0,) * len(batch.indices)) if step == 4 else batch


def test_the_audit_finds_a_mixture_that_was_not_kept(tmp_path: Path) -> None:
    report = audited(tmp_path, shifted)
    assert not report.exact
    assert report.duplicates > 0
    assert report.missing > 0
    assert "trained more than once" in report.sentence


def test_a_mixture_is_no_source_of_another() -> None:
    """It has other indices than positions, so the samples of its sources would be taken for those of others."""
    web = Mixture({"en": 100, "de": 100}, {"en": 1, "de": 1}, samples=100)
    with pytest.raises(
        ValueError, match=r"^the source web is a mixture; give its sources here, with their weights mult"
    ):
        Mixture({"web": web, "code": 50}, {"web": 1, "code": 1}, samples=40)


def test_bad_mixtures_are_refused_with_numbers_that_work() -> None:
    with pytest.raises(ValueError, match="whole rounds of 4, such as 8 or 12"):
        Mixture({"a": 10, "b": 7}, {"a": 3, "b": 1}, samples=10)
    with pytest.raises(ValueError, match=r"the weight of b is 0\.5; weights are whole numbers"):
        Mixture({"a": 10, "b": 7}, {"a": 3, "b": 0.5}, samples=10)  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="sources are a, b, but there are weights for a"):
        Mixture({"a": 10, "b": 7}, {"a": 3}, samples=10)
    with pytest.raises(ValueError, match="the source b has no samples; leave it out"):
        Mixture({"a": 10, "b": 0}, {"a": 3, "b": 1}, samples=4)
    with pytest.raises(TypeError, match=r"the size of b is 'b\.txt'; it must be a whole number"):
        Mixture({"a": 10, "b": "b.txt"}, {"a": 3, "b": 1}, samples=4)  # type: ignore[dict-item]
    with pytest.raises(IndexError, match="sample 17 is outside"):
        Mixture({"a": 10, "b": 7}, {"a": 3, "b": 1}, samples=4).locate(17)
    with pytest.raises(IndexError, match="position 4 is outside"):
        Mixture({"a": 10, "b": 7}, {"a": 3, "b": 1}, samples=4).order(0)[4]
