"""Where this user's measurements lie."""

from __future__ import annotations

from pathlib import Path

import pytest

from lantern_rt.output.files import cache_folder


def test_the_cache_follows_the_systems_custom(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LANTERN_RT_CACHE")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "lantern-rt"
