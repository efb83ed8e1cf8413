"""Readers of checkpoints: files, folders and the hub."""
