"""The number types in which a base can be stored. Imports no torch."""

FULL = "float32"
DTYPES = (FULL, "bfloat16", "float16")
