"""A bundle: its manifest, its files, and what their graphs refer to."""
