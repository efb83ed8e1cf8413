"""The decode loop in NumPy: draft trees, acceptance, sampling. Does not know any backend."""
