"""State Escalate (task token)."""
