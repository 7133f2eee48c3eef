"""State RequestApproval (task token)."""
