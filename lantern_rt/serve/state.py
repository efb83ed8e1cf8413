"""State that all requests of a server share: models, limits, API keys, status and memory of bodies."""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.requests import Request as HttpRequest

from .. import __version__
from ..errors import RequestError
from ..inputs import convert_read_errors, format_value, read_regular_file
from ..subjects.image_files import BYTES_LIMIT
from .backend import ImageBackend
from .metrics import Metrics
from .protocol import GenerationRequest, HttpError, check_and_set_defaults

MAX_KEY_FILE_BYTES = 1 << 20
KEY_VARIABLE = "LANTERN_RT_API_KEY"  # environment variable of the API key


@dataclass(frozen=True)
class ServerLimits:
    """Limits of requests and access rules."""

    deadline: float = 600.0  # maximum duration of a request in seconds
    max_body_bytes: int = 64 << 10  # of a body without its images
    max_form_bytes: int = BYTES_LIMIT  # of a body with images
    body_timeout: float = 20.0  # maximum time in seconds to receive a body
    max_total_body_bytes: int = 1 << 27  # of what all bodies have beyond `max_body_bytes`
    api_key_file: Path | None = None  # None: the environment variable; without it, no key is needed
    methods: Sequence[str] = ()  # methods that requests may select, besides qualities; empty: all
    max_n: int = 10  # images per request
    aliases: Mapping[str, str] = field(default_factory=dict)  # additional name -> name of a model
    mapped_sizes: Mapping[str, str] = field(default_factory=dict)  # size in a request -> size of the images, or `auto`


def read_api_keys(path: Path) -> dict[bytes, str]:
    """Read API keys from a file, as `parse_api_keys` does."""
    with convert_read_errors(path, "a file of API keys, one per line", RequestError, "give another file"):
        text = read_regular_file(path, MAX_KEY_FILE_BYTES).decode("utf-8-sig")
    return parse_api_keys(text, "api_key_file", str(path))


