"""Check that requests whose replicas die are drawn again by others and give the same images; without a cluster."""

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


class Response:
    """Stands in for the response of a replica handle; raises `error` before the update number `dies`."""

    def __init__(self, updates: Any, dies: int | None, error: BaseException) -> None:
        self._updates = updates
        self._left = dies
        self._error = error
        self.cancelled = 0

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        if self._left == 0:
            raise self._error
        self._left = None if self._left is None else self._left - 1
        return pickle.loads(pickle.dumps(await anext(self._updates)))

    def cancel(self) -> None:
        self.cancelled += 1


class Replicas:
    """Stands in for a handle: each request goes to a replica that dies after that many updates, or fails at once."""

    def __init__(self, replica: Any, *failures: int | Exception, error: Exception | None = None) -> None:
        self._replica = replica
        self._dies = iter(failures)
        self._error = error or ActorUnavailableError("lost", b"1" * 16)
        self.responses: list[Response] = []
        self.generate = self

    def options(self, stream: bool) -> Replicas:
        assert stream
        return self

    def remote(self, request: ImagesRequest, caller: str) -> Response:
        failure = next(self._dies, None)
        response_end = (0, failure) if isinstance(failure, Exception) else (failure, self._error)
        updates = self._replica.generate(pickle.loads(pickle.dumps(request)), caller)
        self.responses.append(Response(updates, *response_end))
        return self.responses[-1]


@pytest.fixture(scope="module")
def replica(tiny_folder: Path) -> Replica:
    return Replica(str(tiny_folder), 4, 8, {"threads": 1})


def collect_updates(replicas: Replicas, **options: Any) -> list[Any]:
    """Return all updates that the endpoint gets for a request."""
    request = ImagesRequest(prompt=PROMPT, seed=3, deadline=600, **options)

    async def collect() -> list[Any]:
        return [update async for update in RayBackend("tiny", {}, replicas).generate(request)]  # type: ignore[arg-type]

    return asyncio.run(collect())


def decode_pixels(completion: Completion) -> list[bytes]:
    return [Image.open(io.BytesIO(file)).tobytes() for file in completion.encoded_files]


@pytest.mark.parametrize("method", ["ar", None, "lantern++:lambda=1.23456789"])
def test_a_request_that_outlives_replicas_gives_the_images_of_the_pipeline(
    method: str, replica: Replica, tiny_pipe: Pipeline
) -> None:
    replicas = Replicas(replica, 0, 1, 1)
    accepted, completion = collect_updates(replicas, method=method, n=2)
    images = tiny_pipe(PROMPT, seed=3, method=method, num_images=2).images
    assert accepted == ADMITTED
    assert decode_pixels(completion) == [image.tobytes() for image in images]
    assert len(replicas.responses) == 4


def test_a_stream_begins_anew_and_its_steps_say_where(replica: Replica, tiny_pipe: Pipeline) -> None:
    accepted, *events, completion = collect_updates(
        Replicas(replica, 9), method="sjd:window=3", steps=True, partial_images=3
    )
    kinds = ""
    for event in events:
        if event["type"] == "lantern.step":
            kinds = kinds[: event["done"] - len(event["kinds"])] + event["kinds"]
    assert accepted == ADMITTED
    assert len(kinds) == len(tiny_pipe(PROMPT, seed=3).codes[0])
    assert sum(event.get("done") == events[0]["done"] for event in events) == 2
    assert {event["partial_image_index"] for event in events if "b64_json" in event} == {0, 1, 2}
    assert isinstance(completion, Completion)


def test_errors_of_the_user_arrive_as_what_they_are(replica: Replica) -> None:
    with pytest.raises(RequestError) as caught:
        collect_updates(Replicas(replica), size="9x9")
    assert caught.value.field == "size"
    assert pickle.loads(pickle.dumps(BusyError("full", 7))).retry_seconds == 7


