"""Sizes with model parallelism: exactly those whose ranks form whole model groups, and whose batch plan exists."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.nonempty import every

from elastipod.batches.batch_plan import plan_batch
from elastipod.errors import BatchSizeError
from elastipod.parallelism import Parallelism
from elastipod_operator.api import JobSpec
from elastipod_operator.core.model_groups import ModelGroups
from elastipod_operator.core.quota import quota_requests_of
from elastipod_operator.core.sizes import SizeError, SizeRequest, resolve
from elastipod_operator.kube.job_policy import policy_of
from elastipod_operator.sizes_command import BatchRule, UnusableFile, size_rows


def request(replicas: int = 0, most: int | None = None, *, groups: ModelGroups, **policy: Any) -> SizeRequest:
    return SizeRequest(spec_replicas=(replicas,), spec_max_replicas=(most,), elastic=True, groups=groups, **policy)


@pytest.mark.parametrize(
    ("wish", "allowed", "start"),
    [
        pytest.param(request(2, 8, groups=ModelGroups(16, 8)), (2, 4, 6, 8), 2, id="two pods hold a group"),
        pytest.param(request(1, 4, groups=ModelGroups(4, 8)), (1, 2, 3, 4), 1, id="a pod holds two groups"),
        pytest.param(request(1, 8, groups=ModelGroups(12, 8)), (3, 6), 3, id="three pods hold two groups"),
        pytest.param(request(3, 9, groups=ModelGroups(4, 2)), (4, 6, 8), 4, id="the minimum is the next whole size"),
        pytest.param(request(2, 20, step=3, groups=ModelGroups(4, 2)), (2, 8, 14, 20), 2, id="every second step is whole"),
        pytest.param(request(1, 16, values=(1, 2, 3, 4, 6, 8, 16), groups=ModelGroups(32, 8)), (4, 8, 16), 4, id="values"),
        pytest.param(request(2, 8, groups=ModelGroups(16, 8), ceiling=5), (2, 4), 2, id="a ceiling between two sizes"),
        pytest.param(SizeRequest((16,), (None,), groups=ModelGroups(256, 32)), (16,), 16,
                     id="the documents' 32 x 8 x 2: 512 cores on 16 nodes"),
        pytest.param(request(1, 10_000, groups=ModelGroups(16, 8)), range(2, 10_001, 2), 2, id="as many as can be"),
    ],
)  # fmt: skip
def test_only_sizes_of_whole_model_groups_are_left(wish: SizeRequest, allowed: Any, start: int) -> None:
    sizes = resolve(wish)
    assert (tuple(sizes.allowed), sizes.start) == (tuple(allowed), start)
    assert len(sizes.allowed) <= 64 or isinstance(sizes.allowed, range), "no list of thousands is kept"


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        pytest.param(SizeRequest((3,), (None,), groups=ModelGroups(4, 2)),
                     ("3 replicas of 2 workers make 6 ranks, no multiple of the 4", "sizes that fit: 2, 4, 6"), id="a fixed size"),
        pytest.param(request(1, 5, values=(1, 3, 5), groups=ModelGroups(16, 8)), ("1 replica of 8 workers", "fit: 2, 4"), id="values"),
        pytest.param(request(2, 3, groups=ModelGroups(32, 8)), ("2 replicas of 8 workers", "sizes that fit: 4, 8"), id="bounds"),
        pytest.param(request(3, 9, step=2, groups=ModelGroups(4, 2)), ("3 replicas", "sizes that fit: 2, 4"), id="steps between"),
        pytest.param(request(2, 4, groups=ModelGroups(4, None)), ("parallelism is 4", "spec.nprocPerNode as a number"), id="auto"),
    ],
)  # fmt: skip
def test_a_size_that_splits_a_group_is_refused_with_those_that_fit(wish: SizeRequest, words: tuple[str, ...]) -> None:
    with pytest.raises(SizeError) as refusal:
        resolve(wish)
    assert every(word in str(refusal.value) for word in words), str(refusal.value)


def test_a_wish_that_is_left_out_is_told() -> None:
    told = resolve(request(2, 8, values=(2, 3, 8), groups=ModelGroups(16, 8))).warnings
    assert "of the sizes [2, 3, 8] the job uses [2, 8]: 3 replicas of 8 workers make 24 ranks" in " ".join(told)
    assert not resolve(request(2, 8, groups=ModelGroups(16, 8))).warnings, "nobody wished for the sizes in between"


def test_a_queue_is_asked_for_whole_groups() -> None:
    template = {"spec": {"containers": [{"name": "trainer", "image": "train:1"}]}}
    spec = {
        "nprocPerNode": "8",
        "elasticPolicy": {"minReplicas": 1, "maxReplicas": 7},
        "replicaSpecs": [{"name": "pods", "replicas": 1, "template": template}],
        "elastipod": {"parallelism": 16},
    }
    requests = quota_requests_of(policy_of(JobSpec.model_validate(spec)))
    assert [dict(request.counts) for request in requests] == [{"pods": 2}] * 3


axis = st.sampled_from([1, 2, 3, 4, 8])


@st.composite
def jobs(draw: st.DrawFn) -> tuple[dict[str, Any], tuple[int, ...], int]:
    """Give a job, the sizes that it allows without regard to groups, and its workers per pod."""
    least, nproc = draw(st.integers(1, 6)), draw(st.sampled_from([1, 2, 3, 4, 6, 8, 32]))
    most = least + draw(st.integers(0, 20))
    policy: dict[str, Any] = {"minReplicas": least, "maxReplicas": most}
    kind = draw(st.sampled_from(["fixed", "each", "step", "values"]))
    sizes = tuple(range(least, most + 1))
    if kind == "step":
        policy["replicaIncrementStep"] = step = draw(st.integers(1, 5))
        sizes = tuple(range(least, most + 1, step))
    elif kind == "values":
        values = draw(st.lists(st.integers(1, 26), min_size=1, max_size=6))
        policy["replicaDiscreteValues"] = [*values, least]
        sizes = tuple(sorted({value for value in (*values, least) if least <= value <= most}))
    elif kind == "fixed":
        sizes = (least,)
    template = {"spec": {"containers": [{"name": "trainer", "image": "train:1"}]}}
    spec: dict[str, Any] = {
        "nprocPerNode": str(nproc),
        "replicaSpecs": [{"name": "pods", "replicas": least, "template": template}],
    }
    if kind != "fixed":
        spec["elasticPolicy"] = policy
    return {"metadata": {"name": "job"}, "spec": spec}, sizes, nproc


def has_batch(ranks: int, global_batch: int, parallelism: Parallelism, *, even: bool) -> bool:
    """Ask the library whether a world trains a batch; all ranks of a model-parallel group have the same samples."""
    try:
        parallelism.groups(ranks)
        plan_batch(global_batch, ranks, even=even, model_parallel=parallelism.model_group // parallelism.shard)
    except BatchSizeError:
        return False
    return True


@given(jobs(), axis, axis, axis, axis, st.integers(1, 200), st.booleans())
def test_the_sizes_are_those_whose_groups_are_whole_and_whose_batch_exists(
    job: tuple[dict[str, Any], tuple[int, ...], int],
    tensor: int,
    pipeline: int,
    context: int,
    shard: int,
    global_batch: int,
    even: bool,
) -> None:
    body, sizes, nproc = job
    parallelism = Parallelism(tensor, pipeline, context, shard)
    body["spec"]["elastipod"] = {"parallelism": parallelism.model_group}
    expected = [size for size in sizes if has_batch(size * nproc, global_batch, parallelism, even=even)]
    try:
        _, rows = size_rows(body, BatchRule(global_batch, even, shard))
    except UnusableFile:
        rows = []
    assert [row.replicas for row in rows] == expected
    for row in rows:
        assert row.workers == row.replicas * nproc
        assert row.groups == parallelism.groups(row.workers)


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 64))
def test_tensor_parallelism_divides_heads_and_key_value_heads(tensor: int, kv_heads: int, share: int) -> None:
    heads = kv_heads * share
    try:
        replication = Parallelism(tensor).check_heads(heads, kv_heads)
    except BatchSizeError as refusal:
        fitting = [int(size) for size in str(refusal).rpartition("fit: ")[2].split(", ")]
        assert tensor not in fitting
        assert every(Parallelism(size).check_heads(heads, kv_heads) for size in fitting)
        return
    assert heads % tensor == 0
    assert kv_heads * replication % tensor == 0, "every rank has as many key/value heads as any other"
    assert replication == 1 or replication == tensor // kv_heads, "replicated no more than needed"


def test_the_documents_model_of_32_heads_and_8_key_value_heads() -> None:
    assert Parallelism(tensor=32, pipeline=8).data_parallel(512) == 2, "their 32 x 8 x 2"
    assert [Parallelism(tensor).check_heads(32, 8) for tensor in (1, 8, 16, 32)] == [1, 1, 2, 4]
    with pytest.raises(BatchSizeError, match=r"of 12 does not divide 32 heads .*; sizes that fit: 1, 2, 4, 8, 16, 32$"):
        Parallelism(12).check_heads(32, 8)


@pytest.mark.parametrize(
    ("axes", "world", "said"),
    [
        ({"tensor": 2, "pipeline": 2}, 6, r"6 ranks form no whole model groups of 4 \(tensor 2 x pipeline 2\); .* 4, 8.*parallelism: 4 "),
        ({"tensor": 8, "shard": 2}, 8, r"8 ranks form no whole model groups of 16 \(tensor 8 x shard 2\); .* 16, 32"),
    ],
)  # fmt: skip
def test_a_world_that_splits_a_group_is_refused_with_those_that_fit(
    axes: dict[str, int], world: int, said: str
) -> None:
    with pytest.raises(BatchSizeError, match=said):
        Parallelism(**axes).data_parallel(world)


@pytest.mark.parametrize("value", [0, -1, 2.0, True, "2"])
def test_an_axis_that_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(BatchSizeError, match=r"pipeline is .*; it must be a whole number of at least 1"):
        Parallelism(pipeline=value)


def test_the_sizes_around_a_wish_are_named() -> None:
    assert ModelGroups(2, 1).near(20) == "14, 16, 18, 20, 22, 24"
    assert ModelGroups(2, 1).near(1) == "2, 4, 6, 8, 10, 12"


def test_a_pod_has_one_worker_where_their_number_is_not_known() -> None:
    assert ModelGroups(4).why_not(3).startswith("3 replicas of 1 worker make 3 ranks, no multiple of the 4 of")
