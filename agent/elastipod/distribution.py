"""Which of the two wheels with this library is installed: elastipod, or elastipod-agent without operator and local cluster."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

WHOLE, SLIM = "elastipod", "elastipod-agent"


def installed_version(name: str) -> str | None:
    """Give the version of an installed distribution; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def distribution() -> str:
    """Give the name to install extras by. To install the other wheel beside it would put every file there twice."""
    return SLIM if installed_version(SLIM) and not installed_version(WHOLE) else WHOLE
