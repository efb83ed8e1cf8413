"""Bundles: manifest, files, and external data of graphs."""
