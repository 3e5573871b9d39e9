"""The configuration files of a node: what kubelet, containerd, the CNI plugins and process 1 read. Nothing is run here."""

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from elastipod_local.addressing import Addressing
from elastipod_local.state import NodeOptions

PAUSE_IMAGE = "docker.io/elastipod/pause:1"
SLOT_RESOURCE = "elastipod.io/slot"
SICK_MARK = "sick-device"  # a file in ETC, while the first unit of the accelerator is sick
SHARED_MOUNT = "/mnt/shared"
SITE_PACKAGES_MOUNT = "/opt/elastipod/site-packages"

# Inside a node; the folder of the node on the machine is mounted there.
ETC = "/etc/elastipod-node"
RUNTIME_ENDPOINT = "/run/containerd/containerd.sock"

# Folder of the node on the machine -> where the node sees it. These hold what must survive a power loss, or what must
# not lie on the node's overlay (containerd cannot stack its own overlays on another one).
NODE_FOLDERS = {
    "etc": ETC,
    "kubelet": "/var/lib/kubelet",
    "containerd": "/var/lib/containerd",
    "cni": "/var/lib/cni",
    "cni-config": "/etc/cni/net.d",
}


@dataclass(frozen=True, slots=True)
class InitConfig:
    """What process 1 of a node is told; all paths are those of the machine."""

    node: str
    folder: str
    logs: str  # becomes /var/log; outlives the node
    shared: str
    visible: tuple[str, ...]  # folders of the machine that the node needs, wherever they are mounted from
    cgroups: tuple[tuple[str, str, str], ...]  # mount point, kind, options of each hierarchy
    commands: dict[str, list[str]]  # the services, in the order of their start

    def encode(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def decode(cls, text: str) -> "InitConfig":
        record = json.loads(text)
        record["visible"] = tuple(record["visible"])
        record["cgroups"] = tuple(tuple(entry) for entry in record["cgroups"])
        return cls(**record)


def kubelet(addressing: Addressing, index: int, options: NodeOptions, *, cpus: int, memory_mib: int) -> str:
    """Give kubelet's configuration. cpus, memory_mib: what the machine has; the excess over `options` is reserved."""
    address = str(addressing.node_address(index))
    config: dict[str, Any] = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": address,
        "healthzBindAddress": "127.0.0.1",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": f"{ETC}/ca.crt"},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": f"{ETC}/kubelet.crt",
        "tlsPrivateKeyFile": f"{ETC}/kubelet.key",
        "containerRuntimeEndpoint": f"unix://{RUNTIME_ENDPOINT}",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": "/",
        "enforceNodeAllocatable": ["pods"],
        "failCgroupV1": False,
        "failSwapOn": False,
        # Not every machine lets root raise priorities of processes and limits of open files.
        "oomScoreAdj": 0,
        "maxOpenFiles": min(1_000_000, os.sysconf("SC_OPEN_MAX")),
        "resolvConf": f"{ETC}/resolv.conf",
        # The cluster has no DNS and nothing answers there; with none at all kubelet would warn about every single pod.
        "clusterDNS": [str(addressing.api_address)],
        "clusterDomain": "cluster.local",
        # Images are brought in by hand and could not be pulled again; the machine's disk is not the node's to guard.
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "serializeImagePulls": False,
        "systemReserved": reserved(options, cpus=cpus, memory_mib=memory_mib),
    }
    return json.dumps(config, indent=1)


def reserved(options: NodeOptions, *, cpus: int, memory_mib: int) -> dict[str, str]:
    """Give what kubelet holds back of the machine so that pods get what `options` say."""
    held: dict[str, str] = {}
    if options.cpus is not None and options.cpus < cpus:
        held["cpu"] = f"{round((cpus - options.cpus) * 1000)}m"
    if options.memory_mib is not None and options.memory_mib < memory_mib:
        held["memory"] = f"{memory_mib - options.memory_mib}Mi"
    return held


def containerd() -> str:
    """Give containerd's configuration (version 2, as Debian's 1.6 reads it)."""
    unused = ["aufs", "btrfs", "zfs", "devmapper"]
    disabled = [f"io.containerd.snapshotter.v1.{name}" for name in unused]
    disabled += ["io.containerd.internal.v1.tracing", "io.containerd.tracing.processor.v1.otlp"]
    return f"""version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
disabled_plugins = {json.dumps(disabled)}
[grpc]
  address = "{RUNTIME_ENDPOINT}"
[plugins."io.containerd.internal.v1.opt"]
  path = "/var/lib/containerd/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "/etc/cni/net.d"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      base_runtime_spec = "{ETC}/base-spec.json"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
"""


def base_spec(default_spec: str, site_packages: Path) -> str:
    """Add the shared Python environment, read-only, to the specification that containerd gives every container."""
    spec = json.loads(default_spec)
    # The default of 1024 open files is ctr's own; containers of a kubelet inherit containerd's limits.
    spec["process"].pop("rlimits", None)
    mount = {
        "destination": SITE_PACKAGES_MOUNT,
        "type": "bind",
        "source": str(site_packages),
        "options": ["rbind", "ro", "nosuid", "nodev"],
    }
    spec["mounts"] = [entry for entry in spec["mounts"] if entry["destination"] != SITE_PACKAGES_MOUNT] + [mount]
    return json.dumps(spec)


def cni(addressing: Addressing, index: int) -> str:
    """Give the CNI configuration: a bridge inside the node, addresses out of the node's own /24, no masquerading."""
    ranges = [[{"subnet": str(addressing.pod_network(index))}]]
    return json.dumps(
        {
            "cniVersion": "0.4.0",
            "name": "elastipod",
            "plugins": [
                {
                    "type": "bridge",
                    "bridge": "cni0",
                    "isGateway": True,
                    "ipMasq": False,
                    "hairpinMode": True,
                    "ipam": {"type": "host-local", "ranges": ranges, "routes": [{"dst": "0.0.0.0/0"}]},
                },
                {"type": "portmap", "capabilities": {"portMappings": True}},
            ],
        },
        indent=1,
    )


def services(
    node: str, programs: dict[str, Path], addressing: Addressing, index: int, slots: int
) -> dict[str, list[str]]:
    """Give the command lines of a node's services, in the order of their start."""
    labels = "node.kubernetes.io/instance-type=local"
    plugin = {"device-plugin": [sys.executable, "-m", "elastipod_local.device_plugin", str(slots)]}
    return {
        "containerd": ["containerd", "--config", f"{ETC}/containerd.toml"],
        "kube-proxy": [
            str(programs["kube-proxy"]),
            f"--kubeconfig={ETC}/kube-proxy.kubeconfig",
            f"--hostname-override={node}",
            "--proxy-mode=iptables",
            f"--cluster-cidr={addressing.cluster_network}",
            # These sysctls belong to the whole machine.
            "--conntrack-max-per-core=0",
            "--conntrack-tcp-timeout-established=0",
            "--conntrack-tcp-timeout-close-wait=0",
            "--metrics-bind-address=127.0.0.1:10249",
            "--healthz-bind-address=127.0.0.1:10256",
            "--oom-score-adj=0",
        ],
        "kubelet": [
            str(programs["kubelet"]),
            f"--config={ETC}/kubelet.json",
            f"--kubeconfig={ETC}/kubelet.kubeconfig",
            f"--hostname-override={node}",
            f"--node-ip={addressing.node_address(index)}",
            f"--node-labels={labels}",
        ],
        **(plugin if slots else {}),
    }
