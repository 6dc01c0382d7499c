"""`python -m bitfit`."""

from .cli.main import main

main()
