"""Weights from files, folders and the hub."""
