"""What all requests of a server share: models, limits, keys, whether it takes work, metrics, logs."""

from __future__ import annotations

import hashlib
import time
from collections import Counter as Tally
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from starlette.requests import Request

from ..edits import BYTES_LIMIT
from ..errors import RequestError
from ..inputs import read_plain_file, reading, short
from .backend import ImageBackend
from .protocol import Completion, HttpError, ImagesRequest

MAX_KEYS_FILE = 1 << 20  # bytes
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)  # buckets of histograms


@dataclass(frozen=True)
class Limits:
    """What one request may take, and who may ask.

    Args:
        deadline: seconds of a request.
        body: bytes of its body; form: of one that holds pictures.
        body_seconds: until all of them are there.
        bodies: bytes of the bodies of all requests.
        api_key_file: keys that are accepted, see `read_keys`; without one, anybody may ask.
        methods: names of those that may be asked for beside qualities; none: all.
        max_n: images of a request.
        aliases: models by further names.
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


def read_keys(path: Path) -> dict[bytes, str]:
    """Names of the keys in a file, by their hashes: on each line a key, or a name and a key.

    Empty lines and those that begin with # do not count. A key without a name has the beginning of its hash.

    Raises:
        RequestError: the file cannot be read, or has no key.
    """
    with reading(path, "a file of API keys, one a line", RequestError, "give another file"):
        lines = [line.strip() for line in read_plain_file(path, MAX_KEYS_FILE).decode("utf-8-sig").splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise RequestError(field="api_key_file", found=f"no key in {path}", expected="one a line")
    if not all(key.isascii() for key in keys):
        raise RequestError(
            field="api_key_file", found=f"a key in {path} that is not ASCII", expected="what a header carries"
        )
    hashes = {_hash(line.split()[-1]): line for line in keys}
    return {key: " ".join(line.split()[:-1]) or f"key {key.hex()[:8]}" for key, line in hashes.items()}


class BodyMemory:
    """Bytes of the bodies of all requests. A caller may hold as many as remain free, so others always find room."""

    def __init__(self, size: int) -> None:
        self._free = size
        self._held = Tally[Hashable]()

    @contextmanager
    def reserve(self, caller: Hashable, size: int) -> Iterator[None]:
        """Reserve bytes for a body while the block runs. Raises: HttpError: the caller has to wait."""
        if self._held[caller] + size > self._free - size:
            remedy = "try again when other requests are done"
            raise HttpError(429, "no memory for it", "busy", 5, field="body", found=f"{size:,} bytes", remedy=remedy)
        self._count(caller, size)
        try:
            yield
        finally:
            self._count(caller, -size)

    def _count(self, caller: Hashable, size: int) -> None:
        self._free -= size
        self._held[caller] += size
        self._held = +self._held


class Metrics:
    """Counters of one server, in a registry of their own."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        ProcessCollector(registry=registry)

        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"lantern_{name}", what, ("model", *labels), registry=registry)

        def histogram(name: str, what: str) -> Histogram:
            return Histogram(f"lantern_{name}_seconds", what, ("model",), buckets=SECONDS, registry=registry)

        self.requests = counter("requests", "Requests that were answered, by HTTP status.", "code")
        self.images = counter("images", "Images drawn, by method.", "method")
        self.aborted = counter("aborted", "Requests that ended early: disconnected, deadline.", "reason")
        self.tokens = counter("tokens", "Codes drawn.")
        self.passes = counter("target_passes", "Target passes, counted for every image that took part.")
        self.tvd = counter("realised_tvd", "Total variation that relaxed acceptance gave away, summed over codes.")
        self.queue = histogram("queue", "Seconds before a request's first pass.")
        self.request = histogram("request", "Seconds of a whole request.")
        self.picture = histogram("picture", "Seconds a request took to decode and encode its pictures.")
        self._running = Gauge("lantern_images_running", "Images that share passes now.", ("model",), registry=registry)
        self._waiting = Gauge("lantern_images_waiting", "Images that wait.", ("model",), registry=registry)

    def count_completion(self, completion: Completion) -> None:
        """Count a request that was drawn; methods by name only, as clients may make up any number of parameters."""
        figures = completion.figures
        model = figures.model
        self.images.labels(model, figures.method.partition(":")[0]).inc(len(figures.seeds))
        self.tokens.labels(model).inc(completion.output_tokens)
        self.passes.labels(model).inc(figures.target_passes)
        self.tvd.labels(model).inc(figures.realised_tvd_per_token * completion.output_tokens)
        self.queue.labels(model).observe(figures.queue_seconds)
        self.request.labels(model).observe(figures.seconds)
        self.picture.labels(model).observe(figures.picture_seconds)

    def text(self, backends: Iterable[ImageBackend]) -> bytes:
        """All of it in Prometheus' text format."""
        for backend in backends:
            for gauge, value in zip((self._running, self._waiting), backend.load(), strict=True):
                gauge.labels(backend.name).set(value)
        return generate_latest(self.registry)


class ServerState:
    """One server.

    Attributes:
        backends: its models by name, when they are ready.
        active: requests being answered.
        draining: whether it is about to stop.
    """

    def __init__(self, limits: Limits) -> None:
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
        """`loading`, `ready`, `draining`, or `failed` where a model cannot draw any more."""
        if self.draining:
            return "draining"
        if not all(backend.alive for backend in self.backends.values()):
            return "failed"
        return "ready" if self.backends else "loading"

    def check_open(self) -> None:
        """Raises: HttpError: requests are not taken yet, or not any more."""
        if self.draining:
            raise HttpError(503, "the server is about to stop", "draining", 5, remedy="ask another one")
        if not self.backends:
            raise HttpError(503, "the models are being loaded", "loading", 2, remedy="try again in a few seconds")

    def load_keys(self) -> None:
        """Read the file of keys, again. Raises: RequestError: it has none; those that were read before are kept."""
        if self.limits.api_key_file is not None:
            self.keys = read_keys(self.limits.api_key_file)

    def check_key(self, request: Request) -> str:
        """The name of a request's key, empty where none is needed. Raises: HttpError: it has none that is known."""
        if not self.keys:
            return ""
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        digest = _hash(key.strip())
        if scheme.lower() != "bearer" or digest not in self.keys:
            raise HttpError(401, "no known key", "invalid_api_key", field="authorization", expected="`Bearer KEY`")
        return self.keys[digest]

    def check_request(self, request: ImagesRequest) -> None:
        """Raises: HttpError: the server's operator does not allow it."""
        limits = self.limits
        method = (request.method or "").partition(":")[0]
        if limits.methods and method and method not in limits.methods:  # qualities are the bundle's own
            raise HttpError(400, field="method", found=short(method), expected=" or ".join(limits.methods))
        if (request.n or 1) > limits.max_n:
            raise HttpError(400, field="n", found=f"{request.n}", expected=f"at most {limits.max_n}")

    def backend(self, name: str | None) -> ImageBackend:
        """A model by its name or alias; the first one without. Raises: HttpError: there is none of that name."""
        if name is None:
            return next(iter(self.backends.values()))
        name = self.limits.aliases.get(name, name)
        if name not in self.backends:
            names = ", ".join([*self.backends, *self.limits.aliases])
            raise HttpError(404, code="model_not_found", field="model", found=short(name), expected=names)
        return self.backends[name]


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
