"""Records to examples, one module per kind of task."""
