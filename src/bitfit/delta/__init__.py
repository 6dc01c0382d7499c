"""The delta file."""
