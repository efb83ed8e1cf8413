"""Property tests have no time limit per example: test machines are shared. Most enumerate much for each example."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("patient", deadline=None, max_examples=60)
settings.load_profile("patient")
