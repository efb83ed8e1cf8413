"""The service: requests of many callers share forward passes, and each caller gets the images of a separate call."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from idle_service import wait_until_idle
from refusals import catch_error
from same_results import have_same_codes
from tiny_bundle import CAPTION

from lantern_rt import Pipeline, RequestError
from lantern_rt.engines.kv_cache import KVCache
from lantern_rt.errors import BusyError, EngineError
from lantern_rt.prepared import PreparedRequest
from lantern_rt.results import StreamStep
from lantern_rt.runtime.batch import Batch
from lantern_rt.service import Service
from lantern_rt.service_request import ServiceRequest

PROMPTS = ["red cube", "a green sphere", "red sphere on sand", "green cube on snow"]
METHODS = [None, "ar", "eagle:tree=chain-3", "sjd:window=5", "lantern++:lambda=2", "sjd:window=3:lambda=1.5", None]


@pytest.fixture
def service(pipe: Pipeline) -> Iterator[Service]:
    with Service(pipe, max_images_per_pass=4, max_queued_images=8) as running_service:
        yield running_service


class RecordingListener:
    def __init__(self, busy: Callable[[], bool] = lambda: False) -> None:
        self.busy = busy
        self.deadline = time.monotonic() + 30  # so that a failed test ends
        self.steps: list[StreamStep] = []
        self.error: BaseException | None = None
        self.done = threading.Event()

    def __call__(self, news: StreamStep | BaseException) -> None:
        if isinstance(news, BaseException):
            self.error = news
        else:
            self.steps.append(news)
        if self.error is not None or self.steps[-1].stats is not None:
            self.done.set()
        while self.busy() and time.monotonic() < self.deadline:
            time.sleep(0.001)

    def wait_for_first_step(self) -> None:
        while not self.steps:
            time.sleep(0.001)

    def wait_for_last_step(self) -> StreamStep:
        assert self.done.wait(60)
        assert self.error is None
        return self.steps[-1]


def submit(service: Service, prompts: str | None = "red cube", **request: Any) -> RecordingListener:
    """Submit a request, again and again while the service is busy; return its listener."""
    listener = RecordingListener()
    while True:
        try:
            service.submit(listener, prompts, **request)
            return listener
        except BusyError:
            time.sleep(0.01)


def raise_error(error: BaseException) -> Callable[..., Any]:
    def fail(*_: object) -> None:
        raise error

    return fail


def test_every_caller_gets_the_images_of_a_separate_call(pipe: Pipeline, service: Service) -> None:
    requests = [
        {"prompts": PROMPTS[i % 4], "seed": i, "num_images": 1 + i % 2, "method": method, "temperature": 0.7 + i % 2}
        for i, method in enumerate(METHODS)
    ]
    callers = [submit(service, **request) for request in requests]
    for caller, request in zip(callers, requests, strict=True):
        last = caller.wait_for_last_step()
        alone = pipe(**request)
        assert have_same_codes(last.codes, alone.codes)
        assert last.image(0).tobytes() == alone.images[0].tobytes()
        assert last.stats is not None
        assert (last.stats.images, last.done) == (len(alone.codes), last.total)
        parts_by_image = zip(*(step.new_codes for step in caller.steps), strict=True)
        assert have_same_codes([np.concatenate(parts) for parts in parts_by_image], alone.codes)
        if request["method"] not in (None, "sjd:window=5"):  # the windows of these methods depend on the batch
            assert last.stats.per_image == alone.stats.per_image
    wait_until_idle(service)


def test_requests_of_different_callers_share_forward_passes(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    batch_sizes: list[int] = []
    step = Batch.step
    monkeypatch.setattr(Batch, "step", lambda batch: (batch_sizes.append(len(batch.active_sequences)), step(batch))[1])
    with Service(pipe, max_images_per_pass=4) as service:
        callers = [RecordingListener(lambda: len(submitted) < 6) for _ in range(6)]
        submitted: list[ServiceRequest] = []
        for i, caller in enumerate(callers):
            submitted.append(service.submit(caller, "red cube", seed=i, method="ar"))
        for caller in callers:
            caller.wait_for_last_step()
    assert max(batch_sizes) == 4


def get_retry_seconds(service: Service, **request: Any) -> int:
    return catch_error(BusyError, service.submit, RecordingListener(), "red cube", **request).retry_seconds


def test_a_full_queue_says_when_to_try_again(pipe: Pipeline) -> None:
    with Service(pipe, max_images_per_pass=2, max_queued_images=1) as service:
        is_busy = True
        callers = [RecordingListener(lambda: is_busy) for _ in range(3)]
        for i, caller in enumerate(callers):
            service.submit(caller, "red cube", seed=i, method="ar")
        with pytest.raises(BusyError, match=r"found 3 images before this one; try again in about \d+ s") as busy:
            service.submit(RecordingListener(), "red cube")
        assert busy.value.retry_seconds >= 1
        with pytest.raises(RequestError, match="num_images: found 4 images, expected at most 3 in one request"):
            service.submit(RecordingListener(), "red cube", num_images=4)
        assert service.capacity.seconds_per_image == 0.0
        service.capacity.seconds_per_image = 2.0
        assert [get_retry_seconds(service) for _ in range(4)] == [2, 4, 6, 8], (
            "each rejected caller has to wait longer than the caller before"
        )
        assert max(get_retry_seconds(service) for _ in range(60)) <= 62
        service.capacity.seconds_per_image = 0.0
        is_busy = False
        for caller in callers:
            caller.wait_for_last_step()
        submit(service, seed=9).wait_for_last_step()
        assert 0 < service.capacity.seconds_per_image < 10


def test_wrong_requests_are_rejected_and_affect_no_others(service: Service) -> None:
    caller = submit(service, method="sjd")
    wide = {"method": "sjd:window=128"}  # all requests in the pass would be padded to this width
    for field, options in (("method", {"method": "magic"}), ("method", wide), ("prompts", {"class_ids": 3})):
        assert catch_error(RequestError, service.submit, RecordingListener(), "red cube", **options).field == field
    caller.wait_for_last_step()
    wait_until_idle(service)


def test_a_cancelled_request_ends_after_the_current_forward_pass(service: Service) -> None:
    is_released = False
    cancelled = RecordingListener(lambda: not is_released)
    request = service.submit(cancelled, "red cube", num_images=4, method="eagle:tree=chain-3")
    running_listener = submit(service, "green cube", seed=1, method="ar")
    cancelled.wait_for_first_step()
    request.cancel()
    request.cancel()
    is_released = True
    running_listener.wait_for_last_step()
    wait_until_idle(service)
    assert cancelled.steps[-1].stats is None


def test_a_full_service_accepts_a_request_after_a_cancellation(pipe: Pipeline) -> None:
    with Service(pipe, max_images_per_pass=1, max_queued_images=0) as service:
        is_busy = True
        cancelled = RecordingListener(lambda: is_busy)
        next_caller = RecordingListener()
        request = service.submit(cancelled, "red cube", method="ar")
        cancelled.wait_for_first_step()
        request.cancel()
        service.submit(next_caller, "red cube", seed=1)
        is_busy = False
        next_caller.wait_for_last_step()
        wait_until_idle(service)


def test_a_failed_pass_ends_only_the_requests_in_it(
    pipe: Pipeline, service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for error in (EngineError("the device is gone"), ZeroDivisionError("a bug")):
        with monkeypatch.context() as patch:
            patch.setattr(Batch, "step", raise_error(error))
            callers = [submit(service), submit(service)]
            assert all(caller.done.wait(30) for caller in callers)
            assert [str(caller.error) for caller in callers] == [str(error)] * 2
            assert callers[0].error is not callers[1].error
    assert "a pass failed" in caplog.text
    assert have_same_codes(submit(service, seed=3).wait_for_last_step().codes, pipe("red cube", seed=3).codes)


def test_the_service_survives_errors_around_a_pass(
    pipe: Pipeline, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    for owner, name in ((PreparedRequest, "prompts"), (Batch, "add"), (Batch, "remove")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, raise_error(MemoryError("no more")))
            caller = RecordingListener()
            request = service.submit(caller, "red cube", method="ar")
            if name == "remove":
                request.cancel()
                time.sleep(0.1)
            else:
                assert caller.done.wait(30)
                assert isinstance(caller.error, MemoryError)
    assert have_same_codes(submit(service, seed=4).wait_for_last_step().codes, pipe("red cube", seed=4).codes)
    wait_until_idle(service)
    with pytest.raises(RequestError, match="max_images_per_pass: found 0, expected a whole number 1"):
        Service(pipe, max_images_per_pass=0)


def test_a_request_without_memory_affects_no_others(
    pipe: Pipeline, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    running_listener = submit(service, seed=6, num_images=2, method="ar")
    running_listener.wait_for_first_step()
    with monkeypatch.context() as patch:
        patch.setattr(KVCache, "empty", raise_error(EngineError("memory: found none")))
        new_listener = submit(service, "green cube", num_images=2, method="ar")
        assert new_listener.done.wait(30)
    assert str(new_listener.error) == "memory: found none"
    assert have_same_codes(running_listener.wait_for_last_step().codes, pipe("red cube", seed=6, num_images=2).codes)
    wait_until_idle(service)


def test_an_error_in_a_listener_ends_only_its_request(service: Service) -> None:
    service.submit(raise_error(ValueError("a listener's bug")), "red cube")
    submit(service).wait_for_last_step()
    wait_until_idle(service)


def test_closing_finishes_requests_and_rejects_new_ones(pipe: Pipeline) -> None:
    for drain in (True, False):
        service = Service(pipe, max_images_per_pass=1)
        callers = [RecordingListener(lambda service=service: service.is_open) for _ in range(3)]
        for caller in callers:
            service.submit(caller, "red cube", method="ar")
        service.close(drain)
        assert all(caller.done.is_set() for caller in callers)
        assert [caller.error is None for caller in callers] == [True] * 3 if drain else callers[2].error is not None
        with pytest.raises(RequestError, match="service: closed"):
            service.submit(RecordingListener(), "red cube")
        assert not vars(service)["_thread"].is_alive()


def test_the_example_in_the_docs_of_the_service_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs/embedding.md").read_text("utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert process.stdout.endswith("256 of 256 tokens\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["image-0.png", "image-1.png"]


def test_is_open_is_false_after_three_failed_passes(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    with Service(pipe, max_images_per_pass=2) as service:
        assert service.is_open
        with monkeypatch.context() as patch:
            patch.setattr(KVCache, "append", raise_error(MemoryError("no more")))
            for _ in range(3):
                assert submit(service, method="ar").done.wait(30)
        assert not service.is_open
        submit(service, method="ar").wait_for_last_step()
        assert service.is_open


def test_a_request_whose_logits_overflow_fails_alone(embeddings_bundle: Path) -> None:
    embeddings = np.random.default_rng(1).standard_normal((2, CAPTION)).astype(np.float32)
    with Pipeline.from_bundle(embeddings_bundle, threads=1) as pipe, Service(pipe, max_images_per_pass=8) as service:
        valid_requests = [{"embeddings": embeddings, "method": method, "seed": i} for i, method in enumerate(METHODS)]
        valid_listeners = [submit(service, None, **request) for request in valid_requests]
        overflowing = {"embeddings": np.full_like(embeddings, 1e36), "cfg_scale": 1000.0, "temperature": 0.001}
        for method in METHODS:
            caller = submit(service, None, method=method, num_images=2, **overflowing)
            assert caller.done.wait(60)
            assert isinstance(caller.error, EngineError)
            assert "NaN or infinite" in str(caller.error)
            assert service.is_open
        for caller, request in zip(valid_listeners, valid_requests, strict=True):
            assert have_same_codes(caller.wait_for_last_step().codes, pipe(**request).codes)
        wait_until_idle(service)


def run_simultaneous_requests(
    service: Service, requests_by_caller: dict[str, list[dict[str, Any]]]
) -> dict[str, list[StreamStep]]:
    """Submit all requests while another one blocks the service; return the last step of each request, by caller."""
    blocker = RecordingListener(lambda: not ready)
    ready = False
    service.submit(blocker, "red cube", method="ar", caller="first")
    blocker.wait_for_first_step()
    listeners = {
        caller: [submit(service, "red sphere", caller=caller, **request) for request in requests]
        for caller, requests in requests_by_caller.items()
    }
    ready = True
    return {caller: [each.wait_for_last_step() for each in own] for caller, own in listeners.items()}


def test_a_caller_with_many_requests_delays_no_others(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[tuple[dict[str, int], int]] = []
    step = Batch.step

    def record_pass(batch: Batch) -> Any:
        parts = step(batch)
        callers = Counter(vars(service)["_requests"][part.sequence].caller for part in parts)
        passes.append((callers, max((sequence.max_nodes for sequence in batch.active_sequences), default=0)))
        return parts

    wide = ["sjd:window=40", "lantern++:lambda=2:tree=mc-25", "rows:window=2", "eagle:tree=mc-25"]
    requests_by_caller: dict[str, list[dict[str, Any]]] = {
        f"neighbour {i}": [{"method": "ar", "seed": i}] for i in range(3)
    }
    requests_by_caller["greedy"] = [{"method": method, "seed": 9, "num_images": 5} for method in wide]
    with Service(pipe, max_images_per_pass=4, max_queued_images=40) as service, monkeypatch.context() as patch:
        patch.setattr(Batch, "step", record_pass)
        last = run_simultaneous_requests(service, requests_by_caller)
    for caller, requests in requests_by_caller.items():
        for request, step in zip(requests, last[caller], strict=True):
            alone = pipe("red sphere", **request)
            assert have_same_codes(step.codes, alone.codes)
    together = [(callers, nodes) for callers, nodes in passes if any(name.startswith("nei") for name in callers)]
    assert together
    assert all(callers["greedy"] <= 1 for callers, _ in together)
    assert all(nodes < 25 for _, nodes in together), "wide relaxed drafts have separate passes, exact windows shrink"


def test_a_caller_with_few_images_replaces_one_of_many(pipe: Pipeline) -> None:
    with Service(pipe, max_images_per_pass=1, max_queued_images=3) as service:
        is_busy = True
        greedy = [RecordingListener(lambda: is_busy) for _ in range(4)]
        for i, caller in enumerate(greedy):
            service.submit(caller, "red cube", seed=i, method="ar", caller="greedy")
        modest = RecordingListener()
        service.submit(modest, "red cube", seed=9, method="ar", caller="modest")
        with pytest.raises(BusyError):
            service.submit(RecordingListener(), "red cube", caller="greedy")
        is_busy = False
        modest.wait_for_last_step()
        assert isinstance(greedy[-1].error, BusyError)
        for caller in greedy[:-1]:
            caller.wait_for_last_step()


def test_requests_that_cannot_meet_their_deadline_are_rejected(pipe: Pipeline) -> None:
    with Service(pipe, max_images_per_pass=2, max_queued_images=8) as service:
        is_busy = True
        first = RecordingListener(lambda: is_busy)
        service.submit(first, "red cube", method="ar", deadline=0.001)
        first.wait_for_first_step()
        service.capacity.seconds_per_image = 1.0
        for deadline in (0.5, 2.3):
            assert get_retry_seconds(service, deadline=deadline) >= 1
        late = submit(service, seed=2, num_images=2, deadline=5.0)
        last = submit(service, seed=3, deadline=8.0)
        service.capacity.seconds_per_image = 3.0  # the service becomes slower
        is_busy = False
        assert late.done.wait(30)
        assert isinstance(late.error, BusyError)
        last.wait_for_last_step()
        first.wait_for_last_step()
