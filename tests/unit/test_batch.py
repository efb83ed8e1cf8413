"""Batches that images join and leave between passes: the tokens of an image do not depend on other images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from guided_logits import make_sampler
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_engine import (
    AnyOrderTarget,
    Hashes,
    ToyCache,
    ToyDrafter,
    ToyModel,
    ToyTarget,
    collect_codes,
    compute_likelihood,
    decode,
    make_model,
    make_plan,
    make_prompt,
)
from toy_methods import METHODS as TOY_METHODS
from toy_methods import NEIGHBORS, VOCABULARY

from lantern_rt.methods import Autoregressive, Eagle, MethodConfig, RowParallel, Sampling, SpeculativeJacobi, TreeMethod
from lantern_rt.runtime.batch import Batch
from lantern_rt.runtime.decode import UNLIMITED, select_next_sequences
from lantern_rt.runtime.device import DeviceLogits, SamplingRequest
from lantern_rt.runtime.drafting import SequenceStep
from lantern_rt.runtime.engine import Floats, Ints, PassInput, PassOutput
from lantern_rt.runtime.heads import DraftHeads, draft_head_shapes
from lantern_rt.runtime.sampling import find_top_codes
from lantern_rt.runtime.state import ImageSequence, Prompt

CODES = 9
METHODS = [*TOY_METHODS.values()]
SAMPLINGS = [
    Sampling(),
    Sampling(cfg_scale=2.0, temperature=0.8, top_k=4),
    Sampling(cfg_scale=3.0, temperature=0),
    Sampling(cfg_scale=2.0, cfg_tokens=4),
    Sampling(cfg_scale=4.0, cfg_schedule="linear"),
    Sampling(cfg_scale=4.0, cfg_schedule="cosine-1.5"),
    Sampling(cfg_scale=2.0, cfg_tokens=1, repetition_penalty=1.5),
]


def make_batch_model() -> ToyModel:
    return make_model(vocabulary=VOCABULARY, codes=CODES, past_length_multiple=4, neighbors=NEIGHBORS)


def make_padded_prompt(prompt_id: int) -> Prompt:
    return make_prompt(prompt_id, padding=prompt_id % 3)


@dataclass(frozen=True)
class TimedRequest:
    """A request for an image that joins a batch before one step, and may be cancelled before another step."""

    prompt_id: int
    sampling: Sampling
    method: MethodConfig
    join_step: int = 0
    cancel_step: int = 0


SETTINGS = (st.sampled_from(SAMPLINGS), st.sampled_from(METHODS))
TIMED_REQUESTS = st.builds(TimedRequest, st.integers(0, 5), *SETTINGS, st.integers(0, 12), st.integers(3, 60))


def generate_alone(request: TimedRequest, method: MethodConfig) -> list[int]:
    prompts = [make_padded_prompt(request.prompt_id)]
    return collect_codes(decode(make_batch_model(), prompts, [request.prompt_id], request.sampling, method), 1)[0]


class BatchQueue:
    def __init__(self, model: ToyModel, max_rows: int = UNLIMITED, max_images: int = UNLIMITED) -> None:
        self.batch = Batch(model)
        self.max_rows = max_rows
        self.max_images = max_images
        self.waiting: list[ImageSequence] = []

    @property
    def has_sequences(self) -> bool:
        return bool(self.waiting or self.batch.active_sequences)

    @property
    def next_sequences(self) -> list[ImageSequence]:
        return select_next_sequences(self.batch, self.waiting, self.max_images, self.max_rows)

    def step(self) -> list[SequenceStep]:
        if new := self.next_sequences:
            self.waiting = self.waiting[len(new) :]
            return self.batch.add(new)
        return self.batch.step()

    def cancel(self, sequences: list[ImageSequence]) -> None:
        self.waiting = [sequence for sequence in self.waiting if sequence not in sequences]
        self.batch.remove(sequences)


def add_request(queue: BatchQueue, number: int, request: TimedRequest) -> ImageSequence:
    plan = make_plan(make_batch_model().image, request.sampling, request.method)
    plan = replace(plan, adaptive_window=bool(number % 2))
    sequence = ImageSequence(number, plan, make_padded_prompt(request.prompt_id), request.prompt_id)
    queue.waiting.append(sequence)
    return sequence


@settings(max_examples=40, deadline=None)
@given(st.lists(TIMED_REQUESTS, min_size=1, max_size=6), st.integers(2, 7))
def test_tokens_do_not_depend_on_other_images_in_the_batch(requests: list[TimedRequest], rows: int) -> None:
    engine = make_batch_model()
    queue = BatchQueue(engine, rows)
    sequences: dict[int, ImageSequence] = {}
    codes: list[list[int]] = [[] for _ in requests]
    cancelled: set[int] = set()
    step = 0
    while step <= 12 or queue.has_sequences:
        for number, request in enumerate(requests):
            if request.join_step == step:
                sequences[number] = add_request(queue, number, request)
            if request.cancel_step == step and number in sequences and sequences[number].num_remaining_codes:
                queue.cancel([sequences[number]])
                cancelled.add(number)
        for sequence_step in queue.step():
            assert sequence_step.sequence not in cancelled
            codes[sequence_step.sequence] += sequence_step.codes.tolist()
        step += 1
    for number, request in enumerate(requests):
        expected = generate_alone(request, request.method)
        assert codes[number] == expected[: len(codes[number])]
        assert len(codes[number]) == CODES or number in cancelled
    assert isinstance(engine.target, ToyTarget)
    assert max((count for count, _ in engine.target.passes), default=0) <= rows
    assert not queue.step()


def test_images_wait_for_free_batch_rows_in_the_order_of_arrival() -> None:
    queue = BatchQueue(make_batch_model(), max_rows=4)
    sampling = SAMPLINGS[1]
    sequences = [add_request(queue, i, TimedRequest(i, sampling, Autoregressive())) for i in range(5)]
    finished_images: list[int] = []
    while queue.has_sequences:
        for sequence_step in queue.step():
            if not sequences[sequence_step.sequence].num_remaining_codes:
                finished_images.append(sequence_step.sequence)
        assert len(queue.batch.active_sequences) <= 2
    assert finished_images == [0, 1, 2, 3, 4]
    unguided, _ = (add_request(queue, i, TimedRequest(i, SAMPLINGS[0], Autoregressive())) for i in range(2))
    queue.step()
    assert len(queue.batch.active_sequences) == 2
    assert unguided.num_remaining_codes == CODES - 1


def test_an_image_joins_a_batch_that_is_running() -> None:
    queue = BatchQueue(make_batch_model())
    first_image = add_request(queue, 0, TimedRequest(0, SAMPLINGS[0], Autoregressive()))
    for _ in range(4):
        queue.step()
    second_image = add_request(queue, 1, TimedRequest(1, SAMPLINGS[1], Autoregressive()))
    assert [sequence_step.sequence for sequence_step in queue.step()] == [1]
    assert [sequence_step.sequence for sequence_step in queue.step()] == [0, 1]
    assert (len(first_image.codes), len(second_image.codes)) == (5, 2)


def test_a_cancelled_image_frees_cache_and_drafter_state() -> None:
    engine = make_batch_model()
    queue = BatchQueue(engine)
    requests = [TimedRequest(i, SAMPLINGS[1], Eagle(tree="chain-2")) for i in range(3)]
    sequences = [add_request(queue, i, request) for i, request in enumerate(requests)]
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
    while queue.has_sequences:
        queue.step()
    assert sequences[1].codes[:CODES] == generate_alone(requests[1], Autoregressive())
    batch_fields: dict[str, Any] = vars(queue.batch)
    assert not batch_fields["_drafters"].drafters_with_sequences
    assert batch_fields["_cache"] is None


def test_images_join_a_full_batch_when_half_of_it_is_idle() -> None:
    queue = BatchQueue(make_batch_model(), max_images=4)
    first_images = [add_request(queue, i, TimedRequest(i, SAMPLINGS[0], Autoregressive())) for i in range(4)]
    queue.step()
    next_images = [add_request(queue, i, TimedRequest(i, SAMPLINGS[0], Autoregressive())) for i in range(4, 9)]
    queue.cancel(first_images[:1])
    assert not queue.next_sequences
    queue.cancel(first_images[1:2])
    assert queue.next_sequences, "half of the batch would be idle for long"
    queue.step()
    assert queue.batch.active_sequences == [*first_images[2:], *next_images[:2]]
    queue.cancel([first_images[2], next_images[4]])
    assert queue.next_sequences, "two waiting images do not fill the batch, so both join at once"


class SampledByDevice(DeviceLogits):
    def __init__(self, logits: Floats) -> None:
        self.logits = logits

    def __getitem__(self, key: Any, /) -> Any:
        return self.logits[key]

    def supports_sampling(self, sampling: Sampling) -> bool:
        return not sampling.has_repetition_penalty

    def sample_top_codes(self, requests: Sequence[SamplingRequest], count: int) -> list[tuple[Ints, Floats]]:
        best = []
        for rows, nodes, sampling, noise, positions, scales in requests:
            conditional, unconditional = self.logits[rows, nodes]
            mixed = unconditional + scales[:, None] * (conditional - unconditional)
            values = make_sampler(sampling).process(np.where((rows[0] == rows[1])[:, None], conditional, mixed))
            if noise is not None:
                values = values + np.concatenate([noise.gumbel(p, 1, VOCABULARY) for p in positions.tolist()])
            best.append(find_top_codes(values, count))
        return best


class TargetWithNanRows(ToyTarget):
    """Target whose logits are NaN in the batch rows that `choose_nan_rows` returns."""

    choose_nan_rows: Callable[[], slice] = staticmethod(lambda: slice(0))
    is_device = False

    def run(self, batch: PassInput, cache: ToyCache) -> PassOutput:
        output = super().run(batch, cache)
        output.logits[self.choose_nan_rows()] = np.nan
        on_device = self.is_device and batch.embeds is None
        return output._replace(logits=SampledByDevice(output.logits)) if on_device else output


class DrafterWithNanRows(ToyDrafter):
    """Drafter whose logits are NaN in the batch rows that `choose_nan_rows` returns."""

    choose_nan_rows: Callable[[], slice] = staticmethod(lambda: slice(0))

    def run(self, batch: PassInput, cache: ToyCache) -> PassOutput:
        output = super().run(batch, cache)
        output.logits[self.choose_nan_rows()] = np.nan
        return output


@pytest.mark.parametrize("sampling", [SAMPLINGS[0], SAMPLINGS[1], SAMPLINGS[2], SAMPLINGS[5]], ids=str)
@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize(
    ("engine_name", "nan_step"), [("target", 0), ("target", 1), ("target", 2), ("device", 1), ("drafter", 1)]
)
def test_only_the_sequence_whose_logits_are_nan_fails(
    method: MethodConfig, sampling: Sampling, engine_name: str, nan_step: int
) -> None:
    healthy = make_batch_model()
    engines = TargetWithNanRows(**vars(healthy.target)), DrafterWithNanRows(**vars(healthy.drafter))
    queue = BatchQueue(replace(healthy, target=engines[0], drafter=engines[1]))
    sequences = [add_request(queue, i, TimedRequest(i, sampling, method)) for i in range(4)]
    count = len(sequences[1].rows)
    batch_fields: dict[str, Any] = vars(queue.batch)
    step = 0

    def choose_nan_rows() -> slice:
        rows = batch_fields["_rows"].get(sequences[1], slice(0)) if step else slice(count, 2 * count)
        return rows if step == nan_step else slice(0)

    engines[engine_name == "drafter"].choose_nan_rows = choose_nan_rows
    engines[0].is_device = engine_name == "device"
    affects_method = engine_name != "drafter" or isinstance(method, TreeMethod)
    failed_sequences: list[ImageSequence] = []
    while queue.has_sequences:
        is_nan_step = step == nan_step and sequences[1].num_remaining_codes > 0
        queue.step()
        assert queue.batch.failed_sequences == ([sequences[1]] if is_nan_step and affects_method else [])
        failed_sequences += queue.batch.failed_sequences
        step += 1
    assert all("NaN" in str(sequence.error) for sequence in failed_sequences)
    for i, sequence in enumerate(sequences):
        if sequence not in failed_sequences:
            assert sequence.codes == generate_alone(TimedRequest(i, sampling, method), method)
    assert not batch_fields["_drafters"].drafters_with_sequences
    assert batch_fields["_cache"] is None


@dataclass
class PathTarget(AnyOrderTarget):
    """Target that records the contexts of its nodes, and then gives NaN for all other contexts."""

    contexts: set[int] = field(default_factory=set)
    is_damaged: bool = False
    is_device: bool = False

    def compute_logits(self, context: Hashes) -> Floats:
        logits = super().compute_logits(context)
        if self.is_damaged:
            logits[~np.isin(context, np.array([*self.contexts], np.uint64))] = np.nan
        else:
            self.contexts.update(context.ravel().tolist())
        return logits

    def run(self, batch: PassInput, cache: ToyCache) -> PassOutput:
        output = super().run(batch, cache)
        output.hidden[np.isnan(output.logits[..., 0])] = np.nan
        on_device = self.is_damaged and self.is_device and batch.embeds is None
        return output._replace(logits=SampledByDevice(output.logits)) if on_device else output


NAN_CASES = [(method, False) for method in METHODS[1:-1]]  # methods, and whether the model has draft heads
NAN_CASES += [(RowParallel(window=2, drafts=3), False), (SpeculativeJacobi(window=4), True)]
NAN_CASES += [(Eagle(tree=tree, drafter="heads"), True) for tree in ("chain-6", "tree-3-210-100", "dynamic-8-3-3")]


@pytest.mark.parametrize("place", ["host", "host, near-ties", "device"])
@pytest.mark.parametrize("sampling", [SAMPLINGS[0], SAMPLINGS[1], SAMPLINGS[2], SAMPLINGS[5]], ids=str)
@pytest.mark.parametrize(("method", "has_heads"), NAN_CASES, ids=str)
def test_nan_after_tokens_that_are_not_accepted_changes_nothing(
    method: MethodConfig, has_heads: bool, sampling: Sampling, place: str
) -> None:
    model = make_batch_model()
    assert isinstance(model.drafter, ToyDrafter)
    target = PathTarget(**vars(model.target), is_device=place == "device")
    drafter = replace(model.drafter, target=target) if method.exact else model.drafter
    tables = draft_head_shapes(VOCABULARY, 6, rank=3, units=2)
    heads = DraftHeads(**{name: np.full(shape, 1e-8, np.float32) for name, shape in tables.items()})
    model = replace(model, target=target, drafter=drafter, heads=heads if has_heads else None)
    prompts = [make_padded_prompt(i) for i in range(3)]
    if isinstance(method, RowParallel):
        expected = collect_codes(decode(model, prompts, range(3), sampling, RowParallel(window=method.window)), 3)
    else:
        undrafted = Autoregressive() if method.exact else method
        expected = collect_codes(decode(make_batch_model(), prompts, range(3), sampling, undrafted), 3)
        for prompt, codes in zip(prompts, expected, strict=True):
            compute_likelihood(model, prompt, np.array(codes), sampling)
    target.is_damaged = True
    model = replace(model, rounding_bound=0.1 if place == "host, near-ties" else 0.0)
    assert collect_codes(decode(model, prompts, range(3), sampling, method), 3) == expected
