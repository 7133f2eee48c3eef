"""State OpenIncident."""
