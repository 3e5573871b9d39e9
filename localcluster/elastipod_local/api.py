"""The few requests that we make to the API server ourselves, where starting kubectl over and over would cost too much."""

import http.client
import json
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TIMEOUT_S = 5.0


class ClosedWhenReset(ssl.SSLSocket):
    """Closed when it is reset between its connection and the handshake, as by a server that is killed; Python leaves it open."""

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        try:
            return super().recv(buflen, flags)
        except OSError:
            self.close()
            raise


@dataclass(frozen=True, slots=True)
class ApiServer:
    """An API server and the client certificate with which it is called."""

    host: str
    port: int
    authority: Path
    certificate: Path
    key: Path

    def answers_ok(self, path: str) -> bool:
        """Tell whether a GET is answered with 200; False also when the server cannot be reached."""
        return self._request(path) is not None

    def get(self, path: str) -> dict[str, Any] | None:
        """Give the object at a path, None when it is not there or the server cannot be reached."""
        content = self._request(path)
        return None if content is None else json.loads(content)

    def connection(self, timeout_s: float = TIMEOUT_S) -> http.client.HTTPSConnection:
        """Give a connection that its first request opens. timeout_s: for how long the server may say nothing."""
        context = ssl.create_default_context(cafile=str(self.authority))
        context.sslsocket_class = ClosedWhenReset
        context.load_cert_chain(self.certificate, self.key)
        return http.client.HTTPSConnection(self.host, self.port, timeout=timeout_s, context=context)

    def _request(self, path: str) -> bytes | None:
        connection = self.connection()
        try:
            connection.request("GET", path, headers={"Accept": "application/json"})
            answer = connection.getresponse()
            content = answer.read()
            return content if answer.status == http.client.OK else None
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()
