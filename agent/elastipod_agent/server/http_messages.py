"""The messages of HTTP: heads of requests, parsed strictly, refusals and responses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

MAX_QUERY_FIELDS = 32


@dataclass(frozen=True, slots=True)
class Response:
    """One response. body: a JSON value, None for an empty body, or bytes, whose Content-Type is in the headers."""

    status: int
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)


class RequestRefused(Exception):
    """A request that is malformed or not allowed; it gets this response, then the connection is closed."""

    def __init__(self, status: HTTPStatus, detail: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(detail)
        self.response = Response(status, {"detail": detail}, headers or {})


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a request. target: path and query as sent; headers: names in lower case."""

    method: str
    target: str
    headers: Mapping[str, str]
    is_keep_alive: bool


def parse_head(data: bytes) -> Head:
    """Parse a request line and headers, including the empty line. Raises RequestRefused."""
    lines = data.decode("latin-1").split("\r\n")
    parts = lines[0].lstrip().split(" ")
    if len(parts) != 3 or not parts[2].startswith("HTTP/1.") or not parts[1].startswith("/"):
        raise RequestRefused(HTTPStatus.BAD_REQUEST, "this is not an HTTP/1.1 request")
    headers: dict[str, str] = {}
    for line in lines[1:-2]:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            raise RequestRefused(HTTPStatus.BAD_REQUEST, "a header line has no name")
        if name.lower() in ("content-length", "authorization") and name.lower() in headers:
            raise RequestRefused(HTTPStatus.BAD_REQUEST, f"{name} is given twice")
        headers[name.lower()] = value.strip()
    if "transfer-encoding" in headers and "content-length" in headers:
        raise RequestRefused(HTTPStatus.BAD_REQUEST, "both Content-Length and Transfer-Encoding are given")
    connection = headers.get("connection", "").lower()
    is_keep_alive = "close" not in connection if parts[2] == "HTTP/1.1" else "keep-alive" in connection
    return Head(parts[0], parts[1], headers, is_keep_alive)


def parse_target(target: str) -> tuple[str, dict[str, str]]:
    """Split a request target into path and query; of a repeated field the last value counts. Raises RequestRefused."""
    try:
        url = urlsplit(target)
        query = parse_qs(url.query, max_num_fields=MAX_QUERY_FIELDS)
    except ValueError as error:
        raise RequestRefused(HTTPStatus.BAD_REQUEST, f"bad request target: {error}") from error
    return unquote(url.path), {name: values[-1] for name, values in query.items()}


def content_length(headers: Mapping[str, str]) -> int:
    text = headers.get("content-length", "0")
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise RequestRefused(HTTPStatus.BAD_REQUEST, "Content-Length is not a number")
    return int(text)
