"""Tests that an exception of a signal handler ends the reading of a checkpoint and reaches the caller unchanged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lantern_rt.export.checkpoints.files import read_tokenizer, read_weights
from lantern_rt.export.checkpoints.hub import fetch_checkpoint


def test_a_signal_handlers_timeout_ends_reading(
    tmp_path: Path, interrupt: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights")
    monkeypatch.setattr("lantern_rt.export.checkpoints.files.load_file", interrupt)
    with pytest.raises(TimeoutError):
        read_weights(path)
    monkeypatch.setattr("lantern_rt.export.checkpoints.files.parse_tokenizer", interrupt)
    with pytest.raises(TimeoutError):
        read_tokenizer(path, 8)


def test_a_signal_handlers_timeout_ends_a_fetch(
    tmp_path: Path, interrupt: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", interrupt)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: str(tmp_path / "file"))
    with pytest.raises(TimeoutError):
        fetch_checkpoint("hf:owner/name/file")
