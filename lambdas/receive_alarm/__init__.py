"""Target of the bus rule for corruption alarms."""
