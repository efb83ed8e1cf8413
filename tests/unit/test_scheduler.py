"""Requests that come and go between passes get the tokens they get alone, by whatever methods others are drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_engine import ToyDrafter, ToyTarget, codes_of, make_model, make_prompt

from lantern_rt.methods import Ar, Eagle, Lantern, LanternPlusPlus, MethodConfig, Sampling, Sjd
from lantern_rt.runtime.decode import decode
from lantern_rt.runtime.scheduler import Scheduler
from lantern_rt.runtime.state import Model, Prompt, Request

VOCABULARY, CODES = 5, 9
NEAR = np.array([[n for n in range(VOCABULARY) if n != code] for code in range(VOCABULARY)])
METHODS: list[MethodConfig] = [
    Ar(),
    Eagle(tree="chain-2"),
    Eagle(tree="dynamic-8-3-3"),
    Eagle(tree="tree-3-210-100"),
    Sjd(window=4),
    Lantern(tree="dynamic-8-3-3", neighbors=3, delta=0.2),
    LanternPlusPlus(tree="tree-3-210-100", neighbors=3),
    Sjd(window=3, neighbors=3, lambda_=1.5),
]
SAMPLINGS = [Sampling(), Sampling(cfg_scale=2.0, temperature=0.8, top_k=4), Sampling(cfg_scale=3.0, temperature=0)]


def model() -> Model:
    return make_model(vocabulary=VOCABULARY, codes=CODES, round_span=4, neighbors=NEAR)


def prompt(identity: int) -> Prompt:
    return make_prompt(identity, padding=identity % 3)


@dataclass(frozen=True)
class Visit:
    """A request that comes before step `arrives`, and is cancelled before step `leaves` unless it is done by then."""

    identity: int
    sampling: Sampling
    method: MethodConfig
    arrives: int
    leaves: int


VISITS = st.builds(
    Visit,
    st.integers(0, 5),
    st.sampled_from(SAMPLINGS),
    st.sampled_from(METHODS),
    st.integers(0, 12),
    st.integers(3, 60),
)


def alone(visit: Visit, method: MethodConfig) -> list[int]:
    return codes_of(decode(model(), [prompt(visit.identity)], [visit.identity], visit.sampling, method), 1)[0]


def submitted(scheduler: Scheduler, number: int, visit: Visit) -> Request:
    rows = prompt(visit.identity).rows(visit.sampling)
    request = Request(
        number, model().raster, rows, visit.sampling, visit.method, visit.identity, adaptive=bool(number % 2)
    )
    scheduler.submit(request)
    return request


@settings(max_examples=40, deadline=None)
@given(st.lists(VISITS, min_size=1, max_size=6), st.integers(2, 7))
def test_tokens_do_not_depend_on_who_shares_the_passes(visits: list[Visit], rows: int) -> None:
    engine = model()
    scheduler = Scheduler(engine, rows)
    requests: dict[int, Request] = {}
    codes: list[list[int]] = [[] for _ in visits]
    cancelled: set[int] = set()
    step = 0
    while step <= 12 or scheduler.busy:
        for number, visit in enumerate(visits):
            if visit.arrives == step:
                requests[number] = submitted(scheduler, number, visit)
            if visit.leaves == step and number in requests and requests[number].missing:
                scheduler.cancel([requests[number]])
                cancelled.add(number)
        for part in scheduler.step():
            assert part.request not in cancelled
            codes[part.request] += part.codes.tolist()
        step += 1
    for number, visit in enumerate(visits):
        expected = alone(visit, visit.method)
        assert codes[number] == expected[: len(codes[number])]
        assert len(codes[number]) == CODES or number in cancelled
    assert isinstance(engine.target, ToyTarget)
    assert max((count for count, _ in engine.target.passes), default=0) <= rows
    assert not scheduler.step()


def test_requests_wait_for_room_in_the_order_they_came() -> None:
    scheduler, sampling = Scheduler(model(), rows=4), SAMPLINGS[1]
    requests = [submitted(scheduler, i, Visit(i, sampling, Ar(), 0, 0)) for i in range(5)]
    finished: list[int] = []
    while scheduler.busy:
        for part in scheduler.step():
            if not requests[part.request].missing:
                finished.append(part.request)
        assert len(scheduler.active) <= 2
    assert finished == [0, 1, 2, 3, 4]
    unguided, _ = (submitted(scheduler, i, Visit(i, SAMPLINGS[0], Ar(), 0, 0)) for i in range(2))
    scheduler.step()
    assert len(scheduler.active) == 2
    assert unguided.missing == CODES - 1
    with pytest.raises(ValueError, match="a request of 2 rows, expected at most 1"):
        submitted(Scheduler(model(), rows=1), 0, Visit(0, sampling, Ar(), 0, 0))


def test_a_request_joins_without_waiting_for_others_to_end() -> None:
    scheduler = Scheduler(model())
    first = submitted(scheduler, 0, Visit(0, SAMPLINGS[0], Ar(), 0, 0))
    for _ in range(4):
        scheduler.step()
    second = submitted(scheduler, 1, Visit(1, SAMPLINGS[1], Ar(), 0, 0))
    assert [part.request for part in scheduler.step()] == [1]
    assert [part.request for part in scheduler.step()] == [0, 1]
    assert (len(first.codes), len(second.codes)) == (5, 2)


def test_a_cancelled_request_leaves_at_once_and_is_forgotten() -> None:
    engine = model()
    scheduler = Scheduler(engine)
    visits = [Visit(i, SAMPLINGS[1], Eagle(tree="chain-2"), 0, 0) for i in range(3)]
    requests = [submitted(scheduler, i, visit) for i, visit in enumerate(visits)]
    scheduler.cancel([requests[2]])  # not yet begun
    scheduler.step()
    scheduler.step()
    scheduler.cancel([requests[0]])
    scheduler.cancel([requests[0]])
    assert scheduler.active == [requests[1]]
    assert isinstance(engine.target, ToyTarget)
    assert isinstance(engine.drafter, ToyDrafter)
    scheduler.step()
    assert (engine.target.passes[-1][0], engine.drafter.passes[-1][0]) == (2, 2)
    while scheduler.busy:
        scheduler.step()
    assert requests[1].codes[:CODES] == alone(visits[1], Ar())
    held: dict[str, Any] = vars(scheduler)
    assert not held["_eagles"]
    assert not vars(held["_windows"])["_windows"]
    assert held["_cache"] is None


def test_who_fills_all_places_waits_for_all_unless_too_much_stands_idle_and_few_join_at_once() -> None:
    scheduler = Scheduler(model(), images=4)
    slow = [submitted(scheduler, i, Visit(i, SAMPLINGS[0], Ar(), 0, 0)) for i in range(4)]
    scheduler.step()
    others = [submitted(scheduler, i, Visit(i, SAMPLINGS[0], Ar(), 0, 0)) for i in range(4, 9)]
    scheduler.cancel(slow[:1])
    assert not scheduler.joining
    scheduler.cancel(slow[1:2])
    assert scheduler.joining, "two of four places would be idle for long"
    scheduler.step()
    assert scheduler.active == [*slow[2:], *others[:2]]
    scheduler.cancel([slow[2], others[4]])
    assert scheduler.joining, "two wait, who do not fill all places"
