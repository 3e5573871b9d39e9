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


def install_advice(extra: str | None) -> str:
    """Say how to get what this installation lacks: the packages of an extra, or with None a part of the library itself.

    Nothing is in an index, but pip finds the packages of an extra of a wheel that is installed.
    """
    if distribution() == WHOLE:
        return checkout_advice(extra)
    return (
        f"run: pip install '{SLIM}[{extra}]'"
        if extra
        else f"build the wheel {SLIM} with `make wheels` and install it again"
    )


def checkout_advice(extra: str | None) -> str:
    """Say how to install the wheel that has all parts, with an extra if it is given."""
    what = f"'.[{extra}]'" if extra else "."
    return f"in a checkout of elastipod, run: pip install {what}"
