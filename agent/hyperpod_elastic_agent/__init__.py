"""Names that training scripts written for HyperPod import; everything behind them lives in `elastipod`.

What the original's agent uses itself (its socket servers, its rendezvous backend) is not here: no script needs it.
"""

from hyperpod_elastic_agent.ipc import (
    CheckpointDiscoverySocketClient,
    InProcessRestartSocketClient,
    InProcessRestartSocketMessageType,
    RestartMode,
    TrainingManager,
)

__all__ = [
    "CheckpointDiscoverySocketClient",
    "InProcessRestartSocketClient",
    "InProcessRestartSocketMessageType",
    "RestartMode",
    "TrainingManager",
]
__version__ = "0.1.0"
