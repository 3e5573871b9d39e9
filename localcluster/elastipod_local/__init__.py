"""A real multi-node Kubernetes on one Linux machine, without Docker: real control plane, real kubelets, real containers."""
