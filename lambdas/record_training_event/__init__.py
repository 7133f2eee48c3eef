"""Target of the bus rule for checkpoint and resume events."""
