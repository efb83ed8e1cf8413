"""Test the Ray backend without a cluster: a request whose replica dies is retried and gives the same images."""

from __future__ import annotations

import asyncio
import io
import pickle
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("ray.serve", reason="needs the extra `ray`")

from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError
from ray.serve.exceptions import BackPressureError

from lantern_rt import Pipeline, RequestError
from lantern_rt.errors import BusyError, EngineError
from lantern_rt.serve import ray
from lantern_rt.serve.backend import ADMITTED, BackendLoad
from lantern_rt.serve.codes import CodesFileRequest, CodesRequest
from lantern_rt.serve.protocol import Completion, GenerationRequest, HttpError, ImagesRequest
from lantern_rt.serve.ray import MAX_REPLICAS_LOST, DeploymentSettings, RayBackend, Replica, app
from lantern_rt.serve.sglang import TokenPromptRequest
from lantern_rt.service import Service

PROMPT = "red cube"


class FakeReplicaResponse:
    """A stand-in for the streamed response of a Ray Serve handle, which raises `error` after `num_updates` updates."""

    def __init__(self, updates: Any, num_updates: int | None, error: BaseException) -> None:
        self._updates = updates
        self._remaining_updates = num_updates
        self._error = error
        self.num_cancels = 0

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        if self._remaining_updates == 0:
            raise self._error
        self._remaining_updates = None if self._remaining_updates is None else self._remaining_updates - 1
        return pickle.loads(pickle.dumps(await anext(self._updates)))

    def cancel(self) -> None:
        self.num_cancels += 1


class FakeReplicaHandle:
    """A stand-in for a Ray Serve handle; a failure is an exception, or the updates of a call before `error`."""

    def __init__(self, replica: Any, *failures: int | Exception, error: Exception | None = None) -> None:
        self._replica = replica
        self._failures = iter(failures)
        self._error = error or ActorUnavailableError("lost", b"1" * 16)
        self.responses: list[FakeReplicaResponse] = []
        self.generate = self

    def options(self, stream: bool) -> FakeReplicaHandle:
        assert stream
        return self

    def remote(self, request: ImagesRequest, caller: str) -> FakeReplicaResponse:
        failure = next(self._failures, None)
        num_updates, error = (0, failure) if isinstance(failure, Exception) else (failure, self._error)
        updates = self._replica.generate(pickle.loads(pickle.dumps(request)), caller)
        self.responses.append(FakeReplicaResponse(updates, num_updates, error))
        return self.responses[-1]


@pytest.fixture(scope="module")
def replica(tiny_folder: Path) -> Replica:
    return Replica(str(tiny_folder), 4, 8, {"threads": 1})


def collect_updates(replica_handle: FakeReplicaHandle, **options: Any) -> list[Any]:
    request = ImagesRequest(prompt=PROMPT, seed=3, deadline=600, **options)

    async def collect() -> list[Any]:
        return [update async for update in RayBackend("tiny", {}, replica_handle).generate(request)]  # type: ignore[arg-type]

    return asyncio.run(collect())


def decode_pixels(completion: Completion) -> list[bytes]:
    return [Image.open(io.BytesIO(file)).tobytes() for file in completion.encoded_files]


@pytest.mark.parametrize("method", ["ar", None, "lantern++:lambda=1.23456789"])
def test_a_request_retried_on_other_replicas_gives_the_images_of_the_pipeline(
    method: str, replica: Replica, tiny_pipe: Pipeline
) -> None:
    replica_handle = FakeReplicaHandle(replica, 0, 1, 1)
    accepted, completion = collect_updates(replica_handle, method=method, n=2)
    images = tiny_pipe(PROMPT, seed=3, method=method, num_images=2).images
    assert accepted == ADMITTED
    assert decode_pixels(completion) == [image.tobytes() for image in images]
    assert len(replica_handle.responses) == 4


def test_a_stream_that_restarts_on_another_replica_still_describes_every_code(
    replica: Replica, tiny_pipe: Pipeline
) -> None:
    options = {"method": "sjd:window=3", "steps": True, "partial_images": 3}
    accepted, *events, completion = collect_updates(FakeReplicaHandle(replica, 9), **options)
    kinds = ""
    for event in events:
        if event["type"] == "lantern.step":
            kinds = kinds[: event["done"] - len(event["kinds"])] + event["kinds"]
    assert accepted == ADMITTED
    assert len(kinds) == len(tiny_pipe(PROMPT, seed=3).codes[0])
    assert sum(event.get("done") == events[0]["done"] for event in events) == 2
    assert {event["partial_image_index"] for event in events if "b64_json" in event} == {0, 1, 2}
    assert isinstance(completion, Completion)


