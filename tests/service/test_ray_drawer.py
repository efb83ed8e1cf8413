"""Orders whose replicas die go on at others, and their clients notice nothing; without a cluster."""

from __future__ import annotations

import asyncio
import io
import pickle
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

pytest.importorskip("ray.serve", reason="needs the extra `ray`")

from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError
from ray.serve.exceptions import BackPressureError

from lantern_rt import Pipeline, RequestError
from lantern_rt.errors import BusyError, EngineError
from lantern_rt.serve import drawing, ray
from lantern_rt.serve.drawing import Load, Order, Update
from lantern_rt.serve.ray import LIVES, RayDrawer, Replica, Settings, app

PROMPT = "red cube"


class Response:
    """What a replica tells of an order, as from a handle; it dies before the update of this number."""

    def __init__(self, updates: Any, dies: int | None, error: BaseException) -> None:
        self._updates, self._left, self._error, self.cancelled = updates, dies, error, 0

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        if self._left == 0:
            raise self._error
        self._left = None if self._left is None else self._left - 1
        update = await anext(self._updates)
        return pickle.loads(pickle.dumps(update))

    def cancel(self) -> None:
        self.cancelled += 1


class Replicas:
    """A handle; each order that comes goes to a replica which dies after so many updates, or fails at once."""

    def __init__(self, replica: Any, *dies: int | Exception, error: Exception | None = None) -> None:
        self._replica, self._dies = replica, iter(dies)
        self._error = error or ActorUnavailableError("lost", b"1" * 16)
        self.orders: list[Order] = []
        self.responses: list[Response] = []
        self.draw = self

    def options(self, stream: bool) -> Replicas:
        assert stream
        return self

    def remote(self, order: Order) -> Response:
        self.orders.append(pickle.loads(pickle.dumps(order)))
        dies = next(self._dies, None)
        failure = (0, dies) if isinstance(dies, Exception) else (dies, self._error)
        self.responses.append(Response(self._replica.draw(order), *failure))
        return self.responses[-1]


@pytest.fixture(autouse=True)
def _codes_are_told_with_every_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "CODES_EVERY", 0.0)


@pytest.fixture(scope="module")
def replica(tiny_folder: Path) -> Replica:
    return Replica(str(tiny_folder), 4, 8, {"threads": 1})


def told(replicas: Replicas, order: Order) -> list[Update]:
    """All that a client hears of an order."""

    async def hear() -> list[Update]:
        return [update async for update in RayDrawer("tiny", "24x24", {}, replicas).draw(order)]  # type: ignore[arg-type]

    return asyncio.run(hear())


def order_of(**options: Any) -> Order:
    return Order({"prompts": PROMPT, "seed": 3, **options})


def pixels(update: Update) -> list[bytes]:
    return [Image.open(io.BytesIO(one)).tobytes() for one in update.pictures]


@pytest.mark.parametrize("method", ["ar", "auto", "sjd:window=3", "eagle", "lantern", "lantern++:lambda=1.23456789"])
def test_an_order_that_outlives_replicas_gives_the_images_of_the_pipeline(
    method: str, replica: Replica, tiny_pipe: Pipeline
) -> None:
    replicas = Replicas(replica, 4, 9, 1)
    last = told(replicas, order_of(method=method, num_images=2))[-1]
    wanted = tiny_pipe(PROMPT, seed=3, method="ar" if method == "auto" else method, num_images=2)
    assert pixels(last) == [image.tobytes() for image in wanted.images]
    assert len(replicas.orders) == 4
    assert replicas.orders[0].known == []
    drawn = [codes.tolist() for codes in wanted.codes]
    for order in replicas.orders[1:]:
        assert order.known
        assert all(codes[: len(known)] == known for codes, known in zip(drawn, order.known, strict=True))
    assert sum(map(len, replicas.orders[2].known)) > sum(map(len, replicas.orders[1].known))
    assert replicas.orders[3].known == replicas.orders[2].known  # the third replica told nothing


