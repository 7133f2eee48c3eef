"""State VerifyRecovery (task token)."""
