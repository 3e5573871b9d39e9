"""Authenticates callers to the agent, and the agent to its callers (docs/design/contracts.md, 12).

The operator creates a key for each job. The key reaches the agent's container through a Secret and is never sent afterwards: both sides
sign with it. A request carries a MAC over the pod's name, a challenge of this agent, a nonce, the method, the target and the body. An
answer carries a MAC over the request's nonce, the status and the body. A process that gets the address of a deleted pod therefore learns
nothing with which it could call another agent, and cannot impersonate the agent that was there.

Freshness comes from the challenge and not from a clock, because the clocks of two hosts may differ by minutes. A request is accepted
once: its nonce is remembered as long as its challenge is valid.

Pods created by the previous version of the operator hold a bearer token instead of a key; their agents accept the token.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from http import HTTPStatus

from elastipod_agent.server.http import Admission, admit_everybody
from elastipod_agent.server.http_messages import Head, RequestRefused

KEY_ENV = "ELASTIPOD_KEY"
TOKEN_ENV = "ELASTIPOD_TOKEN"  # noqa: S105  # the name of a variable
POD_ENV = "ELASTIPOD_POD"
SCHEME = "Elastipod-HMAC-SHA256"
ANSWER_HEADER = "Elastipod-Answer"
# A challenge is replaced after this many requests, which limits the memory for nonces (at most 64 characters each).
MAX_NONCES = 4096

_NAME = rb"elastipod-request-v1", rb"elastipod-answer-v1"
_PARAMETER = re.compile(r'([a-z]+)="?([0-9a-f]{1,64})"?')
_NEEDS_KEY = (  # the same words for every caller; in the agent's log they must not make the operator's first call read like a fault
    f"calls of this agent need a MAC with the key of its job (in the pod: ${KEY_ENV}), scheme {SCHEME}; "
    "the first call of each operator has none, and learns from this answer what to sign"
)
_NEEDS_TOKEN = f"calls of this agent need the token of its job (in the pod: ${TOKEN_ENV}) in the header Authorization: Bearer TOKEN"


@dataclass(frozen=True, slots=True)
class Credentials:
    """The credentials in the agent's container. key: signs calls; token: from the previous version of the operator; pod: its name."""

    key: str = field(default="", repr=False)
    token: str = field(default="", repr=False)
    pod: str = ""


def read_credentials(environ: Mapping[str, str]) -> Credentials:
    """Read the key, the token and the pod's name; each is "" if it is missing."""
    return Credentials(*(environ.get(name, "").strip() for name in (KEY_ENV, TOKEN_ENV, POD_ENV)))


def take_credentials(environ: MutableMapping[str, str]) -> Credentials:
    """Read the credentials and remove the secrets from the environment, so that no training script can print them."""
    found = read_credentials(environ)
    for name in (KEY_ENV, TOKEN_ENV):
        environ.pop(name, None)
    return found


def request_mac(
    credentials: Credentials, challenge: str, nonce: str, method: str, target: str, body_digest: str
) -> str:
    """Give the MAC of a request. target: path and query as sent; body_digest: SHA-256 of the body in hex."""
    return _mac(credentials.key, _NAME[0], credentials.pod, challenge, nonce, method, target, body_digest)


def answer_mac(credentials: Credentials, challenge: str, nonce: str, status: int, body_digest: str) -> str:
    """Give the MAC of an answer. challenge: for the next request; nonce: of the request that is answered."""
    return _mac(credentials.key, _NAME[1], credentials.pod, challenge, nonce, str(status), body_digest)


def signed(credentials: Credentials, challenge: str, method: str, target: str, body: bytes = b"") -> dict[str, str]:
    """Give the header of a request with a MAC."""
    nonce, body_digest = secrets.token_hex(12), digest(body)
    mac = request_mac(credentials, challenge, nonce, method, target, body_digest)
    return {"Authorization": f"{SCHEME} challenge={challenge}, nonce={nonce}, body={body_digest}, mac={mac}"}


def worker_key(credentials: Credentials) -> str:
    """Give the key under which workers of a job know each other; nobody can compute the job's own key from it.

    "" where there is only a token. Without credentials, where the agent admits every caller, it is no secret.
    """
    return "" if credentials.token and not credentials.key else _mac(credentials.key, b"elastipod-workers-v1")