def test_codes_of_a_replica_are_those_of_the_pipeline_and_calls_that_it_cannot_answer_are_rejected(
    replica: Replica, tiny_pipe: Pipeline
) -> None:
    async def complete(request: GenerationRequest) -> Completion:
        backend = RayBackend("tiny", {}, Replicas(replica, 1))  # type: ignore[arg-type]
        *_, completion = [update async for update in backend.generate(request)]
        assert isinstance(completion, Completion)
        return completion

    fields: dict[str, Any] = {"prompt": PROMPT, "seed": 3, "deadline": 600}
    (codes,) = tiny_pipe(PROMPT, seed=3).codes
    assert asyncio.run(complete(CodesRequest(**fields))).codes[0].tolist() == codes.tolist()
    with np.load(io.BytesIO(asyncio.run(complete(CodesFileRequest(**fields))).encoded_files[0])) as file:
        assert file["codes"].ravel().tolist() == codes.tolist()
    with pytest.raises(HttpError) as caught:
        asyncio.run(
            complete(TokenPromptRequest(token_ids=[1], grid_shapes=[[1, 2, 2], [1, 1, 1]], max_tokens=9, **fields))
        )
    assert (caught.value.status, caught.value.field) == (400, "image_data")


def test_a_cluster_without_room_is_busy(replica: Replica) -> None:
    replicas = Replicas(replica, BackPressureError(4, 4))
    with pytest.raises(BusyError) as caught:
        collect_updates(replicas)
    assert 1 <= caught.value.retry_seconds <= 3
    assert len(replicas.responses) == 1


def test_a_request_that_had_a_place_waits_for_another(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "RETRY_SECONDS", 0.01)
    full_replicas = [BackPressureError(4, 4), BusyError("full", 3)] * MAX_REPLICAS_LOST
    replicas = Replicas(replica, 1, *full_replicas)
    assert isinstance(collect_updates(replicas)[-1], Completion)
    assert len(replicas.responses) == 2 + len(full_replicas)


@pytest.mark.parametrize(
    ("error", "replicas_lost"), [(ActorDiedError(), MAX_REPLICAS_LOST), (RayTaskError("generate", "", KeyError()), 1)]
)
def test_a_request_that_kills_its_replicas_ends_and_so_does_one_that_finds_a_bug(
    error: Exception, replicas_lost: int, replica: Replica
) -> None:
    replicas = Replicas(replica, *[1] * 9, error=error)
    with pytest.raises(type(error)):
        collect_updates(replicas)
    assert len(replicas.responses) == replicas_lost


def test_closing_a_request_cancels_its_replica(replica: Replica) -> None:
    replicas = Replicas(replica)

    async def leave() -> None:
        backend = RayBackend("tiny", {}, replicas)  # type: ignore[arg-type]
        updates = backend.generate(ImagesRequest(prompt=PROMPT, deadline=600))
        await anext(updates)
        assert backend.measure_load() == BackendLoad(1, 0)
        await updates.aclose()
        assert replicas.responses[0].cancelled
        assert backend.measure_load() == BackendLoad(0, 0)

    asyncio.run(leave())


def test_a_replica_is_healthy_until_its_service_ends(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_replica = Replica(str(tiny_folder), 1, 1, {"threads": 1})
    own_replica.check_health()
    monkeypatch.setattr(Service, "open", False)
    with pytest.raises(EngineError):
        own_replica.check_health()


@pytest.mark.parametrize("bundles", [[], ["a/tiny", "b/tiny"], ["ingress"]])
def test_deployments_need_names_of_their_own(bundles: list[str]) -> None:
    with pytest.raises(RequestError) as caught:
        app(DeploymentSettings(bundles=bundles))
    assert caught.value.field == "bundles"


def test_a_model_has_the_name_that_the_operator_gives(tiny_folder: Path) -> None:
    assert Replica(str(tiny_folder), 1, 1, {"threads": 1}, "other").describe()[0] == "other"
    with pytest.raises(RequestError) as caught:
        app(DeploymentSettings(bundles=["a/one", "a/two"], names=["other"]))
    assert caught.value.field == "names"
