"""The job's token: who shows it may call, and nobody is told how near a wrong one was."""

from __future__ import annotations

import pytest

from elastipod_agent.server.http import Refused
from elastipod_agent.token import ENV_NAME, TokenGuard, bearer, take_token


@pytest.mark.parametrize(
    "header", ["Bearer abc", "bearer abc", "BEARER   abc "], ids=["as it is sent", "in any case", "with blanks"]
)
def test_the_token_is_let_in(header: str) -> None:
    TokenGuard("abc").admit({"authorization": header})


@pytest.mark.parametrize(
    "headers",
    [
        pytest.param({}, id="nothing"),
        pytest.param({"authorization": ""}, id="empty"),
        pytest.param({"authorization": "Bearer"}, id="no token"),
        pytest.param({"authorization": "Bearer ab"}, id="a part of it"),
        pytest.param({"authorization": "Bearer abcd"}, id="more than it"),
        pytest.param({"authorization": "Bearer ABC"}, id="another case"),
        pytest.param({"authorization": "Basic abc"}, id="another scheme"),
        pytest.param({"authorization": "abc"}, id="no scheme"),
        pytest.param({"authorization": "Bearer \xff\xfe"}, id="no text"),
    ],
)
def test_everything_else_is_refused_in_the_same_words(headers: dict[str, str]) -> None:
    with pytest.raises(Refused) as refused:
        TokenGuard("abc").admit(headers)
    response = refused.value.response
    assert (response.status, response.headers) == (401, {"WWW-Authenticate": 'Bearer realm="elastipod"'})
    assert response.body == {"detail": str(refused.value)}
    assert "abc" not in str(refused.value)


def test_a_token_beyond_ascii_is_compared_as_it_was_sent() -> None:
    TokenGuard("ä").admit({"authorization": "Bearer " + "ä".encode().decode("latin-1")})


def test_the_token_is_taken_out_of_the_environment() -> None:
    environ = {ENV_NAME: " abc\n", "HOME": "/root"}
    assert take_token(environ) == "abc"
    assert environ == {"HOME": "/root"}
    assert take_token(environ) == ""


def test_the_header_of_a_token() -> None:
    assert bearer("abc") == {"Authorization": "Bearer abc"}
    assert bearer("") == {}
