"""How pods are written in the record: runs of ordinals, in columns where there are many."""

from __future__ import annotations

import pytest
from tests.unit.core.builders import pid

from elastipod_operator.core.pod_runs import MAX_READABLE_RUNS, decode_pods, encode_pods


@pytest.mark.parametrize("runs", [MAX_READABLE_RUNS, MAX_READABLE_RUNS + 1])
def test_many_runs_are_written_in_columns(runs: int) -> None:
    pods = tuple(pid(3 * n + odd, n % 2) for n in range(runs) for odd in (0, 1))
    written = encode_pods(pods)
    assert [len(stretch) for stretch in written] == [2 if runs == MAX_READABLE_RUNS else 4]
    assert decode_pods(written) == pods


@pytest.mark.parametrize(
    "columns",
    [
        pytest.param(("0,1", "0", "0,0"), id="a length is missing"),
        pytest.param(("0", "0", "0,0"), id="an incarnation too many"),
        pytest.param(("-1", "0", "0"), id="below the first pod"),
        pytest.param(("0", "-1", "0"), id="the end before the beginning"),
        pytest.param(("0", "3", "0"), id="more pods than there may be"),
        pytest.param(("0", "x", "0"), id="no number"),
    ],
)
def test_columns_that_were_edited_into_nonsense_are_refused(columns: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_pods([["workers", *columns]], most=3)


def test_as_many_pods_as_there_may_be_are_read() -> None:
    assert decode_pods([["a", "0-1"], ["b", "4.7"]], most=3) == (pid(0, 0, "a"), pid(1, 0, "a"), pid(4, 7, "b"))
