"""State ChooseCheckpoint."""
