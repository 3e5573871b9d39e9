"""The field growth. It has a file of its own so that `core` does not load the models, and with them pydantic."""

from __future__ import annotations

from enum import StrEnum


class GrowthMode(StrEnum):
    """How many pods a job requests beyond its size, before there is room for them."""

    NEXT_INCREMENT = "NextIncrement"
    SPARE_CAPACITY_ONLY = "SpareCapacityOnly"
    MAXIMUM = "Maximum"
