"""Clients of the agent's socket, for training scripts in a pod. Standard library only."""

from elastipod.ipc.clients import CheckpointDiscoverySocketClient as CheckpointDiscoverySocketClient
from elastipod.ipc.clients import HyperPodPLRException as HyperPodPLRException
from elastipod.ipc.clients import InProcessRestartSocketClient as InProcessRestartSocketClient
from elastipod.ipc.clients import InProcessRestartSocketMessageType as InProcessRestartSocketMessageType
from elastipod.ipc.clients import TrainingManager as TrainingManager
from elastipod.ipc.connections import HyperPodIPCException as HyperPodIPCException
from elastipod.ipc.protocol import CheckpointType as CheckpointType
from elastipod.ipc.protocol import RestartMode as RestartMode
