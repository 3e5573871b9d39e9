"""What all models of the resource share: names on the wire, lenient reading, and ranges of numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from elastipod_operator.core.sizes import MAX_REPLICAS

SINGULAR: Final = "hyperpodpytorchjob"
SHORT_NAMES: Final = ("hpjob", "hyperpodjob")

MAX_COUNT: Final = MAX_REPLICAS
"""The limit of every number of replicas; it also keeps sums and rules cheap for the API server."""

MAX_INT32: Final = 2**31 - 1


class Model(BaseModel):
    """Base of the resource's models: camelCase on the wire, snake_case in Python, immutable.

    Reading is lenient, because the API server has already validated what it stores: unknown keys are ignored and a null
    is the same as an absent field, so that a field with a default never is None. Docstrings of fields become the
    descriptions that `kubectl explain` shows.
    """

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, extra="ignore", frozen=True, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            return {key: value for key, value in data.items() if value is not None}
        return data


Timestamp = AwareDatetime
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
PositiveCount = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Seconds = Annotated[int, Field(ge=0, le=MAX_INT32)]
PositiveSeconds = Annotated[int, Field(ge=1, le=MAX_INT32)]
RestartLimit = Annotated[int, Field(ge=0, le=MAX_INT32)]
Port = Annotated[int, Field(ge=1, le=65535)]
