"""Fixtures for tests of exports."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from stand_in_hub import serve_hub


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    with serve_hub() as address:
        yield address
