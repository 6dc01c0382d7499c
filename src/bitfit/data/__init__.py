"""Files to examples; needs no torch."""
