"""Guidance of the first tokens only: what is drawn after them, and that the unconditional row is gone by then."""

from collections.abc import Sequence

import numpy as np
import pytest
from toy_engine import ToyTarget, make_model, make_prompt

from lantern_rt.methods import Ar, Eagle, Lantern, LanternPlusPlus, MethodConfig, RowParallel, Sampling, Sjd
from lantern_rt.runtime.decode import Step, decode
from lantern_rt.runtime.drafts import Model
from lantern_rt.runtime.noise import Noise
from lantern_rt.runtime.sampling import choose, guide
from lantern_rt.runtime.sequences import sequence_logits
from lantern_rt.runtime.statistics import Clock

VOCABULARY, CODES = 5, 9
NEAR = np.array([[n for n in range(VOCABULARY) if n != code] for code in range(VOCABULARY)])
METHODS: list[MethodConfig] = [
    Ar(),
    Eagle(tree="chain-2"),
    Eagle(tree="tree-3-210-100"),
    Eagle(tree="dynamic-8-3-3"),
    Lantern(tree="dynamic-8-3-3", neighbors=3, delta=0.2),
    LanternPlusPlus(tree="tree-3-210-100", neighbors=3),
    Sjd(window=4),
    Sjd(window=3, neighbors=3, lambda_=1.5),
    RowParallel(window=2),
]


def model() -> Model:
    return make_model(vocabulary=VOCABULARY, codes=CODES, round_span=4, neighbors=NEAR)


def steps_of(engine: Model, identities: Sequence[int], sampling: Sampling, method: MethodConfig) -> list[Step]:
    prompts = [make_prompt(i, padding=i % 3) for i in identities]
    return list(decode(engine, prompts, list(identities), sampling, method))


def codes_of(steps: list[Step], requests: int) -> list[list[int]]:
    codes: list[list[int]] = [[] for _ in range(requests)]
    for part in (part for step in steps for part in step.parts):
        codes[part.request] += part.codes[: part.committed].tolist()
    return codes


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_after_the_guided_ones_are_those_of_the_conditional_row_alone(temperature: float) -> None:
    sampling = Sampling(cfg_scale=3.0, cfg_interval=2, temperature=temperature)
    engine, plain, prompt = model(), sampling.unguided(), make_prompt(7, padding=1)
    (codes,) = codes_of(steps_of(engine, [7], sampling, Ar()), 1)
    (guided,) = codes_of(steps_of(engine, [7], sampling.model_copy(update={"cfg_interval": None}), Ar()), 1)
    assert codes[:4] == guided[:4]
    for position in range(4, CODES):
        *_, last = sequence_logits(engine, [prompt.cond], np.array(codes[:position]), Clock())
        noise = Noise(7).gumbel(position, 1, VOCABULARY) if temperature else None
        assert choose(guide(last[:, -1:], plain, position), noise, plain)[0] == codes[position]


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_passes_lose_the_unconditional_row_once_no_missing_token_is_guided(method: MethodConfig) -> None:
    engine = model()
    steps = steps_of(engine, [1], Sampling(cfg_scale=2.0, cfg_interval=1), method)
    parts = [sum(len(part.codes[: part.committed]) for part in step.parts) for step in steps]
    before = [0, *np.cumsum(parts)[:-1].tolist()]  # tokens known before each pass
    assert isinstance(engine.target, ToyTarget)
    assert [rows for rows, _ in engine.target.passes] == [2 if known < 3 else 1 for known in before]


def test_rows_of_a_batch_end_their_guidance_one_by_one_and_stay_what_they_are_alone() -> None:
    sampling = Sampling(cfg_scale=3.0, cfg_interval=1)
    for method in METHODS:
        together = codes_of(steps_of(model(), range(4), sampling, method), 4)
        assert together == [codes_of(steps_of(model(), [i], sampling, method), 1)[0] for i in range(4)]


def test_logits_after_the_guided_tokens_are_bit_for_bit_the_conditional_ones() -> None:
    logits = np.random.default_rng(0).standard_normal((2, 5, 8)).astype(np.float32)
    sampling = Sampling(cfg_scale=7.5, cfg_interval=0)
    found = guide(logits, sampling, np.arange(5))
    np.testing.assert_array_equal(found[2:], logits[0, 2:])
    np.testing.assert_array_equal(found[:2], guide(logits, Sampling(cfg_scale=7.5), 0)[:2])
