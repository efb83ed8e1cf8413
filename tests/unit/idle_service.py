"""Waiting until a service has nothing left to do."""

from __future__ import annotations

import time
from typing import Any

from lantern_rt.service import Service


def left_alone(service: Service) -> None:
    """Wait until the service is done with everybody."""
    held: dict[str, Any] = vars(service)
    deadline = time.monotonic() + 30
    while (left := (service.images, held["_requests"], service.running)) != (0, {}, 0):
        assert time.monotonic() < deadline, left
        time.sleep(0.005)
