"""Whether a text names an object of Kubernetes. Pure."""

from __future__ import annotations

import re


def boundaries(name: str) -> str:
    """Give the pattern of a name that is no part of a longer one: `llm` is in "pod llm.", not in "llm-2", "my-llm" or "llm.v2"."""
    return rf"(?<![\w-])(?<!\w\.){re.escape(name)}(?![\w-])(?!\.\w)"


def mentions(text: str, name: str) -> bool:
    """Whether a text names an object."""
    return re.search(boundaries(name), text) is not None
