"""The checks: each gathers evidence on every rank and returns what the pure judge concluded from it."""
