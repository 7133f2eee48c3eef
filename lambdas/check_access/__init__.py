"""Says whether this deployment can reach what it will need, before it has to."""
