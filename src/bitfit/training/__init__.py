"""Training deltas."""
