"""The AWS and Kubernetes sides of `lambdas.ports`."""
