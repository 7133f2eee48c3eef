"""State CloseIncident."""
