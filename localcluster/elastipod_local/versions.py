"""Versions of everything that is fetched or built. `go.mod` files and checksums go with them."""

KUBERNETES_VERSION = "v1.34.4"
ETCD_VERSION = "3.6.4"
HELM_VERSION = "v4.1.4"
KUEUE_VERSION = "v0.15.0"
KWOK_VERSION = "v0.8.0"
