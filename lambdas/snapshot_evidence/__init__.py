"""State SnapshotEvidence."""
