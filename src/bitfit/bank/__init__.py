"""The bank: K lanes on one frozen base."""
