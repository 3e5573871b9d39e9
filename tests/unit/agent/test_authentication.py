"""Who may call the agent: requests with a fresh MAC under the job's key, or with the token of the previous version."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from elastipod_agent.authentication import (
    ANSWER_HEADER,
    KEY_ENV,
    POD_ENV,
    SCHEME,
    TOKEN_ENV,
    Credentials,
    MacGuard,
    TokenGuard,
    admission_of,
    answer_mac,
    bearer,
    challenge_in,
    digest,
    signed,
    take_credentials,
    worker_key,
)
from elastipod_agent.server.http import Admission
from elastipod_agent.server.http_messages import Head, RequestRefused

HELD = Credentials(key="f" * 64, token="abc", pod="job-workers-0")
BODY = b'{"generation": 3}'


def head(headers: Mapping[str, str], method: str = "POST", target: str = "/stop") -> Head:
    return Head(method, target, {name.lower(): value for name, value in headers.items()}, True)


def challenge_of(guard: MacGuard) -> str:
    """Give the challenge that an unsigned request is answered with."""
    with pytest.raises(RequestRefused) as refused:
        guard.admit(head({}))
    return challenge_in(refused.value.response.headers["WWW-Authenticate"])


def proof(guard: MacGuard, held: Credentials = HELD, body: bytes = BODY, *, target: str = "/stop") -> dict[str, str]:
    return signed(held, challenge_of(guard), "POST", target, body)


def test_a_signed_request_is_admitted_once() -> None:
    guard = MacGuard(HELD)
    sent = proof(guard)
    guard.admit(head(sent)).check_body(BODY)
    with pytest.raises(RequestRefused):
        guard.admit(head(sent))


@pytest.mark.parametrize(
    ("method", "target"), [("GET", "/stop"), ("POST", "/shutdown"), ("POST", "/stop?generation=9")]
)
def test_a_request_cannot_be_turned_into_another(method: str, target: str) -> None:
    guard = MacGuard(HELD)
    with pytest.raises(RequestRefused):
        guard.admit(head(proof(guard), method, target))


def test_the_body_has_to_be_the_one_that_was_signed() -> None:
    guard = MacGuard(HELD)
    admitted = guard.admit(head(proof(guard)))
    with pytest.raises(RequestRefused) as refused:
        admitted.check_body(b'{"generation": 4}')
    assert refused.value.response.status == 401


@pytest.mark.parametrize(
    "held",
    [
        pytest.param(Credentials(key="e" * 64, pod=HELD.pod), id="another job's key"),
        pytest.param(Credentials(key=HELD.key, pod="job-workers-1"), id="meant for another pod of the job"),
        pytest.param(Credentials(key="", pod=HELD.pod), id="no key"),
        pytest.param(Credentials(key=HELD.token, pod=HELD.pod), id="the token as a key"),
    ],
)
def test_a_mac_of_anybody_else_is_refused_in_the_same_words(held: Credentials) -> None:
    guard = MacGuard(HELD)
    said = set()
    for sent in (proof(guard, held), {}, {"Authorization": "Bearer abc"}, {"Authorization": SCHEME}):
        with pytest.raises(RequestRefused) as refused:
            guard.admit(head(sent))
        response = refused.value.response
        assert response.status == 401
        said.add((str(response.body), *response.headers.values()))
    assert len(said) == 1
    assert HELD.key not in str(said)


def test_workers_of_one_job_get_one_key_from_which_that_of_the_job_cannot_be_computed() -> None:
    keys = {worker_key(Credentials(key=key, pod=pod)) for key in ("a", "b") for pod in ("pod-1", "pod-2")}
    assert len(keys) == 2
    assert worker_key(Credentials(key="a")) in keys
    assert worker_key(Credentials(token="t")) == "", "one that all pods of earlier versions could compute is none"


def test_a_request_signed_for_the_agent_before_a_restart_is_refused() -> None:
    before, after = MacGuard(HELD), MacGuard(HELD)
    with pytest.raises(RequestRefused):
        after.admit(head(proof(before)))


@pytest.mark.parametrize("change", ["challenge=", "nonce=", "body=", "mac="])
def test_every_part_of_the_proof_counts(change: str) -> None:
    guard = MacGuard(HELD)
    sent = proof(guard)["Authorization"]
    at = sent.index(change) + len(change)
    flipped = sent[:at] + ("0" if sent[at] != "0" else "1") + sent[at + 1 :]
    with pytest.raises(RequestRefused):
        guard.admit(head({"Authorization": flipped}))
    guard.admit(head({"Authorization": sent}))


def test_an_answer_proves_the_agent_and_brings_the_next_challenge() -> None:
    guard = MacGuard(HELD)
    challenge = challenge_of(guard)
    sent = signed(HELD, challenge, "POST", "/stop", BODY)
    nonce = sent["Authorization"].partition("nonce=")[2].partition(",")[0]
    given = guard.admit(head(sent)).answer_headers(409, b"{}")
    right = answer_mac(HELD, challenge, nonce, 409, digest(b"{}"))
    assert given == {ANSWER_HEADER: f"challenge={challenge}, mac={right}"}
    assert right != answer_mac(HELD, challenge, nonce, 200, digest(b"{}"))
    assert right != answer_mac(HELD, challenge, "00", 409, digest(b"{}"))


def test_the_memory_for_nonces_is_bounded_and_no_old_request_comes_back_with_it() -> None:
    guard = MacGuard(HELD, max_nonces=3)
    first, sent = challenge_of(guard), []
    for _ in range(3):
        sent.append(proof(guard))
        guard.admit(head(sent[-1]))
    assert challenge_of(guard) != first
    assert len(guard._nonces) == 0
    for old in sent:
        with pytest.raises(RequestRefused):
            guard.admit(head(old))


def test_key_and_token_are_taken_out_of_the_environment() -> None:
    environ = {KEY_ENV: " k\n", TOKEN_ENV: " abc\n", POD_ENV: "pod", "HOME": "/root"}
    assert take_credentials(environ) == Credentials("k", "abc", "pod")
    assert environ == {"HOME": "/root", POD_ENV: "pod"}
    assert take_credentials(environ) == Credentials(pod="pod")


def test_no_representation_shows_a_secret() -> None:
    assert HELD.key not in repr(HELD)
    assert "abc" not in repr(HELD)


def test_an_agent_with_a_key_takes_no_token() -> None:
    with pytest.raises(RequestRefused):
        admission_of(HELD)(head(bearer("abc")))
    admission_of(Credentials(token="abc"))(head(bearer("abc")))
    admission_of(Credentials())(head({}))


@pytest.mark.parametrize(
    "header", ["Bearer abc", "bearer abc", "BEARER   abc "], ids=["as it is sent", "in any case", "with blanks"]
)
def test_the_token_of_the_previous_version_is_admitted(header: str) -> None:
    assert type(TokenGuard("abc").admit(head({"authorization": header}))) is Admission


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
def test_every_other_token_is_refused_in_the_same_words(headers: dict[str, str]) -> None:
    with pytest.raises(RequestRefused) as refused:
        TokenGuard("abc").admit(head(headers))
    response = refused.value.response
    assert (response.status, response.headers) == (401, {"WWW-Authenticate": 'Bearer realm="elastipod"'})
    assert response.body == {"detail": str(refused.value)}
    assert "abc" not in str(refused.value)


def test_a_token_beyond_ascii_is_compared_as_it_was_sent() -> None:
    TokenGuard("ä").admit(head({"authorization": "Bearer " + "ä".encode().decode("latin-1")}))


def test_the_header_of_a_token() -> None:
    assert bearer("abc") == {"Authorization": "Bearer abc"}
    assert bearer("") == {}
