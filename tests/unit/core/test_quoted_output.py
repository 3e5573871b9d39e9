"""Events say which kind of error ended a script, never what the script printed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastipod_operator.core.quoted_output import CLOSE, OPEN, quote_output, redact_quotes

ELSEWHERE = "(see the job's conditions and the pod's log)"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        pytest.param("KeyError: 'hunter2'", f"KeyError {ELSEWHERE}", id="an exception with its value"),
        pytest.param("torch.OutOfMemoryError: CUDA", f"torch.OutOfMemoryError {ELSEWHERE}", id="of a module"),
        pytest.param("KeyboardInterrupt", f"KeyboardInterrupt {ELSEWHERE}", id="without a value"),
        pytest.param("password=hunter2", ELSEWHERE, id="no exception"),
        pytest.param("hunter2Error is my password", ELSEWHERE, id="a word that only begins like one"),
    ],
)
def test_of_a_quotation_the_kind_of_error_is_told(words: str, told: str) -> None:
    message = f"rank 1 exited with code 1: {quote_output(words)}; no restart is left"
    assert redact_quotes(message) == f"rank 1 exited with code 1: {told}; no restart is left"


def test_a_quotation_that_was_cut_is_left_out_to_its_end() -> None:
    assert (
        redact_quotes(f"rank 1 failed: {quote_output('the password is hunter2')}"[:40]) == f"rank 1 failed: {ELSEWHERE}"
    )


def test_nothing_is_not_quoted() -> None:
    assert quote_output("  ") == ""
    assert redact_quotes("rank 1 exited with code 1") == "rank 1 exited with code 1"


@given(st.text(alphabet=st.characters(exclude_characters="".join(chr(n) for n in range(0x20, 0x7F))), min_size=1))
def test_nothing_that_a_script_printed_gets_through(secret: str) -> None:
    told = redact_quotes(f"before {quote_output(f'{OPEN}{secret}{CLOSE}: {secret}')} after")
    assert told == f"before {ELSEWHERE} after"
