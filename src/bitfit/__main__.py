"""`python -m bitfit`."""

from .cli import main

main()
