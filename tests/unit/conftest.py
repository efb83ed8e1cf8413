"""Fixtures of small bundles, and a profile of property tests without a time limit, as most enumerate many cases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("patient", deadline=None, max_examples=60)
settings.load_profile("patient")


@pytest.fixture
def system_files(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Replace the files below /proc and /sys by the files in this dictionary, text by path."""
    files: dict[str, str] = {}
    read = Path.read_text

    def read_text(path: Path, *arguments: Any, **options: Any) -> str:
        if not str(path).startswith(("/proc/", "/sys/")):
            return read(path, *arguments, **options)
        if str(path) not in files:
            raise FileNotFoundError(path)
        return files[str(path)]

    monkeypatch.setattr(Path, "read_text", read_text)
    return files


@pytest.fixture(scope="session")
def words_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a bundle with prompts of known words and 6 x 6 codes; tests must not change it."""
    return _tiny(tmp_path_factory, "words")


@pytest.fixture(scope="session")
def class_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a bundle with 10 classes; tests must not change it."""
    return _tiny(tmp_path_factory, "class")


@pytest.fixture(scope="session")
def embeddings_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a bundle with text embeddings; tests must not change it."""
    return _tiny(tmp_path_factory, "embeddings")


@pytest.fixture(scope="module")
def pipe(words_bundle: Path) -> Any:
    """Return a pipeline of `words_bundle`."""
    from lantern_rt import Pipeline

    return Pipeline.from_bundle(words_bundle, threads=1)


def _tiny(factory: pytest.TempPathFactory, kind: str) -> Path:
    pytest.importorskip("onnx")
    from tiny_bundle import make_tiny_bundle

    return make_tiny_bundle(factory.mktemp(kind) / "tiny", kind)
