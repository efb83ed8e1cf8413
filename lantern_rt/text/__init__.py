"""Prompts as token ids."""
