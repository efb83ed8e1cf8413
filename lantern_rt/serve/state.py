"""State that all requests of a server share: models, limits, API keys, status and metrics."""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter as Tally
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
    values,
)
from starlette.requests import Request as HttpRequest

from .. import __version__
from ..edits import BYTES_LIMIT
from ..errors import RequestError
from ..inputs import convert_read_errors, format_value, read_plain_file
from .backend import ImageBackend
from .log import RequestRecord
from .protocol import Completion, GenerationRequest, HttpError, set_defaults

MAX_KEY_FILE_BYTES = 1 << 20
DISCONNECTED = 499  # status in logs and metrics if the client disconnected
KEY_VARIABLE = "LANTERN_RT_API_KEY"  # environment variable of the API key
BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)  # bounds of histograms in seconds


@dataclass(frozen=True)
class ServerLimits:
    """Limits of requests and access rules.

    Args:
        deadline: maximum duration of a request in seconds.
        max_body_bytes: maximum size of a JSON body.
        max_form_bytes: maximum size of a body that may contain images.
        body_timeout: maximum time in seconds to receive a body.
        max_total_body_bytes: maximum size of the bodies of all requests together.
        api_key_file: file of valid API keys, see `read_keys`; None: no key is needed.
        methods: names of the methods that requests may select, besides qualities; empty: all.
        max_n: maximum number of images per request.
        aliases: additional names of models, alias to model.
        mapped_sizes: sizes that requests may name, to the sizes of the models, or `auto`.
        own_sampling: whether `POST /generate` ignores a request's sampling settings.
    """

    deadline: float = 600.0
    max_body_bytes: int = 64 << 10
    max_form_bytes: int = BYTES_LIMIT
    body_timeout: float = 20.0
    max_total_body_bytes: int = 1 << 27
    api_key_file: Path | None = None
    methods: Sequence[str] = ()
    max_n: int = 10
    aliases: Mapping[str, str] = field(default_factory=dict)
    mapped_sizes: Mapping[str, str] = field(default_factory=dict)
    own_sampling: bool = False


def read_keys(path: Path) -> dict[bytes, str]:
    """Read API keys from a file; see `parse_keys`. Raises: RequestError: the file cannot be read, or has no key."""
    with convert_read_errors(path, "a file of API keys, one per line", RequestError, "give another file"):
        text = read_plain_file(path, MAX_KEY_FILE_BYTES).decode("utf-8-sig")
    return parse_keys(text, "api_key_file", str(path))


