"""Bundles, which are folders with a model: manifest, files, and external data of graphs."""

DOWNLOAD_THREAD = "lantern-rt-download"  # Name of threads that download a file from the hub.
