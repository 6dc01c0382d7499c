"""Answers from deltas, and exporting them."""
