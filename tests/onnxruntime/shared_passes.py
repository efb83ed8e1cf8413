"""Requests that share the forward passes of a service."""

from __future__ import annotations

import queue
from typing import Any

from lantern_rt import Pipeline
from lantern_rt.results import StreamStep
from lantern_rt.service import Service


def generate_in_shared_passes(pipe: Pipeline, requests: list[dict[str, Any]], batch: int) -> list[StreamStep]:
    """Submit requests at the same time to a service with passes of `batch` images; return their last steps."""
    step_queues = [queue.SimpleQueue[StreamStep | BaseException]() for _ in requests]
    with Service(pipe, max_images_per_pass=batch) as service:
        for step_queue, request in zip(step_queues, requests, strict=True):
            service.submit(step_queue.put, **request, wants_all_steps=False)
        steps = [step_queue.get(timeout=120) for step_queue in step_queues]
    assert all(isinstance(step, StreamStep) for step in steps), steps
    return steps  # type: ignore[return-value]
