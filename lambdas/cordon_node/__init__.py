"""State CordonNode."""
