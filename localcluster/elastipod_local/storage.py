"""The cluster's storage that many pods on many nodes may write: class `elastipod-shared`, what a shared file system is elsewhere."""

import json

STORAGE_CLASS = "elastipod-shared"
SHARED_MOUNT = "/mnt/shared"
# Enough for a few claims of the examples; volumes are not limited in size, for they are one folder of this machine.
VOLUMES = 8


def shared_storage() -> str:
    """Give the manifests: the class, and volumes to be claimed, each a folder of its own below the shared folder."""
    storage_class = {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": STORAGE_CLASS},
        "provisioner": "kubernetes.io/no-provisioner",
        "volumeBindingMode": "Immediate",
    }
    volumes = [_volume(f"shared-{number}") for number in range(1, VOLUMES + 1)]
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": [storage_class, *volumes]})


def _volume(name: str) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            "capacity": {"storage": "100Gi"},
            "accessModes": ["ReadWriteMany"],
            "storageClassName": STORAGE_CLASS,
            "persistentVolumeReclaimPolicy": "Retain",
            "hostPath": {"path": f"{SHARED_MOUNT}/{name}", "type": "DirectoryOrCreate"},
        },
    }
