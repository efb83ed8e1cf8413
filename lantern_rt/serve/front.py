"""What all requests of a server share: models, limits, keys, whether it takes work, logs."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from starlette.requests import Request

from ..checks import short
from ..errors import RequestError
from ..user_files import read_plain_file, reading
from .drawing import Drawer, Order
from .metrics import Metrics
from .protocol import HttpError

_LOG = logging.getLogger(__name__)
KEYS_LIMIT = 1 << 20  # bytes of a file of keys


@dataclass(frozen=True)
class Limits:
    """What one request may take, and who may ask.

    deadline: seconds of a request. body: bytes; body_seconds: until all of them are there. keys: hashes of those
    accepted, see `read_keys`; none: anybody's. log_prompts: whether logs hold prompts.
    """

    deadline: float = 600.0
    body: int = 64 << 10
    body_seconds: float = 20.0
    keys: Sequence[bytes] = ()
    log_prompts: bool = False


def read_keys(path: Path) -> list[bytes]:
    """Hashes of the keys in a file, one a line; empty lines and those that begin with # do not count.

    Raises: RequestError: the file cannot be read, or has no key.
    """
    with reading(path, "a file of API keys, one a line", RequestError, "give another file"):
        lines = [line.strip() for line in read_plain_file(path, KEYS_LIMIT).decode("utf-8-sig").splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not all(key.isascii() for key in keys):
        raise RequestError(
            f"api key file: found a key of other characters than ASCII in {path}, which no header carries; change it"
        )
    if not keys:
        raise RequestError(
            f"api key file: found no key in {path}, expected one a line; write one, or leave the file out"
        )
    return [_hash(key) for key in keys]


class Front:
    """One server. drawers: its models by name, when they are ready. active: requests being answered."""

    def __init__(self, limits: Limits) -> None:
        self.limits, self.metrics = limits, Metrics()
        self.drawers: dict[str, Drawer] = {}
        self.active: set[object] = set()
        self.draining = False
        self.started = int(time.time())

    @property
    def status(self) -> str:
        """In a word."""
        return "draining" if self.draining else "ready" if self.drawers else "loading"

    def check_open(self) -> None:
        """Raises: HttpError: requests are not taken yet, or not any more."""
        if self.status == "loading":
            raise HttpError(503, "the models are being loaded; try again in a few seconds", None, "loading", 2)
        if self.draining:
            raise HttpError(503, "the server is about to stop; ask another one", None, "draining", 5)

    def check_key(self, request: Request) -> None:
        """Raises: HttpError: keys are needed, and the request has none of them."""
        if not self.limits.keys:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        given = _hash(key.strip())
        matches = [hmac.compare_digest(given, known) for known in self.limits.keys]  # all of them, at the same pace
        if scheme.lower() != "bearer" or not any(matches):
            raise HttpError(401, "authorization: found no known key, expected `Bearer KEY`", None, "invalid_api_key")

    def drawer(self, name: str | None) -> Drawer:
        """A model by its name; the first one if none is given. Raises: HttpError: there is none of that name."""
        if name is None:
            return next(iter(self.drawers.values()))
        if name not in self.drawers:
            known = ", ".join(self.drawers)
            raise HttpError(404, f"model: found {short(name)}, expected {known}", "model", "model_not_found")
        return self.drawers[name]

    def limited(self, order: Order) -> Order:
        """The order with its deadline. Raises: RequestError: it is later than the server's."""
        most = self.limits.deadline
        if order.deadline is not None and order.deadline > most:
            raise RequestError(f"deadline: found {order.deadline:g} s, expected at most {most:g} s, the server's")
        return replace(order, deadline=order.deadline or most)

    def log(self, request: Request, facts: dict[str, Any]) -> None:
        """One line of JSON about a request; never its prompt, unless asked for."""
        trace = re.fullmatch(
            r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}", request.headers.get("traceparent", "")
        )
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "request_id": request.state.request_id,
            **({"trace_id": trace[1]} if trace else {}),
            "path": request.url.path,
            **facts,
        }
        _LOG.info("%s", json.dumps(line))


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
