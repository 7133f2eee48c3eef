"""A HyperPod control plane for one machine, held to botocore's own model of the service."""
