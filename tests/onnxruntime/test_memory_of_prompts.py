"""Memory limits of requests to a bundle whose prompts may have any length."""

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

SHORT_PROMPT = "a red fox"
LONG_PROMPT = "a red fox " * 60


@pytest.fixture
def free_bytes(lumina_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Limit the free memory to the bytes that an image with a prompt of 100 tokens needs; return this limit."""
    manifest = open_bundle(lumina_bundle).manifest
    settings = resolve_settings(manifest, {})
    short_bytes, long_bytes = (sum(estimate_image_memory(manifest, settings, tokens).values()) for tokens in (100, 400))
    assert short_bytes < long_bytes
    monkeypatch.setattr("lantern_rt.pipeline.available_memory", lambda: short_bytes)
    return short_bytes


def test_a_prompt_too_long_for_the_memory_is_rejected(lumina_bundle: Path, free_bytes: int) -> None:
    pipe = Pipeline.from_bundle(lumina_bundle, threads=1)
    message = r"memory: found .* free beside the weights, expected .* \(cache .*\) for .* of \d+ tokens; shorten it"
    with pytest.raises(RequestError, match=message):
        pipe(LONG_PROMPT)
    expected = pipe(SHORT_PROMPT, seed=3).codes[0]
    step_queue = Queue[StreamStep | BaseException]()
    with Service(pipe) as service:
        request = service.submit(step_queue.put, SHORT_PROMPT, seed=3, wants_all_steps=False)
        with pytest.raises(RequestError, match=message):
            service.submit(step_queue.put, [SHORT_PROMPT, LONG_PROMPT])
        step = step_queue.get(timeout=60)
    assert isinstance(step, StreamStep)
    assert np.array_equal(step.codes[0], expected)
    assert request.has_ended


def test_a_server_starts_if_an_image_with_a_short_prompt_fits(
    lumina_bundle: Path, free_bytes: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    uvicorn = pytest.importorskip("uvicorn", reason="needs lantern-rt[serve]")
    weights = sum(file.stat().st_size for file in lumina_bundle.iterdir())
    started_servers: list[Any] = []

    def record_server(server: Any, sockets: list[socket.socket]) -> None:
        started_servers.append(server)
        sockets[0].close()

    monkeypatch.setattr(uvicorn.Server, "run", record_server)
    for available_bytes, exit_code in ((free_bytes + 4 * weights, 0), (free_bytes // 4, 2)):
        monkeypatch.setattr(memory, "available_memory", lambda available_bytes=available_bytes: available_bytes)
        assert run_program(["serve", str(lumina_bundle), "--port", "0"]) == exit_code
    assert len(started_servers) == 1
    assert "memory: found" in capsys.readouterr().err.splitlines()[-1]
