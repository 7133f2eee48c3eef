"""The recovery's handlers: a folder per function, reading as the workflow; `domain` decides, `adapters` act."""
