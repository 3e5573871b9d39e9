"""The Go toolchain: what a build is given."""

from __future__ import annotations

import pytest

from elastipod_local.golang import go_environment


@pytest.mark.parametrize("given", [None, ""])
def test_without_a_home_a_build_gets_one(given: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under `env -i`, cron or a service: Go keeps its caches there, and refuses to build without."""
    if given is None:
        monkeypatch.delenv("HOME", raising=False)
    else:
        monkeypatch.setenv("HOME", given)
    assert go_environment()["HOME"].startswith("/")


def test_the_home_of_the_environment_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    assert go_environment()["HOME"] == "/somewhere"
