"""State ConfirmSuspect."""
