"""The state of a rank's random number generators: Python's, torch's, NumPy's and the accelerator's, if in use."""

from __future__ import annotations

import base64
import random
import sys
from typing import Any

import torch

from elastipod.checkpoint.value_codec import decode_value, encode_value
from elastipod.torch_compat import seed_torch


def random_state() -> str:
    """Return the state of all generators of this process as text."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": _text(torch.get_rng_state())}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = _text(torch.cuda.get_rng_state())
    if (numpy := sys.modules.get("numpy")) is not None and hasattr(numpy, "random"):
        name, keys, position, has_gauss, gauss = numpy.random.get_state()
        state["numpy"] = (name, keys.tolist(), position, has_gauss, gauss)
    return encode_value(state, "the random state")


def restore_random_state(text: str) -> None:
    """Restore the generators to a state. Generators that it does not contain are left alone."""
    state = decode_value(text)
    random.setstate(state["python"])
    torch.set_rng_state(_tensor(state["torch"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_tensor(state["cuda"]))
    if "numpy" in state:
        import numpy

        numpy.random.set_state(state["numpy"])


def rank_seed(step: int, rank: int) -> int:
    """Return the seed of a rank's generators at a step."""
    return (step * 0x9E3779B97F4A7C15 + rank * 0xC2B2AE3D27D4EB4F + 1) % (1 << 63)


def seed_new_rank(step: int, rank: int) -> None:
    """Seed the generators of a rank that the saving run did not have, from the step and the rank alone."""
    seed = rank_seed(step, rank)
    random.seed(seed)
    seed_torch(seed)
    if (numpy := sys.modules.get("numpy")) is not None and hasattr(numpy, "random"):
        numpy.random.seed(seed % (1 << 32))


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.tolist())).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
