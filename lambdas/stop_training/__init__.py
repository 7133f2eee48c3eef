"""State StopTraining."""
