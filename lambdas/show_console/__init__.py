"""The console: everything that the recovery knows, for reading."""