def parse_keys(text: str, field: str, source: str) -> dict[bytes, str]:
    """Parse API keys: a key, or a name and a key, on each line.

    Empty lines and lines that begin with # are ignored.

    Args:
        field: parameter or environment variable that gave the keys, for the error message.
        source: place of the keys, for the error message.

    Returns:
        The name of each key by the hash of the key. A key without a name is named by the first digits of the hash.

    Raises:
        RequestError: there is no key, or a key has other characters than ASCII.
    """
    lines = [line.strip() for line in text.splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise RequestError(field=field, found=f"no key in {source}", expected="one key per line")
    if not all(key.isascii() for key in keys):
        raise RequestError(field=field, found=f"a key in {source} with other characters", expected="ASCII keys")
    hashes = {_hash_key(line.split()[-1]): line for line in keys}
    return {key: " ".join(line.split()[:-1]) or f"key {key.hex()[:8]}" for key, line in hashes.items()}


class BodyMemory:
    """Memory budget for request bodies. A caller may hold at most as much as stays free, so others always find room."""

    def __init__(self, size: int) -> None:
        self._free = size
        self._held = Tally[Hashable]()

    @contextmanager
    def reserve(self, caller: Hashable, size: int) -> Iterator[None]:
        """Allocate `size` bytes for a body while the block runs. Raises: HttpError: the caller exceeds its share."""
        if self._held[caller] + size > self._free - size:
            remedy = "try again when other requests are finished"
            raise HttpError(
                429, "no memory for the body", "busy", 5, field="body", found=f"{size:,} bytes", remedy=remedy
            )
        self._add(caller, size)
        try:
            yield
        finally:
            self._add(caller, -size)

    def _add(self, caller: Hashable, size: int) -> None:
        self._free -= size
        self._held[caller] += size
        self._held = +self._held


class Metrics:
    """Prometheus metrics of one server."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # time stamps that no dashboard shows
        values.ValueClass = values.MutexValue  # not files in PROMETHEUS_MULTIPROC_DIR: one process serves
        registry = self.registry = CollectorRegistry()
        ProcessCollector(registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"lantern_{name}", text, ("model", *labels), registry=registry)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(f"lantern_{name}_seconds", text, ("model",), buckets=BUCKETS, registry=registry)

        self.requests = counter("requests", "Finished requests, by HTTP status.", "code")
        self.images = counter("images", "Generated images, by method.", "method")
        self.aborted = counter("aborted", "Requests that ended early, by reason: disconnected, deadline.", "reason")
        self.tokens = counter("tokens", "Sampled tokens.")
        self.passes = counter("target_passes", "Target passes, each counted once for every image in it.")
        self.tvd = counter("realised_tvd", "Total variation distance caused by relaxed acceptance, summed over tokens.")
        self.queue = histogram("queue", "Seconds before the first forward pass of a request.")
        self.request = histogram("request", "Seconds of a whole request.")
        self.picture = histogram("picture", "Seconds to decode and encode the images of a request.")
        self._running = Gauge("lantern_images_running", "Images being generated.", ("model",), registry=registry)
        self._waiting = Gauge("lantern_images_waiting", "Queued images.", ("model",), registry=registry)
        labels = ("model", "bundle", "digest", "version")
        self._models = Gauge("lantern_model_info", "Models, each with the value 1.", labels, registry=registry)

    def count_request(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        self.requests.labels(record.model, str(record.status)).inc()
        if record.status in (DISCONNECTED, 504):
            self.aborted.labels(record.model, "deadline" if record.status == 504 else "disconnected").inc()

    def count_completion(self, completion: Completion) -> None:
        """Count the images of a request and their costs."""
        figures = completion.figures
        model = figures.model
        # Methods are labelled by name alone: parameters would make any number of labels.
        self.images.labels(model, figures.method.partition(":")[0]).inc(len(figures.seeds))
        self.tokens.labels(model).inc(completion.output_tokens)
        self.passes.labels(model).inc(figures.target_passes)
        self.tvd.labels(model).inc(figures.realised_tvd_per_token * completion.output_tokens)
        self.queue.labels(model).observe(figures.queue_seconds)
        self.request.labels(model).observe(figures.seconds)
        self.picture.labels(model).observe(figures.picture_seconds)

    def format_text(self, backends: Iterable[ImageBackend]) -> bytes:
        """Return all metrics in Prometheus' text format."""
        for backend in backends:
            facts = backend.describe()
            self._models.labels(backend.name, facts["bundle"], facts["digest"], facts["version"]).set(1)
            for gauge, value in zip((self._running, self._waiting), backend.measure_load(), strict=True):
                gauge.labels(backend.name).set(value)
        return generate_latest(self.registry)


class ServerState:
    """State of one server.

    Attributes:
        backends: models by name; empty until all are loaded.
        active_requests: number of requests being handled.
        draining: whether the server is stopping.
    """

    def __init__(self, limits: ServerLimits) -> None:
        self.limits = limits
        self.keys: dict[bytes, str] = {}
        self.load_keys()
        self.body_memory = BodyMemory(limits.max_total_body_bytes)
        self.metrics = Metrics()
        self.backends: dict[str, ImageBackend] = {}
        self.active_requests = 0
        self.draining = False
        self.started = int(time.time())

    @property
    def status(self) -> str:
        """`loading`, `ready`, `draining`, or `failed` if a model can no longer generate images."""
        if self.draining:
            return "draining"
        if not all(backend.alive for backend in self.backends.values()):
            return "failed"
        return "ready" if self.backends else "loading"

    @property
    def identity(self) -> dict[str, Any]:
        """Version of the program, and the digest of each model's bundle."""
        digests = {name: backend.describe()["digest"] for name, backend in self.backends.items()}
        return {"version": __version__, "models": digests}

    def check_open(self) -> None:
        """Raise `HttpError` unless the server accepts requests."""
        if self.draining:
            raise HttpError(503, "the server is stopping", "draining", 5, remedy="use another server")
        if not self.backends:
            raise HttpError(503, "models are loading", "loading", 2, remedy="try again in a few seconds")

    def load_keys(self) -> None:
        """Read the API keys again, from the file or else the environment. Raises: RequestError: the old keys stay."""
        if self.limits.api_key_file is not None:
            self.keys = read_keys(self.limits.api_key_file)
        elif KEY_VARIABLE in os.environ:  # an empty variable is an error, as a server without keys is open to all
            self.keys = parse_keys(os.environ[KEY_VARIABLE], KEY_VARIABLE, "the environment variable")

    def check_key(self, http: HttpRequest) -> str:
        """Return the name of the request's API key, empty if none is needed. Raises: HttpError: the key is invalid."""
        if not self.keys:
            return ""
        scheme, _, key = http.headers.get("authorization", "").partition(" ")
        digest = _hash_key(key.strip())
        if scheme.lower() != "bearer" or digest not in self.keys:
            raise HttpError(401, "invalid API key", "invalid_api_key", field="authorization", expected="`Bearer KEY`")
        return self.keys[digest]

    def resolve_requests(self, parts: Iterable[GenerationRequest]) -> list[GenerationRequest]:
        """Return the requests of a call with defaults, and the sizes that the operator maps the requested sizes to.

        Raises:
            HttpError: the limits do not allow them.
        """
        limits = self.limits
        requests = [set_defaults(request, limits.deadline) for request in parts]
        for request in requests:
            method = (request.method or "").partition(":")[0]
            if limits.methods and method and method not in limits.methods:  # qualities are always allowed
                raise HttpError(400, field="method", found=format_value(method), expected=" or ".join(limits.methods))
        if (images := sum(request.n or 1 for request in requests)) > limits.max_n:
            raise HttpError(400, field="n", found=f"{images}", expected=f"at most {limits.max_n}")
        sizes = [limits.mapped_sizes.get(request.size or "", request.size) for request in requests]
        return [request.model_copy(update={"size": size}) for request, size in zip(requests, sizes, strict=True)]

    def find_backend(self, name: str | None) -> ImageBackend:
        """Return the model of a name or alias; None: the first model. Raises: HttpError: the model is unknown."""
        if name is None:
            return next(iter(self.backends.values()))
        name = self.limits.aliases.get(name, name)
        if name not in self.backends:
            names = ", ".join([*self.backends, *self.limits.aliases])
            raise HttpError(404, code="model_not_found", field="model", found=format_value(name), expected=names)
        return self.backends[name]


def _hash_key(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
