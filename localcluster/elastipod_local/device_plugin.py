"""The device plugin of a node: announces the units of its fake accelerator to kubelet, and which of them is sick.

`python -m elastipod_local.device_plugin COUNT` is one of the node's services. It ends when kubelet has started again, which
removes the sockets of all plugins, and is started again.
"""

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from elastipod_local.node_config import ETC, SICK_MARK, SLOT_RESOURCE
from elastipod_local.paths import PACKAGE

FOLDER = Path("/var/lib/kubelet/device-plugins")
ENDPOINT = "elastipod.sock"
CHECK_EVERY_S = 0.5
KUBELET_DEADLINE_S = 60
# kubelet listens seconds after this process was started; gRPC itself would try more and more rarely.
RETRIES = [("grpc.max_reconnect_backoff_ms", 500)]

# gRPC looks for messages nowhere else, and not every installation puts this folder there.
sys.path.append(str(PACKAGE.parent))
protos, services = grpc.protos_and_services("elastipod_local/device_plugin.proto")


class DevicePlugin:
    """What kubelet calls. sick: a file; while it exists, the first unit is sick."""

    def __init__(self, count: int, sick: Path) -> None:
        self._count = count
        self._sick = sick

    def GetDevicePluginOptions(self, request: Any, context: Any) -> Any:
        return protos.DevicePluginOptions()

    def ListAndWatch(self, request: Any, context: Any) -> Iterator[Any]:
        """Tell of all units, and again whenever one falls sick or is cured."""
        told = None
        while context.is_active():
            if (units := self._units()) != told:
                yield units
                told = units
            time.sleep(CHECK_EVERY_S)

    def Allocate(self, request: Any, context: Any) -> Any:
        """Give each container the names of its units in SLOT_UNITS, as GPUs are given in NVIDIA_VISIBLE_DEVICES."""
        envs = ({"SLOT_UNITS": ",".join(one.devices_ids)} for one in request.container_requests)
        return protos.AllocateResponse(container_responses=[protos.ContainerAllocateResponse(envs=one) for one in envs])

    def _units(self) -> Any:
        sick = 1 if self._sick.exists() else 0
        health = ["Unhealthy"] * sick + ["Healthy"] * (self._count - sick)
        return protos.ListAndWatchResponse(
            devices=[protos.Device(ID=f"slot-{at}", health=one) for at, one in enumerate(health)]
        )


def serve(plugin: DevicePlugin, folder: Path) -> None:
    """Register with the kubelet of this folder and serve it until it has removed our socket.

    Raises grpc.FutureTimeoutError when it does not listen for a minute, grpc.RpcError when it refuses.
    """
    own = folder / ENDPOINT
    with grpc.insecure_channel(f"unix://{folder}/kubelet.sock", options=RETRIES) as kubelet:
        # Only once it listens: before, it removes what lies in the folder.
        grpc.channel_ready_future(kubelet).result(timeout=KUBELET_DEADLINE_S)
        own.unlink(missing_ok=True)
        server = grpc.server(ThreadPoolExecutor())
        services.add_DevicePluginServicer_to_server(plugin, server)
        server.add_insecure_port(f"unix://{own}")
        server.start()
        asked = protos.RegisterRequest(version="v1beta1", endpoint=ENDPOINT, resource_name=SLOT_RESOURCE)
        services.RegistrationStub(kubelet).Register(asked, timeout=KUBELET_DEADLINE_S)
    while own.exists():
        time.sleep(CHECK_EVERY_S)
    server.stop(grace=None)


if __name__ == "__main__":
    serve(DevicePlugin(int(sys.argv[1]), Path(ETC) / SICK_MARK), FOLDER)
