"""Names that training scripts written for HyperPod import. Their implementation is in `elastipod`.

Parts that only the original agent uses (its socket servers, its rendezvous backend) are not here, because no script needs them.
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
