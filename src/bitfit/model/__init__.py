"""The base, the names of its parameters, and what can be selected."""
