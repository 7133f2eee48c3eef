"""The cluster on one machine: Kubernetes API, HyperPod control plane, scheduler, kubelet and training operator."""
