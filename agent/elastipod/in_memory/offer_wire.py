"""Offers as they travel between ranks: JSON of a bounded size, checked field by field. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from elastipod.errors import ElastipodError
from elastipod.in_memory.offers import Offer

MAX_OFFER_BYTES = 64 * 1024
MAX_IMAGES = 16
MAX_PARTS = 4096
_VERSION = 3  # of what ranks say to one another while they join a world: it must be the same on all


class BadOffer(ElastipodError):
    """A rank sent something that is no offer; the text says what."""


@dataclass(frozen=True, slots=True)
class RankData:
    """What a rank tells of its data. plan: a digest of its plan. samples: of the job after each step that it offers, by step."""

    plan: str = ""
    samples: Mapping[int, int] = field(default_factory=dict)


NO_DATA = RankData()


@dataclass(frozen=True, slots=True)
class RankOffer:
    """A rank's offer, and what else the others must know of it.

    origin: the generation in whose sample logs the steps up to the offered one are. followed: the step that the rank's state has
    come to by following others, None for most ranks.
    """

    offer: Offer
    origin: int
    followed: int | None = None
    data: RankData = NO_DATA


def encode_offer(offer: RankOffer) -> str:
    """Give the JSON text of an offer."""
    own = offer.offer
    return json.dumps(
        {
            "v": _VERSION,
            "parts": sorted(own.parts),
            "completed": own.completed,
            "is_prepared": own.is_prepared,
            "images": {str(step): sorted(parts) for step, parts in own.images.items()},
            "origin": offer.origin,
            "followed": offer.followed,
            "plan": offer.data.plan,
            "samples": {str(step): samples for step, samples in offer.data.samples.items()},
        }
    )


def decode_offer(text: str) -> RankOffer:
    """Read an offer. Raises BadOffer for anything else, also for one that is too large."""
    if len(text) > MAX_OFFER_BYTES:
        raise BadOffer(f"an offer has {len(text)} bytes; at most {MAX_OFFER_BYTES} are taken")
    try:
        found = json.loads(text)
        if found["v"] != _VERSION:
            raise BadOffer(f"an offer has version {found['v']!r}; all ranks need the same version of elastipod")
        images, samples = found["images"], found["samples"]
        if not isinstance(images, Mapping) or len(images) > MAX_IMAGES:
            raise BadOffer(f"an offer names more than {MAX_IMAGES} images")
        if not isinstance(samples, Mapping) or len(samples) > MAX_IMAGES + 2:
            raise BadOffer(f"an offer names the samples of more than {MAX_IMAGES + 2} steps")
        offer = Offer(
            _parts(found["parts"]),
            _step(found["completed"]),
            bool(found["is_prepared"]),
            {_count(int(step)): _parts(parts) for step, parts in images.items()},
        )
        data = RankData(str(found["plan"]), {_count(int(step)): _count(each) for step, each in samples.items()})
        return RankOffer(offer, _count(found["origin"]), _step(found["followed"]), data)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise BadOffer(f"a rank sent no offer: {error!r}") from error


def _parts(value: Any) -> frozenset[int]:
    if not isinstance(value, list) or len(value) > MAX_PARTS:
        raise BadOffer(f"an offer's parts are no list of at most {MAX_PARTS}")
    return frozenset(_count(each) for each in value)


def _step(value: Any) -> int | None:
    return None if value is None else _count(value)


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 62:
        raise BadOffer(f"an offer has {str(value)[:40]!r} where a count belongs")
    return value