def bearer(token: str) -> dict[str, str]:
    """Give the header with a token; no header for ""."""
    return {"Authorization": f"Bearer {token}"} if token else {}


def challenge_in(header: str) -> str:
    """Give the challenge of a WWW-Authenticate header; "" if it names another scheme."""
    scheme, _, rest = header.partition(" ")
    return _parameters(rest).get("challenge", "") if scheme == SCHEME else ""


def digest(body: bytes) -> str:
    """Give the SHA-256 of a body in hex."""
    return hashlib.sha256(body).hexdigest()


def _mac(key: str, *parts: bytes | str) -> str:
    lines = [part if isinstance(part, bytes) else part.encode("utf-8", "surrogateescape") for part in parts]
    return hmac.new(key.encode(), b"\n".join(lines), hashlib.sha256).hexdigest()


def _parameters(text: str) -> dict[str, str]:
    """Parse `name=hex` pairs; anything else is ignored."""
    found = (_PARAMETER.fullmatch(part.strip()) for part in text.split(","))
    return {match[1]: match[2] for match in found if match}


class MacGuard:
    """Admits each correctly signed request once, and signs the answers."""

    def __init__(self, credentials: Credentials, *, max_nonces: int = MAX_NONCES) -> None:
        self._credentials = credentials
        self._max_nonces = max_nonces
        self._challenge = secrets.token_hex(16)
        self._nonces: set[str] = set()

    def admit(self, head: Head) -> Admission:
        """Admit a request before its body is read. Raises RequestRefused (401) with the challenge to sign."""
        scheme, _, rest = head.headers.get("authorization", "").partition(" ")
        given = _parameters(rest) if scheme == SCHEME else {}
        challenge, nonce, body = (given.get(name, "") for name in ("challenge", "nonce", "body"))
        right = request_mac(self._credentials, self._challenge, nonce, head.method, head.target, body)
        is_same = hmac.compare_digest(given.get("mac", ""), right) and challenge == self._challenge
        if not is_same or nonce in self._nonces:
            asked = {"WWW-Authenticate": f'{SCHEME} challenge="{self._challenge}"'}
            raise RequestRefused(HTTPStatus.UNAUTHORIZED, _NEEDS_KEY, asked)
        self._nonces.add(nonce)
        if len(self._nonces) >= self._max_nonces:
            self._challenge, self._nonces = secrets.token_hex(16), set()
        return _Signed(self, nonce, body)

    def answer_header(self, nonce: str, status: int, body: bytes) -> dict[str, str]:
        """Give the header that proves an answer, with the challenge for the caller's next request."""
        mac = answer_mac(self._credentials, self._challenge, nonce, status, digest(body))
        return {ANSWER_HEADER: f"challenge={self._challenge}, mac={mac}"}


@dataclass(frozen=True, slots=True)
class _Signed(Admission):
    """A request with a signed head, which must have the body that was signed."""

    guard: MacGuard
    nonce: str
    body_digest: str

    def check_body(self, body: bytes) -> None:
        if not hmac.compare_digest(digest(body), self.body_digest):
            raise RequestRefused(HTTPStatus.UNAUTHORIZED, "the body is not the one that was signed")

    def answer_headers(self, status: int, body: bytes) -> Mapping[str, str]:
        return self.guard.answer_header(self.nonce, status, body)


class TokenGuard:
    """Admits requests with the token, in pods created by the previous version of the operator."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()

    def admit(self, head: Head) -> Admission:
        """Admit a request. Raises RequestRefused (401), in a time that does not depend on the token."""
        scheme, _, shown = head.headers.get("authorization", "").partition(" ")
        is_same = hmac.compare_digest(shown.strip().encode("latin-1"), self._token)
        if not is_same or scheme.lower() != "bearer":
            raise RequestRefused(
                HTTPStatus.UNAUTHORIZED, _NEEDS_TOKEN, {"WWW-Authenticate": 'Bearer realm="elastipod"'}
            )
        return Admission()


def admission_of(credentials: Credentials) -> Callable[[Head], Admission]:
    """Give what decides who may call an agent with these credentials; without any everybody may."""
    if credentials.key:
        return MacGuard(credentials).admit
    return TokenGuard(credentials.token).admit if credentials.token else admit_everybody
