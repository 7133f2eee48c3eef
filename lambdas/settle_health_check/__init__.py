"""State SettleHealthCheck."""
