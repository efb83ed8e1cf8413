"""Comparing methods on the same prompts and seeds: speed (`bench`) and images (`eval`)."""
