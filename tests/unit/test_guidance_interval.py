"""Guidance of the first tokens only: what is drawn after them, and that the unconditional row is gone by then."""

import numpy as np
import pytest
from test_decode import CODES, METHODS, VOCABULARY, codes_of, model, prompts, steps_of
from toy_engine import ToyTarget

from lantern_rt.methods import Ar, MethodConfig, RowParallel, Sampling
from lantern_rt.runtime.noise import Noise
from lantern_rt.runtime.sampling import choose, guide
from lantern_rt.runtime.sequences import sequence_logits
from lantern_rt.runtime.statistics import Clock


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_after_the_guided_ones_are_those_of_the_conditional_row_alone(temperature: float) -> None:
    sampling = Sampling(cfg_scale=3.0, cfg_interval=2, temperature=temperature)
    engine, plain, (prompt,) = model(), sampling.unguided(), prompts([7])
    (codes,) = codes_of(steps_of(engine, [7], sampling, Ar()), 1)
    (guided,) = codes_of(steps_of(engine, [7], sampling.model_copy(update={"cfg_interval": None}), Ar()), 1)
    assert codes[:4] == guided[:4]
    for position in range(4, CODES):
        *_, last = sequence_logits(engine, [prompt.cond], np.array(codes[:position]), Clock())
        noise = Noise(7).gumbel(position, 1, VOCABULARY) if temperature else None
        assert choose(guide(last[:, -1:], plain, position), noise, plain)[0] == codes[position]


@pytest.mark.parametrize("method", [*METHODS.values(), RowParallel(window=2)], ids=str)
def test_passes_lose_the_unconditional_row_once_no_missing_token_is_guided(method: MethodConfig) -> None:
    engine = model()
    steps = steps_of(engine, [1], Sampling(cfg_scale=2.0, cfg_interval=1), method)
    parts = [sum(len(part.codes[: part.committed]) for part in step.parts) for step in steps]
    before = [0, *np.cumsum(parts)[:-1].tolist()]  # tokens known before each pass
    assert isinstance(engine.target, ToyTarget)
    assert [rows for rows, _ in engine.target.passes] == [2 if known < 3 else 1 for known in before]


def test_rows_of_a_batch_end_their_guidance_one_by_one_and_stay_what_they_are_alone() -> None:
    sampling = Sampling(cfg_scale=3.0, cfg_interval=1)
    for method in METHODS.values():
        together = codes_of(steps_of(model(), range(4), sampling, method), 4)
        assert together == [codes_of(steps_of(model(), [i], sampling, method), 1)[0] for i in range(4)]


def test_logits_after_the_guided_tokens_are_bit_for_bit_the_conditional_ones() -> None:
    logits = np.random.default_rng(0).standard_normal((2, 5, 8)).astype(np.float32)
    sampling = Sampling(cfg_scale=7.5, cfg_interval=0)
    found = guide(logits, sampling, np.arange(5))
    np.testing.assert_array_equal(found[2:], logits[0, 2:])
    np.testing.assert_array_equal(found[:2], guide(logits, Sampling(cfg_scale=7.5), 0)[:2])
