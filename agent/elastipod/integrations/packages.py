"""Which frameworks the integrations work with: their packages, the oldest versions, and the sentence when one is missing."""

from __future__ import annotations

import re
from typing import NamedTuple

from elastipod.distribution import install_advice, installed_version
from elastipod.errors import FrameworkError


class Framework(NamedTuple):
    """oldest: version that the integration works with; tested: version that the tests use; extra: of elastipod.

    also: another package with the same modules, which the extra installs.
    """

    oldest: str
    tested: str
    extra: str
    also: str = ""


TESTED = {
    "transformers": Framework("5.23", "5.23", "transformers"),
    "accelerate": Framework("1.15", "1.15", "accelerate"),
    "lightning": Framework("2.6", "2.6", "lightning"),
    "mlflow": Framework("3.14", "3.17", "mlflow", also="mlflow-skinny"),
    "wandb": Framework("0.22", "0.31", "wandb"),
}


def require(package: str) -> None:
    """Raise FrameworkError, in one sentence, when the package is missing or older than the integration needs."""
    framework = TESTED[package]
    remedy = install_advice(framework.extra)
    found = installed_version(package) or (installed_version(framework.also) if framework.also else None)
    if found is None:
        raise FrameworkError(
            f"elastipod.integrations.{package} needs the package {package} {framework.oldest} or newer, which is not "
            f"installed; {remedy}"
        )
    if _numbers(found) < _numbers(framework.oldest):
        raise FrameworkError(
            f"elastipod.integrations.{package} needs {package} {framework.oldest} or newer, but {found} is installed; {remedy}"
        )


def _numbers(text: str) -> tuple[int, ...]:
    """Give the leading numbers of a version: (5, 23) of 5.23.0rc1 are compared, so a release candidate counts as its release."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])
