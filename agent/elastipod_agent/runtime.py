"""What every part of the agent works with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from elastipod_agent.log import EventLog
from elastipod_agent.settings import Settings
from elastipod_agent.workers.output_pump import OutputPump
from elastipod_agent.workers.reaper import Reaper


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRuntime:
    """Lives as long as the agent. root: its private folder; environ: what workers inherit."""

    settings: Settings
    root: Path
    environ: Mapping[str, str]
    reaper: Reaper
    pump: OutputPump
    log: EventLog
