"""Studies: grids of trials as data, run so that nothing is done twice and nothing is lost."""
