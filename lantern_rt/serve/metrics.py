"""Prometheus metrics of one server."""

from __future__ import annotations

from collections.abc import Iterable

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

from .backend import ImageBackend
from .log import RequestRecord
from .protocol import Completion

DISCONNECTED = 499  # status in logs and metrics if the client disconnected
BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)  # bounds of histograms in seconds


class Metrics:
    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # time stamps that no dashboard shows
        values.ValueClass = values.MutexValue  # not files in PROMETHEUS_MULTIPROC_DIR: one process serves
        registry = self.registry = CollectorRegistry()
        ProcessCollector(registry=registry)

        def make_counter(name: str, help_text: str, *labels: str) -> Counter:
            return Counter(f"lantern_{name}", help_text, ("model", *labels), registry=registry)

        def make_histogram(name: str, help_text: str) -> Histogram:
            return Histogram(f"lantern_{name}_seconds", help_text, ("model",), buckets=BUCKETS, registry=registry)

        self.requests = make_counter("requests", "Finished requests, by HTTP status.", "code")
        self.images = make_counter("images", "Generated images, by method.", "method")
        self.aborted = make_counter(
            "aborted", "Requests that ended early, by reason: disconnected, deadline.", "reason"
        )
        self.tokens = make_counter("tokens", "Sampled tokens.")
        self.passes = make_counter("target_passes", "Target passes, each counted once for every image in it.")
        self.tvd = make_counter(
            "realised_tvd", "Total variation distance caused by relaxed acceptance, summed over tokens."
        )
        self.queue = make_histogram("queue", "Seconds before the first forward pass of a request.")
        self.request = make_histogram("request", "Seconds of a whole request.")
        self.picture = make_histogram("picture", "Seconds to decode and encode the images of a request.")
        self._running = Gauge("lantern_images_running", "Images being generated.", ("model",), registry=registry)
        self._waiting = Gauge("lantern_images_waiting", "Queued images.", ("model",), registry=registry)
        labels = ("model", "bundle", "digest", "version")
        self._models = Gauge("lantern_model_info", "Models, each with the value 1.", labels, registry=registry)

    def count_request(self, record: RequestRecord) -> None:
        self.requests.labels(record.model, str(record.status)).inc()
        if record.status in (DISCONNECTED, 504):
            self.aborted.labels(record.model, "deadline" if record.status == 504 else "disconnected").inc()

    def count_completion(self, completion: Completion) -> None:
        generation_stats = completion.generation_stats
        model = generation_stats.model
        # The label is only the method's name, because parameters would create an unlimited number of labels.
        self.images.labels(model, generation_stats.method.partition(":")[0]).inc(len(generation_stats.seeds))
        self.tokens.labels(model).inc(completion.output_tokens)
        self.passes.labels(model).inc(generation_stats.target_passes)
        self.tvd.labels(model).inc(generation_stats.realised_tvd_per_token * completion.output_tokens)
        self.queue.labels(model).observe(generation_stats.queue_seconds)
        self.request.labels(model).observe(generation_stats.seconds)
        self.picture.labels(model).observe(generation_stats.picture_seconds)

    def format_prometheus_text(self, backends: Iterable[ImageBackend]) -> bytes:
        for backend in backends:
            facts = backend.describe()
            self._models.labels(backend.name, facts["bundle"], facts["digest"], facts["version"]).set(1)
            for gauge, value in zip((self._running, self._waiting), backend.measure_load(), strict=True):
                gauge.labels(backend.name).set(value)
        return generate_latest(self.registry)
