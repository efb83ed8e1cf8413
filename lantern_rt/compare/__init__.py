"""Comparisons of methods on the same prompts and seeds: speed (`bench`) and image quality (`eval`)."""
