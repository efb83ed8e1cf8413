"""Images that join and leave a batch between passes get the tokens that they get alone, whatever shares the passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_engine import ToyCache, ToyDrafter, ToyModel, ToyTarget, codes_of, decode, make_model, make_prompt, plan_of

from lantern_rt.methods import (
    Autoregressive,
    Eagle,
    Lantern,
    LanternPlusPlus,
    MethodConfig,
    Sampling,
    SpeculativeJacobi,
    TreeMethod,
)
from lantern_rt.runtime.batch import Batch
from lantern_rt.runtime.decode import UNLIMITED, select_next_sequences
from lantern_rt.runtime.drafting import SequenceStep
from lantern_rt.runtime.engine import PassInput, PassOutput
from lantern_rt.runtime.state import ImageSequence, Prompt

VOCABULARY = 5
CODES = 9
NEIGHBORS = np.array([[n for n in range(VOCABULARY) if n != code] for code in range(VOCABULARY)])
METHODS: list[MethodConfig] = [
    Autoregressive(),
    Eagle(tree="chain-2"),
    Eagle(tree="dynamic-8-3-3"),
    Eagle(tree="tree-3-210-100"),
    SpeculativeJacobi(window=4),
    Lantern(tree="dynamic-8-3-3", neighbors=3, delta=0.2),
    LanternPlusPlus(tree="tree-3-210-100", neighbors=3),
    SpeculativeJacobi(window=3, neighbors=3, lambda_=1.5),
]
SAMPLINGS = [
    Sampling(),
    Sampling(cfg_scale=2.0, temperature=0.8, top_k=4),
    Sampling(cfg_scale=3.0, temperature=0),
    Sampling(cfg_scale=2.0, cfg_tokens=4),
    Sampling(cfg_scale=4.0, cfg_schedule="linear"),
    Sampling(cfg_scale=2.0, cfg_tokens=1, repetition_penalty=1.5),
]


def make_batch_model() -> ToyModel:
    return make_model(vocabulary=VOCABULARY, codes=CODES, round_span=4, neighbors=NEIGHBORS)


def make_padded_prompt(identity: int) -> Prompt:
    return make_prompt(identity, padding=identity % 3)


@dataclass(frozen=True)
class Visit:
    """A request that joins before step `arrives`, and is cancelled before step `leaves` unless it is complete."""

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


def codes_alone(visit: Visit, method: MethodConfig) -> list[int]:
    return codes_of(
        decode(make_batch_model(), [make_padded_prompt(visit.identity)], [visit.identity], visit.sampling, method), 1
    )[0]


class Queue:
    """A batch and the sequences that wait to join it.

    Args:
        model: toy model.
        rows: maximum number of batch rows.
        images: maximum number of images.
    """

    def __init__(self, model: ToyModel, rows: int = UNLIMITED, images: int = UNLIMITED) -> None:
        self.batch = Batch(model)
        self.rows = rows
        self.images = images
        self.waiting: list[ImageSequence] = []

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.batch.active_sequences)

    @property
    def joining(self) -> list[ImageSequence]:
        return select_next_sequences(self.batch, self.waiting, self.images, self.rows)

    def step(self) -> list[SequenceStep]:
        if new := self.joining:
            self.waiting = self.waiting[len(new) :]
            return self.batch.add(new)
        return self.batch.step()

    def cancel(self, sequences: list[ImageSequence]) -> None:
        self.waiting = [sequence for sequence in self.waiting if sequence not in sequences]
        self.batch.remove(sequences)


def submit(queue: Queue, number: int, visit: Visit) -> ImageSequence:
    sequence = ImageSequence(
        number,
        plan_of(make_batch_model().image, visit.sampling, visit.method, adaptive=bool(number % 2)),
        make_padded_prompt(visit.identity),
        visit.identity,
    )
    queue.waiting.append(sequence)
    return sequence


@settings(max_examples=40, deadline=None)
@given(st.lists(VISITS, min_size=1, max_size=6), st.integers(2, 7))
def test_tokens_do_not_depend_on_what_else_is_in_the_batch(visits: list[Visit], rows: int) -> None:
    engine = make_batch_model()
    queue = Queue(engine, rows)
    sequences: dict[int, ImageSequence] = {}
    codes: list[list[int]] = [[] for _ in visits]
    cancelled: set[int] = set()
    step = 0
    while step <= 12 or queue.busy:
        for number, visit in enumerate(visits):
            if visit.arrives == step:
                sequences[number] = submit(queue, number, visit)
            if visit.leaves == step and number in sequences and sequences[number].num_remaining_codes:
                queue.cancel([sequences[number]])
                cancelled.add(number)
        for part in queue.step():
            assert part.sequence not in cancelled
            codes[part.sequence] += part.codes.tolist()
        step += 1
    for number, visit in enumerate(visits):
        expected = codes_alone(visit, visit.method)
        assert codes[number] == expected[: len(codes[number])]
        assert len(codes[number]) == CODES or number in cancelled
    assert isinstance(engine.target, ToyTarget)
    assert max((count for count, _ in engine.target.passes), default=0) <= rows
    assert not queue.step()


def test_images_wait_for_free_rows_in_the_order_of_arrival() -> None:
    queue = Queue(make_batch_model(), rows=4)
    sampling = SAMPLINGS[1]
    sequences = [submit(queue, i, Visit(i, sampling, Autoregressive(), 0, 0)) for i in range(5)]
    finished: list[int] = []
    while queue.busy:
        for part in queue.step():
            if not sequences[part.sequence].num_remaining_codes:
                finished.append(part.sequence)
        assert len(queue.batch.active_sequences) <= 2
    assert finished == [0, 1, 2, 3, 4]
    unguided, _ = (submit(queue, i, Visit(i, SAMPLINGS[0], Autoregressive(), 0, 0)) for i in range(2))
    queue.step()
    assert len(queue.batch.active_sequences) == 2
    assert unguided.num_remaining_codes == CODES - 1


def test_an_image_joins_without_waiting_for_others_to_end() -> None:
    queue = Queue(make_batch_model())
    first = submit(queue, 0, Visit(0, SAMPLINGS[0], Autoregressive(), 0, 0))
    for _ in range(4):
        queue.step()
    second = submit(queue, 1, Visit(1, SAMPLINGS[1], Autoregressive(), 0, 0))
    assert [part.sequence for part in queue.step()] == [1]
    assert [part.sequence for part in queue.step()] == [0, 1]
    assert (len(first.codes), len(second.codes)) == (5, 2)


def test_a_cancelled_image_leaves_at_once_and_nothing_of_it_remains() -> None:
    engine = make_batch_model()
    queue = Queue(engine)
    visits = [Visit(i, SAMPLINGS[1], Eagle(tree="chain-2"), 0, 0) for i in range(3)]
    sequences = [submit(queue, i, visit) for i, visit in enumerate(visits)]
    queue.cancel([sequences[2]])  # still waiting
    queue.step()
    queue.step()
    queue.cancel([sequences[0]])
    queue.cancel([sequences[0]])
    assert queue.batch.active_sequences == [sequences[1]]
    assert isinstance(engine.target, ToyTarget)
    assert isinstance(engine.drafter, ToyDrafter)
    queue.step()
    assert (engine.target.passes[-1][0], engine.drafter.passes[-1][0]) == (2, 2)
    while queue.busy:
        queue.step()
    assert sequences[1].codes[:CODES] == codes_alone(visits[1], Autoregressive())
    batch_fields: dict[str, Any] = vars(queue.batch)
    assert not batch_fields["_drafters"].drafters_with_sequences
    assert batch_fields["_cache"] is None


def test_a_full_batch_is_refilled_together_unless_too_many_places_are_idle() -> None:
    queue = Queue(make_batch_model(), images=4)
    first_images = [submit(queue, i, Visit(i, SAMPLINGS[0], Autoregressive(), 0, 0)) for i in range(4)]
    queue.step()
    next_images = [submit(queue, i, Visit(i, SAMPLINGS[0], Autoregressive(), 0, 0)) for i in range(4, 9)]
    queue.cancel(first_images[:1])
    assert not queue.joining
    queue.cancel(first_images[1:2])
    assert queue.joining, "half of the places would be idle for long"
    queue.step()
    assert queue.batch.active_sequences == [*first_images[2:], *next_images[:2]]
    queue.cancel([first_images[2], next_images[4]])
    assert queue.joining, "the two that wait do not fill the batch, so they join at once"


class PartlyDamaged(ToyTarget):
    """Target whose logits are NaN in the batch rows that `damaged` returns."""

    damaged: Callable[[], slice] = staticmethod(lambda: slice(0))

    def run(self, batch: PassInput, cache: ToyCache) -> PassOutput:
        output = super().run(batch, cache)
        output.logits[self.damaged()] = np.nan
        return output


class PartlyDamagedDrafter(ToyDrafter):
    """Drafter whose logits are NaN in the batch rows that `damaged` returns."""

    damaged: Callable[[], slice] = staticmethod(lambda: slice(0))

    def run(self, batch: PassInput, cache: ToyCache) -> PassOutput:
        output = super().run(batch, cache)
        output.logits[self.damaged()] = np.nan
        return output


@pytest.mark.parametrize("sampling", [SAMPLINGS[0], SAMPLINGS[1], SAMPLINGS[2], SAMPLINGS[5]], ids=str)
@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize(("part", "damaged_step"), [("target", 0), ("target", 1), ("target", 2), ("drafter", 1)])
def test_only_the_sequence_whose_logits_are_nan_fails(
    method: MethodConfig, sampling: Sampling, part: str, damaged_step: int
) -> None:
    healthy = make_batch_model()
    damaged = PartlyDamaged(**vars(healthy.target)), PartlyDamagedDrafter(**vars(healthy.drafter))
    queue = Queue(replace(healthy, target=damaged[0], drafter=damaged[1]))
    sequences = [submit(queue, i, Visit(i, sampling, method, 0, 0)) for i in range(4)]
    count = len(sequences[1].rows)
    batch_fields: dict[str, Any] = vars(queue.batch)
    step = 0

    def damaged_rows() -> slice:
        rows = batch_fields["_rows"].get(sequences[1], slice(0)) if step else slice(count, 2 * count)
        return rows if step == damaged_step else slice(0)

    damaged[part == "drafter"].damaged = damaged_rows
    affects_method = part == "target" or isinstance(method, TreeMethod)
    failed_sequences: list[ImageSequence] = []
    while queue.busy:
        is_damaged_step = step == damaged_step and sequences[1].num_remaining_codes > 0
        queue.step()
        assert queue.batch.failed_sequences == ([sequences[1]] if is_damaged_step and affects_method else [])
        failed_sequences += queue.batch.failed_sequences
        step += 1
    assert all("NaN" in str(sequence.error) for sequence in failed_sequences)
    for i, sequence in enumerate(sequences):
        if sequence not in failed_sequences:
            assert sequence.codes == codes_alone(Visit(i, sampling, method, 0, 0), method)
    assert not batch_fields["_drafters"].drafters_with_sequences
    assert batch_fields["_cache"] is None
