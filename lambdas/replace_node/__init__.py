"""State ReplaceNode."""
