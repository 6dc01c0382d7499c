"""Studies: grids of trials as data, run so that nothing is done twice and nothing is lost."""

SEARCHES = ("first-seed", "all")
"""Whether all rates are tried on the first seed only or on all seeds."""
