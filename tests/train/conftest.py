"""Fixtures for tests of training: shards of training images for drafters and draft heads."""

from __future__ import annotations

from pathlib import Path

import pytest

from lantern_rt.cli.main import run_program


@pytest.fixture(scope="session")
def shards(c2i_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafter") / "data"
    command = ["data", str(c2i_bundle), "--count", "64", "--threads", "1", "--output", str(folder)]
    assert run_program(["train-drafter", *command]) == 0
    return folder
