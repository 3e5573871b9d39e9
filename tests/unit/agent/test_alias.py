"""The names that scripts written for HyperPod import."""

from __future__ import annotations

import elastipod.elastic_event
import hyperpod_elastic_agent
from hyperpod_elastic_agent.elastic_event_handler import elastic_event_detected


def test_the_event_is_the_librarys() -> None:
    assert elastic_event_detected is elastipod.elastic_event.elastic_event_detected
    assert hyperpod_elastic_agent.__version__
