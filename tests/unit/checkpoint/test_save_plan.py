"""Who copies and who writes what: nothing is left out, nothing is written twice, whoever holds it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.checkpoint.save_plans import make_save_plan

from elastipod.checkpoint.save_plan import ALIGNMENT, Chunk, LocalState, SavePlan, choose_copy_holders, divide_images
from elastipod.checkpoint.value_codec import decode_value, encode_value


def chunk(key: str, start: int, length: int, total: int) -> Chunk:
    return Chunk(key, (key,), "float32", (total,), (start,), (length,), 4 * length)


@st.composite
def local_states(draw: st.DrawFn) -> list[LocalState]:
    """Ranks on nodes; each tensor is either the same everywhere or cut over the ranks."""
    world = draw(st.integers(1, 6))
    nodes = [f"n{draw(st.integers(0, 3))}" for _ in range(world)]
    chunks: list[list[Chunk]] = [[] for _ in range(world)]
    for number in range(draw(st.integers(1, 6))):
        size = draw(st.integers(1, 40))
        if draw(st.booleans()):
            for own in chunks:
                own.append(chunk(f"t{number}", 0, size, size))
        else:
            edges = [size * rank // world for rank in range(world + 1)]
            for rank, own in enumerate(chunks):
                if edges[rank] < edges[rank + 1]:
                    own.append(chunk(f"t{number}", edges[rank], edges[rank + 1] - edges[rank], size))
    return [
        LocalState(node, tuple(own), (("v", ("v",)), (f"random.{rank}", ("random", str(rank)))))
        for rank, (node, own) in enumerate(zip(nodes, chunks, strict=True))
    ]


@given(local_states(), st.booleans())
def test_everything_is_written_once_and_kept_once_per_node(ranks: list[LocalState], is_in_memory: bool) -> None:
    plan = make_save_plan(ranks, is_in_memory=is_in_memory)
    places = {each.index for own in ranks for each in own.chunks}
    assert Counter(each.index for each in plan.chunks) == Counter(places)
    written = [number for rank in range(len(ranks)) for number in plan.written_by(rank)]
    assert sorted(written) == list(range(len(places)))
    for each, stagers, writer in zip(plan.chunks, plan.stagers, plan.writers, strict=True):
        holders = [rank for rank, own in enumerate(ranks) if each in own.chunks]
        assert writer in stagers
        assert set(stagers) <= set(holders)
        by_node = Counter(ranks[rank].node for rank in stagers)
        if is_in_memory:
            assert by_node == Counter({ranks[rank].node for rank in holders})
        else:
            assert stagers == (writer,)
    assert sorted(key for rank in range(len(ranks)) for key in plan.values_of(rank)) == sorted(
        ["v", *(f"random.{rank}" for rank in range(len(ranks)))]
    )
    assert plan.is_covered_by(range(len(ranks)))
    assert SavePlan.from_json(plan.to_json()) == plan


@given(local_states())
def test_an_image_holds_its_chunks_side_by_side(ranks: list[LocalState]) -> None:
    plan = make_save_plan(ranks, is_in_memory=True)
    assert plan.image_sizes() == [plan.layout(rank)[1] for rank in range(len(ranks))]
    for rank in range(len(ranks)):
        positions, size = plan.layout(rank)
        end = 0
        for number, start in positions.items():
            assert start >= end
            assert start % ALIGNMENT == 0
            end = start + plan.chunks[number].num_bytes
        assert end <= size


@given(local_states())
def test_what_a_lost_node_would_take_along_is_known(ranks: list[LocalState]) -> None:
    plan = make_save_plan(ranks, is_in_memory=True)
    holders = {
        source: holder
        for source, holder in choose_copy_holders(plan.nodes, [""] * len(ranks)).items()
        if source in plan.unreplicated_ranks()
    }
    for lost in set(plan.nodes):
        there = [rank for rank, node in enumerate(plan.nodes) if node != lost]
        copies = [source for source, holder in holders.items() if plan.nodes[holder] != lost]
        if there:
            assert plan.is_covered_by([*there, *copies])


@given(local_states(), st.data())
def test_images_are_divided_over_the_ranks_whose_nodes_have_them(ranks: list[LocalState], data: st.DataObject) -> None:
    plan = make_save_plan(ranks, is_in_memory=True)
    nodes = data.draw(st.lists(st.sampled_from(["n0", "n1", "new"]), min_size=1, max_size=6))
    holders = {rank: data.draw(st.lists(st.sampled_from(nodes), unique=True)) for rank in range(len(ranks))}
    for stagers in plan.stagers.sets:
        if not any(holders[rank] for rank in stagers):
            holders[stagers[0]] = [nodes[0]]
    again = divide_images(plan, holders, nodes, ["v", "random.0"])
    assert again.nodes == tuple(nodes)
    assert again.chunks == plan.chunks
    for stagers, former, writer in zip(again.stagers, plan.stagers, again.writers, strict=True):
        having = {node for rank in former for node in holders[rank]}
        assert [nodes[rank] in having for rank in range(len(nodes))] == [rank in stagers for rank in range(len(nodes))]
        assert writer in stagers
    assert again.values_of(0) == [key for key, *_ in plan.values if key in ("v", "random.0")]
    assert all(again.values_of(rank) == [] for rank in range(1, len(nodes)))
    assert again.is_covered_by(range(len(nodes)))


def test_ranks_that_have_the_same_images_write_as_much_of_them() -> None:
    tensors = tuple(chunk(f"t{number}", 0, 10, 10) for number in range(6))
    plan = make_save_plan([LocalState("n0", tensors, ())], is_in_memory=True)
    again = divide_images(plan, {0: ["n0", "n2"]}, ["n0", "n1", "n0", "n2"], [])
    assert [len(again.written_by(rank)) for rank in range(4)] == [2, 0, 2, 2]
    assert again.unreplicated_ranks() == set()
    alone = divide_images(plan, {0: ["n0"]}, ["n0", "n1", "n0"], [])
    assert alone.unreplicated_ranks() == {0}, "the loss of n0 would lose it"


def test_different_tensors_of_one_name_are_refused() -> None:
    ranks = [LocalState("a", (chunk("w", 0, size, size),), ()) for size in (3, 4)]
    with pytest.raises(ValueError, match="different tensors under the name w"):
        make_save_plan(ranks, is_in_memory=False)


@pytest.mark.parametrize(
    ("nodes", "domains", "wanted"),
    [
        pytest.param("aabb", ["", "", "", ""], {0: 2, 1: 3, 2: 0, 3: 1}, id="the other node, rank by rank"),
        pytest.param("abcd", [""] * 4, {0: 2, 1: 3, 2: 0, 3: 1}, id="half-way round the ring"),
        pytest.param("abcd", list("xyxy"), {0: 3, 1: 0, 2: 1, 3: 2}, id="in another domain"),
        pytest.param("aaaa", [""] * 4, {}, id="one node has no partner"),
        pytest.param("ab", list("xx"), {0: 1, 1: 0}, id="another node of the same domain is better than none"),
    ],
)
def test_partners(nodes: str, domains: list[str], wanted: dict[int, int]) -> None:
    assert choose_copy_holders(list(nodes), domains) == wanted


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        0.1,
        float("inf"),
        "x",
        [1, (2, "y")],
        {"a": {"b": (0.9, 0.999)}},
        {2: 1},
        Counter({2: 1, 4: 1}),
        {"__tuple__": 1},
    ],
)
def test_values_come_back_as_they_were(value: object) -> None:
    found = decode_value(encode_value(value, "it"))
    assert found == value
    assert type(found) is type(value)


def test_what_cannot_be_kept_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"options\.hook\[1\] is an object; only tensors and plain values can be saved"
    ):
        encode_value({"hook": [1, object()]}, "options")