def test_request_errors_of_a_replica_keep_their_type_and_fields(replica: Replica) -> None:
    with pytest.raises(RequestError) as caught:
        collect_updates(FakeReplicaHandle(replica), size="9x9")
    assert caught.value.field == "size"
    assert pickle.loads(pickle.dumps(BusyError("full", 7))).retry_seconds == 7


def test_a_replica_returns_the_codes_of_the_pipeline_and_rejects_unsupported_requests(
    replica: Replica, tiny_pipe: Pipeline
) -> None:
    async def complete(request: GenerationRequest) -> Completion:
        backend = RayBackend("tiny", {}, FakeReplicaHandle(replica, 1))  # type: ignore[arg-type]
        *_, completion = [update async for update in backend.generate(request)]
        assert isinstance(completion, Completion)
        return completion

    fields: dict[str, Any] = {"prompt": PROMPT, "seed": 3, "deadline": 600}
    (codes,) = tiny_pipe(PROMPT, seed=3).codes
    assert asyncio.run(complete(CodesRequest(**fields))).codes[0].tolist() == codes.tolist()
    with np.load(io.BytesIO(asyncio.run(complete(CodesFileRequest(**fields))).encoded_files[0])) as file:
        assert file["codes"].ravel().tolist() == codes.tolist()
    request = TokenPromptRequest(input_ids=[1], grid_shapes=[[1, 2, 2], [1, 1, 1]], max_tokens=9, **fields)
    with pytest.raises(HttpError) as caught:
        asyncio.run(complete(request))
    assert (caught.value.status, caught.value.field) == (400, "image_data")


def test_a_full_cluster_raises_a_busy_error_with_a_retry_time(replica: Replica) -> None:
    replica_handle = FakeReplicaHandle(replica, BackPressureError(4, 4))
    with pytest.raises(BusyError) as caught:
        collect_updates(replica_handle)
    assert 1 <= caught.value.retry_seconds <= 3
    assert len(replica_handle.responses) == 1


def test_an_admitted_request_that_loses_its_replica_waits_for_another_replica(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "RETRY_SECONDS", 0.01)
    full_replicas = [BackPressureError(4, 4), BusyError("full", 3)] * MAX_REPLICAS_LOST
    replica_handle = FakeReplicaHandle(replica, 1, *full_replicas)
    assert isinstance(collect_updates(replica_handle)[-1], Completion)
    assert len(replica_handle.responses) == 2 + len(full_replicas)


@pytest.mark.parametrize(
    ("error", "replicas_lost"), [(ActorDiedError(), MAX_REPLICAS_LOST), (RayTaskError("generate", "", KeyError()), 1)]
)
def test_a_request_fails_after_too_many_lost_replicas_or_one_program_error(
    error: Exception, replicas_lost: int, replica: Replica
) -> None:
    replica_handle = FakeReplicaHandle(replica, *[1] * 9, error=error)
    with pytest.raises(type(error)):
        collect_updates(replica_handle)
    assert len(replica_handle.responses) == replicas_lost


def test_closing_a_request_cancels_the_call_of_the_replica(replica: Replica) -> None:
    replica_handle = FakeReplicaHandle(replica)

    async def close_after_first_update() -> None:
        backend = RayBackend("tiny", {}, replica_handle)  # type: ignore[arg-type]
        updates = backend.generate(ImagesRequest(prompt=PROMPT, deadline=600))
        await anext(updates)
        assert backend.measure_load() == BackendLoad(1, 0)
        await updates.aclose()
        assert replica_handle.responses[0].num_cancels
        assert backend.measure_load() == BackendLoad(0, 0)

    asyncio.run(close_after_first_update())


def test_the_health_check_of_a_replica_fails_after_the_service_ends(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_replica = Replica(str(tiny_folder), 1, 1, {"threads": 1})
    new_replica.check_health()
    monkeypatch.setattr(Service, "is_open", False)
    with pytest.raises(EngineError):
        new_replica.check_health()


@pytest.mark.parametrize("bundles", [[], ["a/tiny", "b/tiny"], ["ingress"]])
def test_a_deployment_without_bundles_or_with_duplicate_or_reserved_names_is_rejected(bundles: list[str]) -> None:
    with pytest.raises(RequestError) as caught:
        app(DeploymentSettings(bundles=bundles))
    assert caught.value.field == "bundles"


def test_a_model_has_the_configured_name_and_two_bundles_need_two_names(tiny_folder: Path) -> None:
    assert Replica(str(tiny_folder), 1, 1, {"threads": 1}, "other").describe()[0] == "other"
    with pytest.raises(RequestError) as caught:
        app(DeploymentSettings(bundles=["a/one", "a/two"], names=["other"]))
    assert caught.value.field == "names"
