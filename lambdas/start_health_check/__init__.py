"""State StartHealthCheck."""
