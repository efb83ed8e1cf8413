"""Helper that waits until a service has no requests left."""

from __future__ import annotations

import time
from typing import Any

from lantern_rt.service import Service


def wait_until_idle(service: Service) -> None:
    fields: dict[str, Any] = vars(service)
    deadline = time.monotonic() + 30  # seconds
    while (remaining := (service.num_images, fields["_requests"], service.num_running_images)) != (0, {}, 0):
        assert time.monotonic() < deadline, remaining
        time.sleep(0.005)
