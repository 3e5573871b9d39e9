"""Publishing a copy of the state: the image goes to the holder of its copy once all ranks have theirs, and only then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from elastipod.checkpoint.communicator import RanksLost
from elastipod.checkpoint.image_header import ImageHeader
from elastipod.checkpoint.manifest import CheckpointId
from elastipod.checkpoint.staging import Staging


class Published:
    """The staging of a single rank, with a directory and copies that note what they are given. told: what all ranks said."""

    def __init__(self, *, holders: dict[int, int], told: str | None = None, error: OSError | None = None) -> None:
        self.parts = mock.MagicMock()
        self.parts.directory.publish.side_effect = error
        self.parts.copies.holders.return_value = holders
        self.told = told
        self.staging: Any = object.__new__(Staging)
        self.staging.__dict__.update(
            directory=self.parts.directory, durable=None, _copies=self.parts.copies, _headers={}, _domains=["x"],
            _saves=3, _newest_complete=None,
        )  # fmt: skip
        plan = mock.Mock(digest="d" * 32, chunks=["a chunk"])
        plan.layout.return_value = ({0: 64}, 128)
        image = mock.Mock(size=128)
        image.sums.return_value = ""
        self.staged: Any = mock.Mock(
            id=CheckpointId(7, 2), plan=plan, save=3, slot=1, image=image, values={"v": "1"}, extra={"e": 1}
        )

        self.is_retired = False

    def retire(self) -> str:
        self.is_retired = True
        return ""

    def check_retired(self) -> None:
        if self.is_retired:
            raise RanksLost("it was given up")

    def all_reduce(self, produce: Callable[[], str | None], _: object) -> str | None:
        own = produce()
        return self.told or own


def nothing() -> None:
    """No newer generation has taken over."""


@pytest.mark.parametrize("wants", [{}, {"wants_durable": False}, {"wants_durable": True}])
@pytest.mark.parametrize("holders", [{}, {0: 1}])
def test_an_image_that_all_have_goes_to_the_holder_of_its_copy(holders: dict[int, int], wants: dict[str, bool]) -> None:
    rank = Published(holders=holders)
    assert rank.staging.keep_in_memory(rank.staged, rank, nothing, **wants) is None
    header = ImageHeader(
        CheckpointId(7, 2), 0, 1, 1, "d" * 32, 128, "", None, {"v": "1"}, {"e": 1}, wants.get("wants_durable", False), 3
    )
    plan, image = rank.staged.plan, rank.staged.image
    assert rank.parts.directory.store_plan.mock_calls == [mock.call(plan)]
    assert rank.parts.directory.publish.mock_calls == [mock.call(header)]
    assert rank.parts.copies.holders.mock_calls == [mock.call(plan, ["x"])]
    sent = [mock.call(plan, holders, image, header, rank)] * bool(holders)
    assert rank.parts.copies.exchange_images.mock_calls == sent
    assert rank.staging._headers == {header.name: header}
    assert rank.staging._newest_complete == (3, 1)
    assert [*image.sums.call_args.args[0]] == [("a chunk", 64)]
    assert rank.parts.directory.remove_stale_images.mock_calls == [mock.call((), older_than=2)]


@pytest.mark.parametrize("told", [None, "rank 1: no room"])
def test_what_one_rank_could_not_publish_no_rank_keeps(told: str | None) -> None:
    rank = Published(holders={0: 1}, told=told, error=None if told else OSError("read-only"))
    mine = mock.Mock(id=CheckpointId(7, 2), slot=1)
    others = [mock.Mock(id=CheckpointId(7, 2), slot=0), mock.Mock(id=CheckpointId(6, 2), slot=1)]
    rank.parts.directory.headers.return_value = [mine, *others]
    assert rank.staging.keep_in_memory(rank.staged, rank, nothing) == (told or "rank 0: read-only")
    assert rank.parts.copies.exchange_images.mock_calls == []
    assert rank.parts.copies.forget.mock_calls == [mock.call(CheckpointId(7, 2), 3)]
    assert rank.parts.directory.withdraw.mock_calls == [mock.call(mine.name)]
    assert rank.staging._newest_complete is None


def test_a_save_that_was_given_up_while_it_summed_its_image_publishes_nothing() -> None:
    """A newer save may be using its place."""
    rank = Published(holders={})
    rank.staged.image.sums.side_effect = lambda _: rank.retire()
    with pytest.raises(RanksLost):
        rank.staging.keep_in_memory(rank.staged, rank, nothing)
    assert rank.parts.directory.mock_calls == []


def test_without_a_directory_nothing_is_published() -> None:
    rank = Published(holders={})
    rank.staging.directory = None
    assert rank.staging.keep_in_memory(rank.staged, rank, nothing) is None
    assert rank.parts.mock_calls == []
