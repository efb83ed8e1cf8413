"""Comparing methods on the same prompts and seeds: speed (`bench`), images (`eval`), and the race (`tune`)."""
