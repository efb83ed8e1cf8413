"""Requests that come and go between passes get the tokens they get alone, by whatever methods others are drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_engine import ToyCache, ToyDrafter, ToyModel, ToyTarget, codes_of, decode, make_model, make_prompt, plan_of

from lantern_rt.methods import Ar, Drafted, Eagle, Lantern, LanternPlusPlus, MethodConfig, Sampling, Sjd
from lantern_rt.runtime.batch import Batch
from lantern_rt.runtime.decode import UNLIMITED, select_joining
from lantern_rt.runtime.drafting import SequenceStep
from lantern_rt.runtime.engine import Pass, PassOutput
from lantern_rt.runtime.state import ImageSequence, Prompt

VOCABULARY = 5
CODES = 9
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
SAMPLINGS = [
    Sampling(),
    Sampling(cfg_scale=2.0, temperature=0.8, top_k=4),
    Sampling(cfg_scale=3.0, temperature=0),
    Sampling(cfg_scale=2.0, cfg_tokens=4),
    Sampling(cfg_scale=4.0, cfg_schedule="linear"),
    Sampling(cfg_scale=2.0, cfg_tokens=1, repetition_penalty=1.5),
]


def model() -> ToyModel:
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


class Line:
    """A batch, and who waits in line for it."""

    def __init__(self, model: ToyModel, rows: int = UNLIMITED, images: int = UNLIMITED) -> None:
        self.batch = Batch(model)
        self.rows = rows
        self.images = images
        self.waiting: list[ImageSequence] = []

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.batch.active)

    @property
    def joining(self) -> list[ImageSequence]:
        return select_joining(self.batch, self.waiting, self.images, self.rows)

    def step(self) -> list[SequenceStep]:
        if new := self.joining:
            self.waiting = self.waiting[len(new) :]
            return self.batch.join(new)
        return self.batch.step()

    def cancel(self, requests: list[ImageSequence]) -> None:
        self.waiting = [request for request in self.waiting if request not in requests]
        self.batch.leave(requests)


def submitted(line: Line, number: int, visit: Visit) -> ImageSequence:
    request = ImageSequence(
        number,
        plan_of(model().image, visit.sampling, visit.method, adaptive=bool(number % 2)),
        prompt(visit.identity),
        visit.identity,
    )
    line.waiting.append(request)
    return request


@settings(max_examples=40, deadline=None)
@given(st.lists(VISITS, min_size=1, max_size=6), st.integers(2, 7))
def test_tokens_do_not_depend_on_who_shares_the_passes(visits: list[Visit], rows: int) -> None:
    engine = model()
    line = Line(engine, rows)
    requests: dict[int, ImageSequence] = {}
    codes: list[list[int]] = [[] for _ in visits]
    cancelled: set[int] = set()
    step = 0
    while step <= 12 or line.busy:
        for number, visit in enumerate(visits):
            if visit.arrives == step:
                requests[number] = submitted(line, number, visit)
            if visit.leaves == step and number in requests and requests[number].remaining:
                line.cancel([requests[number]])
                cancelled.add(number)
        for part in line.step():
            assert part.sequence not in cancelled
            codes[part.sequence] += part.codes.tolist()
        step += 1
    for number, visit in enumerate(visits):
        expected = alone(visit, visit.method)
        assert codes[number] == expected[: len(codes[number])]
        assert len(codes[number]) == CODES or number in cancelled
    assert isinstance(engine.target, ToyTarget)
    assert max((count for count, _ in engine.target.passes), default=0) <= rows
    assert not line.step()


def test_requests_wait_for_room_in_the_order_they_came() -> None:
    line = Line(model(), rows=4)
    sampling = SAMPLINGS[1]
    requests = [submitted(line, i, Visit(i, sampling, Ar(), 0, 0)) for i in range(5)]
    finished: list[int] = []
    while line.busy:
        for part in line.step():
            if not requests[part.sequence].remaining:
                finished.append(part.sequence)
        assert len(line.batch.active) <= 2
    assert finished == [0, 1, 2, 3, 4]
    unguided, _ = (submitted(line, i, Visit(i, SAMPLINGS[0], Ar(), 0, 0)) for i in range(2))
    line.step()
    assert len(line.batch.active) == 2
    assert unguided.remaining == CODES - 1


def test_a_request_joins_without_waiting_for_others_to_end() -> None:
    line = Line(model())
    first = submitted(line, 0, Visit(0, SAMPLINGS[0], Ar(), 0, 0))
    for _ in range(4):
        line.step()
    second = submitted(line, 1, Visit(1, SAMPLINGS[1], Ar(), 0, 0))
    assert [part.sequence for part in line.step()] == [1]
    assert [part.sequence for part in line.step()] == [0, 1]
    assert (len(first.codes), len(second.codes)) == (5, 2)


def test_a_cancelled_request_leaves_at_once_and_is_forgotten() -> None:
    engine = model()
    line = Line(engine)
    visits = [Visit(i, SAMPLINGS[1], Eagle(tree="chain-2"), 0, 0) for i in range(3)]
    requests = [submitted(line, i, visit) for i, visit in enumerate(visits)]
    line.cancel([requests[2]])  # not yet begun
    line.step()
    line.step()
    line.cancel([requests[0]])
    line.cancel([requests[0]])
    assert line.batch.active == [requests[1]]
    assert isinstance(engine.target, ToyTarget)
    assert isinstance(engine.drafter, ToyDrafter)
    line.step()
    assert (engine.target.passes[-1][0], engine.drafter.passes[-1][0]) == (2, 2)
    while line.busy:
        line.step()
    assert requests[1].codes[:CODES] == alone(visits[1], Ar())
    held: dict[str, Any] = vars(line.batch)
    assert not held["_drafters"].all
    assert held["_cache"] is None


def test_who_fills_all_places_waits_for_all_unless_too_much_stands_idle_and_few_join_at_once() -> None:
    line = Line(model(), images=4)
    slow = [submitted(line, i, Visit(i, SAMPLINGS[0], Ar(), 0, 0)) for i in range(4)]
    line.step()
    others = [submitted(line, i, Visit(i, SAMPLINGS[0], Ar(), 0, 0)) for i in range(4, 9)]
    line.cancel(slow[:1])
    assert not line.joining
    line.cancel(slow[1:2])
    assert line.joining, "two of four places would be idle for long"
    line.step()
    assert line.batch.active == [*slow[2:], *others[:2]]
    line.cancel([slow[2], others[4]])
    assert line.joining, "two wait, who do not fill all places"


class PartlyDamaged(ToyTarget):
    """A target that gives NaN in the batch rows that `damaged` names."""

    damaged: Callable[[], slice] = staticmethod(lambda: slice(0))

    def run(self, batch: Pass, cache: ToyCache) -> PassOutput:
        output = super().run(batch, cache)
        output.logits[self.damaged()] = np.nan
        return output


class PartlyDamagedDrafter(ToyDrafter):
    """A drafter that gives NaN in the batch rows that `damaged` names."""

    damaged: Callable[[], slice] = staticmethod(lambda: slice(0))

    def run(self, batch: Pass, cache: ToyCache) -> PassOutput:
        output = super().run(batch, cache)
        output.logits[self.damaged()] = np.nan
        return output


@pytest.mark.parametrize("sampling", [SAMPLINGS[0], SAMPLINGS[1], SAMPLINGS[2], SAMPLINGS[5]], ids=str)
@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize(("part", "damaged_step"), [("target", 0), ("target", 1), ("target", 2), ("drafter", 1)])
def test_a_sequence_whose_logits_are_no_numbers_ends_alone(
    method: MethodConfig, sampling: Sampling, part: str, damaged_step: int
) -> None:
    healthy = model()
    damaged = PartlyDamaged(**vars(healthy.target)), PartlyDamagedDrafter(**vars(healthy.drafter))
    line = Line(replace(healthy, target=damaged[0], drafter=damaged[1]))
    requests = [submitted(line, i, Visit(i, sampling, method, 0, 0)) for i in range(4)]
    count = len(requests[1].rows)
    held: dict[str, Any] = vars(line.batch)
    step = 0

    def sick_rows() -> slice:
        rows = held["_rows"].get(requests[1], slice(0)) if step else slice(count, 2 * count)
        return rows if step == damaged_step else slice(0)

    damaged[part == "drafter"].damaged = sick_rows
    reached = part == "target" or isinstance(method, Drafted)
    ended: list[ImageSequence] = []
    while line.busy:
        concerned = step == damaged_step and requests[1].remaining > 0
        line.step()
        assert line.batch.failed == ([requests[1]] if concerned and reached else [])
        ended += line.batch.failed
        step += 1
    assert all("NaN" in str(request.error) for request in ended)
    for i, request in enumerate(requests):
        if request not in ended:
            assert request.codes == alone(Visit(i, sampling, method, 0, 0), method)
    assert not held["_drafters"].all
    assert held["_cache"] is None
