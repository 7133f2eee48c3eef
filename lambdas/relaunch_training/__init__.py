"""State Relaunch."""
