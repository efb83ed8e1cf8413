"""Decode loop in NumPy: draft trees, acceptance, sampling. The package does not depend on any backend."""
