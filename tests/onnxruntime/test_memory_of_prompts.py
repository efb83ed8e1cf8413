"""The memory of a request depends on the number of tokens of its prompt, if prompts may have any length."""

from __future__ import annotations

import socket
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest

from lantern_rt import Pipeline, RequestError, memory
from lantern_rt.bundle.files import open_bundle
from lantern_rt.cli.main import run_program
from lantern_rt.memory import estimate_image_memory
from lantern_rt.requests import resolve_settings
from lantern_rt.results import StreamStep
from lantern_rt.service import Service

SHORT = "a red fox"
LONG = "a red fox " * 60


@pytest.fixture
def free_bytes(lumina_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Limit free memory to an image with a prompt of 100 tokens."""
    manifest = open_bundle(lumina_bundle).manifest
    settings = resolve_settings(manifest, {})
    few, many = (sum(estimate_image_memory(manifest, settings, tokens).values()) for tokens in (100, 400))
    assert few < many
    monkeypatch.setattr("lantern_rt.pipeline.available_memory", lambda: few)
    return few


def test_a_prompt_too_long_for_the_memory_is_rejected_and_a_shorter_one_is_not(
    lumina_bundle: Path, free_bytes: int
) -> None:
    pipe = Pipeline.from_bundle(lumina_bundle, threads=1)
    message = r"memory: found .* free beside the weights, expected .* \(cache .*\) for .* of \d+ tokens; shorten it"
    with pytest.raises(RequestError, match=message):
        pipe(LONG)
    expected = pipe(SHORT, seed=3).codes[0]
    news_queue = Queue[StreamStep | BaseException]()
    with Service(pipe) as service:
        request = service.submit(news_queue.put, SHORT, seed=3, wants_all_steps=False)
        with pytest.raises(RequestError, match=message):
            service.submit(news_queue.put, [SHORT, LONG])
        step = news_queue.get(timeout=60)
    assert isinstance(step, StreamStep)
    assert np.array_equal(step.codes[0], expected)
    assert request.has_ended


def test_a_server_starts_if_an_image_with_a_short_prompt_fits(
    lumina_bundle: Path, free_bytes: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    uvicorn = pytest.importorskip("uvicorn", reason="needs lantern-rt[serve]")
    weights = sum(file.stat().st_size for file in lumina_bundle.iterdir())
    started: list[Any] = []

    def start(server: Any, sockets: list[socket.socket]) -> None:
        started.append(server)
        sockets[0].close()

    monkeypatch.setattr(uvicorn.Server, "run", start)
    for free, code in ((free_bytes + 4 * weights, 0), (free_bytes // 4, 2)):
        monkeypatch.setattr(memory, "available_memory", lambda free=free: free)
        assert run_program(["serve", str(lumina_bundle), "--port", "0"]) == code
    assert len(started) == 1
    assert "memory: found" in capsys.readouterr().err.splitlines()[-1]
