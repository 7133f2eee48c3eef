"""State ReadHistory."""
