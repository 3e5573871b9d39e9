"""The benchmark's own way to the API server: few calls, many at once, and a watch."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp
import yaml
from bench.common.processes import Failed

LINE_LIMIT = 4 << 20
LIST_PAGE = 500


class Refused(Failed):
    """The API server did not do what it was asked; the text is its answer."""


class ApiClient:
    """Calls as the user of a kubeconfig, whose certificates are in the file. As a context manager."""

    def __init__(self, kubeconfig: Path, parallel: int = 16) -> None:
        content = yaml.safe_load(kubeconfig.read_text(encoding="utf-8"))
        cluster, user = content["clusters"][0]["cluster"], content["users"][0]["user"]
        self._server = cluster["server"]
        self._context = ssl.create_default_context(cadata=_plain(cluster["certificate-authority-data"]))
        with tempfile.TemporaryDirectory() as folder:
            certificate, key = Path(folder, "crt"), Path(folder, "key")
            key.touch(mode=0o600)
            certificate.write_text(_plain(user["client-certificate-data"]), encoding="utf-8")
            key.write_text(_plain(user["client-key-data"]), encoding="utf-8")
            self._context.load_cert_chain(certificate, key)
        self._parallel = parallel

    async def __aenter__(self) -> ApiClient:
        connector = aiohttp.TCPConnector(ssl=self._context, limit=self._parallel + 2)
        self._session = aiohttp.ClientSession(self._server, connector=connector)
        self._slots = asyncio.Semaphore(self._parallel)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, fine: tuple[int, ...] = ()
    ) -> dict[str, Any]:
        """Make a call and give the answer, {} for a code that is `fine`. Raises Refused."""
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        return await self.send(method, path, None if body is None else json.dumps(body), kind, fine)

    async def send(
        self, method: str, path: str, text: str | None, kind: str, fine: tuple[int, ...] = ()
    ) -> dict[str, Any]:
        """Make a call whose body is written already, in a format of this kind. Raises Refused."""
        async with (
            self._slots,
            self._session.request(method, path, data=text, headers={"Content-Type": kind}) as answer,
        ):
            content = await answer.read()
            if answer.status in fine:
                return {}
            if answer.status >= 300:
                raise Refused(f"{method} {path}: HTTP {answer.status} {content[:500].decode(errors='replace')}")
            value: dict[str, Any] = json.loads(content)
            return value

    async def size_of(self, path: str) -> int:
        """Give the bytes of an object as the API server writes it."""
        async with self._session.get(path) as answer:
            return len(await answer.read())

    async def text(self, path: str) -> str:
        """Give a page such as /metrics."""
        async with self._session.get(path) as answer:
            return await answer.text()

    async def all_of(self, *calls: tuple[str, str, Mapping[str, Any] | None]) -> None:
        """Make many calls, as many at once as `parallel` says. Raises the first refusal when all are done."""
        results = await asyncio.gather(*(self.call(*one) for one in calls), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def watch(self, path: str, take: Callable[[str, Mapping[str, Any]], None]) -> None:
        """Hand over what is there and every change, until cancelled."""
        listed = await self.call("GET", path)
        for item in listed["items"]:
            take("ADDED", item)
        version = listed["metadata"]["resourceVersion"]
        while True:
            query = f"{path}?watch=1&allowWatchBookmarks=true&resourceVersion={version}&timeoutSeconds=3600"
            async with self._session.get(
                query, timeout=aiohttp.ClientTimeout(total=None), read_bufsize=LINE_LIMIT
            ) as stream:
                buffer = bytearray()
                async for chunk in stream.content.iter_any():
                    buffer += chunk
                    *lines, rest = bytes(buffer).split(b"\n")
                    buffer = bytearray(rest)
                    for line in lines:
                        event = json.loads(line)
                        if event["type"] == "ERROR":
                            raise Refused(f"the watch of {path} ended: {line[:300]!r}")
                        version = event["object"]["metadata"]["resourceVersion"]
                        if event["type"] != "BOOKMARK":
                            take(event["type"], event["object"])


def _plain(text: str) -> str:
    return base64.b64decode(text).decode()
