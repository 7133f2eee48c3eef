"""A Kubernetes API server for one machine that answers as a real one does where the recovery can notice."""
