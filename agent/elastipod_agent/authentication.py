"""Who may call the agent, and how the agent proves itself to its caller (docs/design/contracts.md, 12).

The operator gives each job a key. It reaches the agent's container through a Secret and never travels after that: both
sides sign with it. A request carries a MAC over the pod's name, a challenge that this agent made, a nonce, the method, the
target and the body. An answer carries a MAC over the request's nonce, the status and the body. So whoever gets the address
of a pod that is gone learns nothing to call another agent with, and cannot speak for the agent that was there.

Freshness comes from the challenge and not from a clock, because the clocks of two hosts may be minutes apart. A request is
accepted once: its nonce is remembered as long as its challenge is valid.

Pods that an operator of the previous version made hold a bearer token instead of a key; their agents accept that.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from http import HTTPStatus

from elastipod_agent.server.http import Admission, Head, RequestRefused, admit_everybody

KEY_ENV = "ELASTIPOD_KEY"
TOKEN_ENV = "ELASTIPOD_TOKEN"  # noqa: S105  # the name of a variable
POD_ENV = "ELASTIPOD_POD"
SCHEME = "Elastipod-HMAC-SHA256"
ANSWER_HEADER = "Elastipod-Answer"
# A challenge is replaced after so many requests, which bounds the memory for nonces (at most 64 characters each).
MAX_NONCES = 4096

_NAME = rb"elastipod-request-v1", rb"elastipod-answer-v1"
_PARAMETER = re.compile(r'([a-z]+)="?([0-9a-f]{1,64})"?')
_NEEDS_KEY = f"the calls of this agent need a MAC with the key of its job (in the pod: ${KEY_ENV}), scheme {SCHEME}"
_NEEDS_TOKEN = f"the calls of this agent need the token of its job (in the pod: ${TOKEN_ENV}) in the header Authorization: Bearer TOKEN"


@dataclass(frozen=True, slots=True)
class Credentials:
    """What the agent's container holds. key: signs calls; token: of an operator of the previous version; pod: its name."""

    key: str = field(default="", repr=False)
    token: str = field(default="", repr=False)
    pod: str = ""


def read_credentials(environ: Mapping[str, str]) -> Credentials:
    """Read key, token and pod name; each is "" where there is none."""
    return Credentials(*(environ.get(name, "").strip() for name in (KEY_ENV, TOKEN_ENV, POD_ENV)))


def take_credentials(environ: MutableMapping[str, str]) -> Credentials:
    """Read the credentials and take the secrets out of the environment, so that no training script can print them."""
    found = read_credentials(environ)
    for name in (KEY_ENV, TOKEN_ENV):
        environ.pop(name, None)
    return found


def request_mac(
    credentials: Credentials, challenge: str, nonce: str, method: str, target: str, body_digest: str
) -> str:
    """Give the MAC of a request. target: path and query as sent; body_digest: SHA-256 in hex of the body, which may be empty."""
    return _mac(credentials.key, _NAME[0], credentials.pod, challenge, nonce, method, target, body_digest)


def answer_mac(credentials: Credentials, challenge: str, nonce: str, status: int, body_digest: str) -> str:
    """Give the MAC of an answer. challenge: the one for the next request; nonce: of the request that is answered."""
    return _mac(credentials.key, _NAME[1], credentials.pod, challenge, nonce, str(status), body_digest)


def signed(credentials: Credentials, challenge: str, method: str, target: str, body: bytes = b"") -> dict[str, str]:
    """Give the header of a request with a MAC."""
    nonce, body_digest = secrets.token_hex(12), digest(body)
    mac = request_mac(credentials, challenge, nonce, method, target, body_digest)
    return {"Authorization": f"{SCHEME} challenge={challenge}, nonce={nonce}, body={body_digest}, mac={mac}"}


def bearer(token: str) -> dict[str, str]:
    """Give the header that shows a token; none for ""."""
    return {"Authorization": f"Bearer {token}"} if token else {}


def challenge_in(header: str) -> str:
    """Give the challenge of a WWW-Authenticate header; "" where it asks for another scheme."""
    scheme, _, rest = header.partition(" ")
    return _parameters(rest).get("challenge", "") if scheme == SCHEME else ""


def digest(body: bytes) -> str:
    """Give the SHA-256 of a body in hex."""
    return hashlib.sha256(body).hexdigest()


def _mac(key: str, *parts: bytes | str) -> str:
    lines = [part if isinstance(part, bytes) else part.encode("utf-8", "surrogateescape") for part in parts]
    return hmac.new(key.encode(), b"\n".join(lines), hashlib.sha256).hexdigest()


def _parameters(text: str) -> dict[str, str]:
    """Read `name=hex` pairs; anything else is left out, so a header that is cut short lacks what was cut."""
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
    """A request whose head was signed; its body has to be the one that was meant."""

    guard: MacGuard
    nonce: str
    body_digest: str

    def check_body(self, body: bytes) -> None:
        if not hmac.compare_digest(digest(body), self.body_digest):
            raise RequestRefused(HTTPStatus.UNAUTHORIZED, "the body is not the one that the MAC is over")

    def answer_headers(self, status: int, body: bytes) -> Mapping[str, str]:
        return self.guard.answer_header(self.nonce, status, body)


class TokenGuard:
    """Admits the requests that show the token: in pods that an operator of the previous version made."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()

    def admit(self, head: Head) -> Admission:
        """Let a request pass. Raises RequestRefused (401); how long that takes tells nothing about the token."""
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
