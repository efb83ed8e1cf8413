"""Guidance of only the first tokens of an image: later passes have one row, and exact methods stay exact."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from toy_engine import ToyDrafter, ToyModel, ToyTarget, codes_of, decode, make_model, make_prompt, raster_layout

from lantern_rt.methods import (
    Autoregressive,
    Eagle,
    LanternPlusPlus,
    MethodConfig,
    Sampling,
    SpeculativeJacobi,
    TreeMethod,
)
from lantern_rt.runtime.guidance import Guidance
from lantern_rt.runtime.raster import RasterLayout

CODES = 24
NEIGHBORS = np.array([[n for n in range(5) if n != code] for code in range(5)])
METHODS: list[MethodConfig] = [
    Autoregressive(),
    SpeculativeJacobi(window=3),
    Eagle(tree="chain-2"),
    Eagle(tree="dynamic-8-3-3"),
    LanternPlusPlus(tree="tree-3-210-100", neighbors=3),
]
every_method = pytest.mark.parametrize("method", METHODS, ids=str)


def make_toy() -> ToyModel:
    return make_model(vocabulary=5, codes=CODES, columns=6, round_span=4, neighbors=NEIGHBORS)


def rows_of_passes(engine: object) -> list[int]:
    assert isinstance(engine, ToyTarget)
    return [rows for rows, _ in engine.passes]


@every_method
@pytest.mark.parametrize("count", [0, 1, 12, CODES - 1, CODES])
def test_the_unconditional_row_is_dropped_as_soon_as_all_guided_tokens_are_known(
    method: MethodConfig, count: int
) -> None:
    model = make_toy()
    num_known = 0
    expected: list[int] = []
    for step in decode(model, [make_prompt(3, padding=1)], [5], Sampling(cfg_scale=2.0, cfg_tokens=count), method):
        expected.append(2 if num_known < count or (num_known == 0 and count) else 1)
        num_known += sum(len(part.codes) for part in step.parts)
    assert rows_of_passes(model.target) == expected
    if isinstance(method, TreeMethod) and count == 12:
        assert isinstance(model.drafter, ToyDrafter)
        assert {rows for rows, _ in model.drafter.passes} == {1, 2}


@every_method
def test_images_in_a_batch_end_their_guidance_in_different_passes(method: MethodConfig) -> None:
    model = make_toy()
    prompts = [make_prompt(i, padding=i) for i in range(3)]
    sampling = Sampling(cfg_scale=2.0, cfg_tokens="50%")
    together = codes_of(decode(model, prompts, range(3), sampling, method), 3)
    rows = rows_of_passes(model.target)
    assert rows[0] == 6
    assert rows[-1] <= 3
    for i, prompt in enumerate(prompts):
        assert codes_of(decode(make_toy(), [prompt], [i], sampling, method), 1) == [together[i]]


@every_method
def test_guided_tokens_are_the_same_as_with_full_guidance(method: MethodConfig) -> None:
    prompts = [make_prompt(1)]
    full, half = (
        codes_of(decode(make_toy(), prompts, [7], Sampling(cfg_scale=4.0, cfg_tokens=count), method), 1)[0]
        for count in (None, 12)
    )
    assert full[:12] == half[:12]
    assert full != half


def test_a_linear_schedule_ends_at_the_full_scale() -> None:
    def scales(**schedule: Any) -> list[float]:
        return Guidance(Sampling(cfg_scale=3.0, **schedule), RasterLayout(4)).scales(range(5)).tolist()

    assert scales(cfg_schedule="linear") == [1.5, 2.0, 2.5, 3.0, 3.0]
    assert scales(cfg_schedule="constant") == scales() == [3.0] * 5


@pytest.mark.parametrize("row_end", [None, 5])
def test_a_larger_scale_falls_to_the_final_scale_with_every_token_of_the_image(row_end: int | None) -> None:
    """Compare scales with the rule: before token t of n codes, s becomes max(final, s (1 - 4 (t + 2) / n)).

    Row ends count as tokens.
    """
    layout = raster_layout(100, 10, row_end)
    scale = 6.0
    expected = []
    for token in range(layout.num_tokens):
        scale = max(2.0, scale * (1 - 4 * (token + 2) / 100))
        expected.append(scale)
    guidance = Guidance(Sampling(cfg_scale=6.0, cfg_final=2.0), layout)
    codes = range(100)
    np.testing.assert_allclose(
        guidance.scales(codes), [expected[layout.token_position(code)] for code in codes], rtol=1e-6
    )
    assert guidance.scales([0])[0] > guidance.scales([1])[0] > 2.0
    raised = Guidance(Sampling(cfg_scale=1.5, cfg_final=2.0), layout)
    assert raised.scales([0, 99]).tolist() == [2.0, 2.0]


def test_preserved_tokens_count_as_guided() -> None:
    preserved_codes = np.full(CODES, -1)
    preserved_codes[:12] = np.arange(12) % 5
    model = make_toy()
    prompt = replace(make_prompt(3), preserved_codes=preserved_codes)
    sampling = Sampling(cfg_scale=2.0, cfg_tokens=12)
    (codes,) = codes_of(decode(model, [prompt], [5], sampling, SpeculativeJacobi(window=3)), 1)
    assert codes[:12] == preserved_codes[:12].tolist()
    (alone,) = codes_of(decode(make_toy(), [prompt], [5], Sampling(), Autoregressive()), 1)
    assert codes == alone
