"""What a server counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from .backend import ImageBackend
from .protocol import Completion

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)


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
        self._nodes = Gauge("lantern_draft_nodes", "Nodes of a pass for each image.", ("model",), registry=registry)

    def finished(self, completion: Completion) -> None:
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
            for gauge, value in zip((self._running, self._waiting, self._nodes), backend.load(), strict=True):
                gauge.labels(backend.name).set(value)
        return generate_latest(self.registry)