def parse_api_keys(text: str, field: str, source_name: str) -> dict[bytes, str]:
    """Parse API keys, one per line, perhaps after a name; return their names by their hashes.

    Empty lines and lines that begin with # are ignored. A key without a name is named by the first digits of its hash.
    """
    lines = [line.strip() for line in text.splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise RequestError(field=field, found=f"no key in {source_name}", expected="one key per line")
    if not all(key.isascii() for key in keys):
        raise RequestError(field=field, found=f"a non-ASCII key in {source_name}", expected="ASCII keys")
    hashes = {_hash_api_key(line.split()[-1]): line for line in keys}
    return {key: " ".join(line.split()[:-1]) or f"key {key.hex()[:8]}" for key, line in hashes.items()}


class BodyMemoryBudget:
    """Memory budget for the large bodies of all requests, of which every caller may use as much as remains free.

    So memory always remains for other callers. Small bodies need no budget, as the number of connections is limited.
    """

    def __init__(self, max_bytes: int) -> None:
        self._free = max_bytes
        self._held = Tally[str]()

    @contextmanager
    def open_account(self, caller: str) -> Iterator[Callable[[int], None]]:
        """Yield a function that reserves bytes until the block ends, or raises `HttpError` if they are too many."""
        reserved = 0

        def reserve(num_bytes: int) -> None:
            nonlocal reserved
            if self._held[caller] + num_bytes > self._free - num_bytes:
                remedy = "try again when other requests are finished"
                raise HttpError(429, "no memory for the body", "busy", 5, field="body", remedy=remedy)
            self._adjust_usage(caller, num_bytes)
            reserved += num_bytes

        try:
            yield reserve
        finally:
            self._adjust_usage(caller, -reserved)

    def _adjust_usage(self, caller: str, num_bytes: int) -> None:
        self._free -= num_bytes
        self._held[caller] += num_bytes
        self._held = +self._held


class ServerState:
    """State of one server."""

    def __init__(self, server_limits: ServerLimits) -> None:
        self.server_limits = server_limits
        self.keys: dict[bytes, str] = {}
        self.load_api_keys()
        self.body_memory = BodyMemoryBudget(server_limits.max_total_body_bytes)
        self.metrics = Metrics()
        self.backends: dict[str, ImageBackend] = {}  # by the name of the model; empty until all models are loaded
        self.active_requests = 0  # requests for images that are being handled
        self.draining = False
        self.started = int(time.time())

    @property
    def status(self) -> str:
        """Status of the server: `loading`, `ready`, `draining`, or `failed` if a model cannot generate images."""
        if self.draining:
            return "draining"
        if not all(backend.is_alive for backend in self.backends.values()):
            return "failed"
        return "ready" if self.backends else "loading"

    @property
    def version_info(self) -> dict[str, Any]:
        digests = {name: backend.describe()["digest"] for name, backend in self.backends.items()}
        return {"version": __version__, "models": digests}

    def check_accepting_requests(self) -> None:
        """Raise `HttpError` if the server is stopping or its models are not loaded yet."""
        if self.draining:
            raise HttpError(503, "the server is stopping", "draining", 5, remedy="use another server")
        if not self.backends:
            raise HttpError(503, "models are loading", "loading", 2, remedy="try again in a few seconds")

    def load_api_keys(self) -> None:
        """Read the API keys from the file or the environment variable. After an error, the old keys stay valid."""
        if self.server_limits.api_key_file is not None:
            self.keys = read_api_keys(self.server_limits.api_key_file)
        elif KEY_VARIABLE in os.environ:  # an empty variable is an error, as a server without keys is open to all
            self.keys = parse_api_keys(os.environ[KEY_VARIABLE], KEY_VARIABLE, "the environment variable")

    def check_api_key(self, http_request: HttpRequest) -> str:
        """Return the name of a request's API key, empty if the server needs none; raise `HttpError` for a wrong key."""
        if not self.keys:
            return ""
        scheme, _, key = http_request.headers.get("authorization", "").partition(" ")
        digest = _hash_api_key(key.strip())
        if scheme.lower() != "bearer" or digest not in self.keys:
            raise HttpError(401, "invalid API key", "invalid_api_key", field="authorization", expected="`Bearer KEY`")
        return self.keys[digest]

    def apply_limits(self, raw_requests: Iterable[GenerationRequest]) -> list[GenerationRequest]:
        """Check requests against the server's limits, and return them with all defaults set and sizes mapped."""
        server_limits = self.server_limits
        requests = [check_and_set_defaults(request, server_limits.deadline) for request in raw_requests]
        for request in requests:
            method = (request.method or "").partition(":")[0]
            if server_limits.methods and method and method not in server_limits.methods:  # qualities are always allowed
                raise HttpError(
                    400, field="method", found=format_value(method), expected=" or ".join(server_limits.methods)
                )
        if (images := sum(request.n or 1 for request in requests)) > server_limits.max_n:
            raise HttpError(400, field="n", found=f"{images}", expected=f"at most {server_limits.max_n}")
        sizes = [server_limits.mapped_sizes.get(request.size or "", request.size) for request in requests]
        return [request.model_copy(update={"size": size}) for request, size in zip(requests, sizes, strict=True)]

    def find_backend(self, name: str | None) -> ImageBackend:
        """Return the backend of a model by its name or alias, or raise `HttpError`; None: the first model."""
        if name is None:
            return next(iter(self.backends.values()))
        name = self.server_limits.aliases.get(name, name)
        if name not in self.backends:
            names = ", ".join([*self.backends, *self.server_limits.aliases])
            remedy = "`serve --alias` adds names"
            actual = format_value(name)
            raise HttpError(404, code="model_not_found", field="model", found=actual, expected=names, remedy=remedy)
        return self.backends[name]


def _hash_api_key(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
