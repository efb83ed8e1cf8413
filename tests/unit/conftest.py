"""Fixtures of small bundles, and a Hypothesis profile without a time limit per example."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

import lantern_rt.extending
from lantern_rt.methods import METHODS, METHODS_BY_PARAMETER, SAMPLING, find_sampling_class
from lantern_rt.runtime.drafters import DRAFTERS
from lantern_rt.runtime.filters import OWN_FILTERS
from lantern_rt.subjects.table import PARTS, WORDS

# Many property tests enumerate all outcomes of an example, which may take longer than the default limit of 200 ms.
settings.register_profile("without-deadline", deadline=None, max_examples=60)
settings.load_profile("without-deadline")


@pytest.fixture
def system_files(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return a dictionary of paths and texts that replaces all files below /proc and /sys."""
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


@pytest.fixture
def own_registrations(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remove what a test registers. It may register inputs and settings, although tests before ran commands."""
    monkeypatch.setattr(lantern_rt.extending, "BUILT_FROM_TABLES", set())
    tables: tuple[dict[Any, Any], ...] = (METHODS, METHODS_BY_PARAMETER, DRAFTERS, SAMPLING, OWN_FILTERS, WORDS)
    originals = [{**table} for table in tables]
    parts = [*PARTS]
    yield
    for table, original in zip(tables, originals, strict=True):
        table.clear()
        table.update(original)
    PARTS[:] = parts
    find_sampling_class.cache_clear()


@pytest.fixture(scope="session")
def words_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a bundle that takes prompts and has a grid of 6 x 6 tokens; tests must not change the files."""
    return _make_bundle(tmp_path_factory, "words")


@pytest.fixture(scope="session")
def class_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a bundle that takes class ids 0 .. 9; tests must not change the files."""
    return _make_bundle(tmp_path_factory, "class")


@pytest.fixture(scope="session")
def embeddings_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a bundle that takes text embeddings; tests must not change the files."""
    return _make_bundle(tmp_path_factory, "embeddings")


@pytest.fixture(scope="module")
def pipe(words_bundle: Path) -> Any:
    from lantern_rt import Pipeline

    return Pipeline.from_bundle(words_bundle, threads=1)


def _make_bundle(factory: pytest.TempPathFactory, kind: str) -> Path:
    pytest.importorskip("onnx")
    from tiny_bundle import make_tiny_bundle

    return make_tiny_bundle(factory.mktemp(kind) / "tiny", kind)
