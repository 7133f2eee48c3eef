"""The HTTP API: the incident's page and its decision."""
