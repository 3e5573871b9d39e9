"""The import path that existing training scripts use for the elastic event."""

from elastipod.elastic_event import elastic_event_detected

__all__ = ["elastic_event_detected"]
