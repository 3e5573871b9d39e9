"""The Elastipod operator: the HyperPodPyTorchJob resource, the decisions about it, and the shell that carries them out."""
