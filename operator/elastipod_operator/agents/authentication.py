"""How the operator and agents authenticate each other: the caller's side of docs/design/contracts.md, 12.

The key of a job is never sent. A call to an agent whose pod holds the key is signed with a MAC over the pod's name, the
agent's challenge, a nonce, method, target and body; the response must have a MAC too. The first call to an agent is unsigned,
and its 401 contains the challenge, or shows that the agent only supports tokens.

An agent of the previous version in a pod with the key gets the bearer token, which only such agents accept. The token is never
sent to an agent that has proved to hold the key.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakValueDictionary

SCHEME = "Elastipod-HMAC-SHA256"
ANSWER_HEADER = "Elastipod-Answer"
# With many parallel calls, a challenge may be outdated when a call arrives, and so may the next one.
MAX_TRIES = 3

_NAMES = "elastipod-request-v1", "elastipod-answer-v1"
_PARAMETER = re.compile(r'([a-z]+)="?([0-9a-f]{1,64})"?')


class AuthenticationFailed(Exception):
    """The agent rejected the operator's credentials, or its response does not prove that it is the job's agent."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a pod's agent and the operator share. pod: the pod's name, part of every MAC."""

    pod: str = ""
    key: str = field(default="", repr=False)
    token: str = field(default="", repr=False)
    """The bearer token for an agent of the previous version."""


NO_CREDENTIALS = Credentials()


class Response(NamedTuple):
    """A response. headers: at least those for authentication, with lower-case names."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Call:
    """One call as it is sent. nonce: empty for an unsigned call."""

    headers: dict[str, str]
    challenge: str = ""
    nonce: str = ""


class Authenticator:
    """Signs the calls to one agent and checks its answers. Calls may overlap."""

    def __init__(self, credentials: Credentials) -> None:
        self.credentials = credentials
        self._challenge = ""
        self._takes_token = False  # it requested a bearer token
        self._is_proven = False  # it has signed an answer with the key

    async def exchange(
        self, method: str, target: str, body: bytes, send: Callable[[dict[str, str]], Awaitable[Response]]
    ) -> Response:
        """Make a call and give its verified response, of any status except 401.

        target: path and query as sent. send: sends the call once, with these headers. Raises AuthenticationFailed, and what
        `send` raises.
        """
        for _ in range(MAX_TRIES):
            call = self.sign(method, target, body)
            response = await send(call.headers)
            if not self.is_to_repeat(call, response):
                break
        self.check(call, response)
        return response

    def sign(self, method: str, target: str, body: bytes = b"") -> Call:
        """Give the authentication headers of one call."""
        credentials, challenge = self.credentials, self._challenge
        if not credentials.key or self._takes_token:
            return Call({"Authorization": f"Bearer {credentials.token}"} if credentials.token else {})
        if not challenge:
            return Call({})
        nonce, digest = secrets.token_hex(12), _digest(body)
        mac = _mac(credentials.key, _NAMES[0], credentials.pod, challenge, nonce, method, target, digest)
        proof = f"{SCHEME} challenge={challenge}, nonce={nonce}, body={digest}, mac={mac}"
        return Call({"Authorization": proof}, challenge, nonce)

    def is_to_repeat(self, call: Call, response: Response) -> bool:
        """Whether the agent requests other credentials than it got; remembers what it requests."""
        if response.status != 401 or not self.credentials.key:
            return False
        scheme, _, rest = response.headers.get("www-authenticate", "").partition(" ")
        if scheme == SCHEME:
            self._challenge, self._takes_token = _parameters(rest).get("challenge", ""), False
            return self._challenge not in ("", call.challenge)
        wants_token = scheme.lower() == "bearer" and bool(self.credentials.token)
        if not wants_token or self._is_proven or self._takes_token:
            return False
        self._takes_token = True
        return True

    def check(self, call: Call, response: Response) -> None:
        """Verify a final response. Raises AuthenticationFailed."""
        if response.status == 401:
            raise AuthenticationFailed("the agent rejected the operator's credentials (HTTP 401)")
        if not call.nonce:
            if self._is_proven:
                raise AuthenticationFailed("the agent answered without a MAC, although it holds the job's key")
            return
        given = _parameters(response.headers.get(ANSWER_HEADER.lower(), ""))
        challenge, digest = given.get("challenge", ""), _digest(response.body)
        key, pod = self.credentials.key, self.credentials.pod
        right = _mac(key, _NAMES[1], pod, challenge, call.nonce, str(response.status), digest)
        if not hmac.compare_digest(given.get("mac", ""), right):
            raise AuthenticationFailed("the response has no valid MAC of the job's key: it is not from the job's agent")
        self._challenge, self._is_proven = challenge, True


class Authenticators:
    """One Authenticator per agent, shared by all callers, because it remembers what the agent requests.

    It lasts as long as someone holds it: the agent that is polled, and each call.
    """

    def __init__(self) -> None:
        self._known: WeakValueDictionary[Credentials, Authenticator] = WeakValueDictionary()

    def of(self, credentials: Credentials) -> Authenticator:
        """Give the Authenticator for these credentials."""
        if not credentials.key:
            return Authenticator(credentials)  # nothing to remember
        return self._known.setdefault(credentials, Authenticator(credentials))


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def _mac(key: str, *parts: str) -> str:
    return hmac.new(key.encode(), "\n".join(parts).encode(), hashlib.sha256).hexdigest()


def _parameters(text: str) -> dict[str, str]:
    """Read `name=hex` pairs and ignore everything else."""
    found = (_PARAMETER.fullmatch(part.strip()) for part in text.split(","))
    return {match[1]: match[2] for match in found if match}