@pytest.mark.parametrize("method", ["ar", "sjd:window=3", "lantern"])
@pytest.mark.parametrize("dies", [1, 5, 12, 20])
def test_a_client_hears_every_code_and_every_picture_once(
    method: str, dies: int, replica: Replica, tiny_pipe: Pipeline
) -> None:
    order = Order({"prompts": PROMPT, "seed": 3, "method": method}, partial=3, steps=True)
    updates = told(Replicas(replica, dies, dies + 2), order)
    assert updates[0] == Update()
    assert updates.count(Update()) == 1
    steps = [update for update in updates if update.kinds]
    done = 0
    for step in steps:
        done += len(step.kinds)
        assert step.done == done
    assert done == len(tiny_pipe(PROMPT, seed=3, method=method).codes[0])
    partial = [update.partial for update in updates if update.partial is not None]
    assert partial == sorted({*partial})
    assert [update for update in updates if update.summary] == updates[-1:]


def test_what_auto_chose_stays_chosen(replica: Replica) -> None:
    replicas = Replicas(replica, 5)
    told(replicas, order_of(method="auto", quality="TVD=0.3"))
    first, second = (order.options for order in replicas.orders)
    assert first["method"] == "auto"
    assert second["method"].partition(":")[0] in ("ar", "eagle", "sjd", "lantern", "lantern++")
    assert second["quality"] is None


def test_a_method_that_was_asked_for_is_asked_for_again(replica: Replica) -> None:
    replicas = Replicas(replica, 5)
    told(replicas, order_of(method="lantern++:lambda=1.23456789"))
    assert [order.options["method"] for order in replicas.orders] == ["lantern++:lambda=1.23456789"] * 2


def test_errors_of_the_user_arrive_as_what_they_are(replica: Replica) -> None:
    with pytest.raises(RequestError, match="top_k: found -1"):
        told(Replicas(replica), order_of(top_k=-1))
    with pytest.raises(BusyError, match="try again in about 7 s") as caught:
        raise pickle.loads(pickle.dumps(BusyError("try again in about 7 s", 7)))
    assert caught.value.seconds == 7


def test_a_cluster_without_room_is_busy(replica: Replica) -> None:
    replicas = Replicas(replica, BackPressureError(4, 4))
    with pytest.raises(BusyError, match="no replica has room; try again in about 1 s") as caught:
        told(replicas, order_of())
    assert caught.value.seconds == 1
    assert len(replicas.orders) == 1


def test_an_order_that_had_a_place_waits_for_another(
    replica: Replica, tiny_pipe: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "AGAIN", 0.01)
    full = [BackPressureError(4, 4), BusyError("full", 3)] * LIVES
    replicas = Replicas(replica, 5, *full)
    last = told(replicas, order_of())[-1]
    assert pixels(last) == [tiny_pipe(PROMPT, seed=3).images[0].tobytes()]
    assert len(replicas.orders) == 2 + len(full)


@pytest.mark.parametrize(("error", "lives"), [(ActorDiedError(), LIVES), (RayTaskError("draw", "", KeyError()), 1)])
def test_an_order_that_kills_its_replicas_ends_and_so_does_one_that_finds_a_bug(
    error: Exception, lives: int, replica: Replica
) -> None:
    replicas = Replicas(replica, *[2] * 9, error=error)
    with pytest.raises(type(error)):
        told(replicas, order_of())
    assert len(replicas.orders) == lives


def test_closing_an_order_cancels_its_replica(replica: Replica) -> None:
    replicas = Replicas(replica)

    async def leave() -> None:
        drawer = RayDrawer("tiny", "24x24", {}, replicas)  # type: ignore[arg-type]
        updates = drawer.draw(order_of())
        assert drawer.load() == Load(0, 0, 0)
        await anext(updates)
        assert drawer.load() == Load(1, 0, 0)
        assert not replicas.responses[0].cancelled
        await updates.aclose()
        assert replicas.responses[0].cancelled
        assert drawer.load() == Load(0, 0, 0)

    asyncio.run(leave())


def test_a_replica_is_healthy_until_its_service_ends(tiny_folder: Path) -> None:
    own = Replica(str(tiny_folder), 1, 1, {"threads": 1})
    own.check_health()
    own._drawer.pipeline.service.close()
    with pytest.raises(EngineError, match="service: found it ended"):
        own.check_health()


@pytest.mark.parametrize("bundles", [[], ["a/tiny", "b/tiny"], ["ingress"]])
def test_deployments_need_names_of_their_own(bundles: list[str]) -> None:
    with pytest.raises(RequestError, match=r"bundles: found .*expected one or more, each of another name"):
        app(Settings(bundles=bundles))
