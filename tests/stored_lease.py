"""A lease as the API server keeps it, for tests of who leads; how requests get there is up to them."""

from __future__ import annotations

import copy
from typing import Any

from elastipod_operator.kube.api import ApiError


class StoredLease:
    """One lease, under a version that each write changes."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None

    def read(self) -> dict[str, Any]:
        """Give it as it is. Raises ApiError."""
        if self.lease is None:
            raise ApiError(404, "not found")
        return copy.deepcopy(self.lease)

    def write(self, body: dict[str, Any], *, must_exist: bool) -> dict[str, Any]:
        """Create it, or replace the version that the body names; give it as it is then. Raises ApiError."""
        version = body["metadata"].get("resourceVersion")
        if (self.lease is not None) is not must_exist:
            raise ApiError(409, "already exists")
        if self.lease is not None and version != self.lease["metadata"]["resourceVersion"]:
            raise ApiError(409, "the object has been modified")
        self.put(body)
        return self.read()

    def put(self, body: dict[str, Any]) -> None:
        """Keep a lease under the next version."""
        before = 0 if self.lease is None else int(self.lease["metadata"]["resourceVersion"])
        self.lease = copy.deepcopy(body)
        self.lease["metadata"]["resourceVersion"] = str(before + 1)
