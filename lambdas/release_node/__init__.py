"""State ReleaseNode."""
