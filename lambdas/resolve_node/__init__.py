"""State ResolveNode."""
