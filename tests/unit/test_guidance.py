"""Classifier-free guidance of only the first tokens of an image, and schedules of the guidance scale."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from toy_engine import (
    ToyDrafter,
    ToyModel,
    ToyTarget,
    collect_codes,
    decode,
    make_model,
    make_prompt,
    make_raster_layout,
)
from toy_methods import METHODS, NEIGHBORS

from lantern_rt.methods import Autoregressive, MethodConfig, Sampling, SpeculativeJacobi, TreeMethod
from lantern_rt.runtime.guidance import Guidance
from lantern_rt.runtime.raster import RasterLayout

CODES = 24
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


def make_toy_model() -> ToyModel:
    return make_model(vocabulary=5, codes=CODES, columns=6, past_length_multiple=4, neighbors=NEIGHBORS)


def list_rows_of_passes(engine: object) -> list[int]:
    assert isinstance(engine, ToyTarget)
    return [rows for rows, _ in engine.passes]


@every_method
@pytest.mark.parametrize("count", [0, 1, 12, CODES - 1, CODES])
def test_the_unconditional_row_leaves_after_the_guided_tokens(method: MethodConfig, count: int) -> None:
    model = make_toy_model()
    num_known = 0
    expected: list[int] = []
    for step in decode(model, [make_prompt(3, padding=1)], [5], Sampling(cfg_scale=2.0, cfg_tokens=count), method):
        expected.append(2 if num_known < count or (num_known == 0 and count) else 1)
        num_known += sum(len(part.codes) for part in step.parts)
    assert list_rows_of_passes(model.target) == expected
    if isinstance(method, TreeMethod) and count == 12:
        assert isinstance(model.drafter, ToyDrafter)
        assert {rows for rows, _ in model.drafter.passes} == {1, 2}


@every_method
def test_images_in_a_batch_can_end_guidance_in_different_passes(method: MethodConfig) -> None:
    model = make_toy_model()
    prompts = [make_prompt(i, padding=i) for i in range(3)]
    sampling = Sampling(cfg_scale=2.0, cfg_tokens="50%")
    together = collect_codes(decode(model, prompts, range(3), sampling, method), 3)
    rows = list_rows_of_passes(model.target)
    assert rows[0] == 6
    assert rows[-1] <= 3
    for i, prompt in enumerate(prompts):
        assert collect_codes(decode(make_toy_model(), [prompt], [i], sampling, method), 1) == [together[i]]


@every_method
def test_half_guidance_gives_the_first_half_of_a_guided_image(method: MethodConfig) -> None:
    prompts = [make_prompt(1)]
    guided_codes, partly_guided_codes = (
        collect_codes(decode(make_toy_model(), prompts, [7], Sampling(cfg_scale=4.0, cfg_tokens=count), method), 1)[0]
        for count in (None, 12)
    )
    assert guided_codes[:12] == partly_guided_codes[:12]
    assert guided_codes != partly_guided_codes


def test_a_linear_guidance_schedule_ends_at_the_full_scale() -> None:
    def list_scales(**schedule: Any) -> list[float]:
        return Guidance(Sampling(cfg_scale=3.0, **schedule), RasterLayout(4)).scales(range(5)).tolist()

    assert list_scales(cfg_schedule="linear") == [1.5, 2.0, 2.5, 3.0, 3.0]
    assert list_scales(cfg_schedule="constant") == list_scales() == [3.0] * 5


def test_a_cosine_schedule_gives_the_published_scales_of_rar() -> None:
    def list_scales(cfg_scale: float, power: str, count: int) -> NDArray[np.float32]:
        sampling = Sampling(cfg_scale=cfg_scale, cfg_schedule=f"cosine-{power}")
        return Guidance(sampling, RasterLayout(count)).scales(range(count))

    first = [1.0, 1.0000089406967163, 1.0003992319107056, 1.0037134885787964, 1.0180647373199463, 1.0615758895874023]
    np.testing.assert_allclose(list_scales(16.0, "2.75", 16)[:6], first, rtol=1e-6)
    assert list_scales(4.0, "0", 3).tolist() == [4.0] * 3


@pytest.mark.parametrize(
    ("schedule", "scales"),
    [
        ("0.5x2,constant", [0.5, 0.5, 3, 3, 3, 3]),
        ("4x2,linear", [4, 4, 1.5, 2, 2.5, 3]),
        ("0.5x4,cosine-1", [0.5] * 4 + [1, 2]),
        ("0.5x9,linear", [0.5] * 6),
    ],
)
def test_the_first_tokens_have_a_scale_of_their_own(schedule: str, scales: list[float]) -> None:
    guidance = Guidance(Sampling(cfg_scale=3.0, cfg_schedule=schedule), RasterLayout(6))
    np.testing.assert_allclose(guidance.scales(range(6)), scales, rtol=1e-6)
    assert guidance.rounding_growth == 2 * max(3, *scales) - 1


@pytest.mark.parametrize("row_end", [None, 5])
def test_the_guidance_scale_falls_token_by_token(row_end: int | None) -> None:
    """Compare with the published rule: before token t of n, row ends included, the scale falls by 1 - 4 (t + 2) / n."""
    layout = make_raster_layout(100, 10, row_end)
    scale = 6.0
    expected = []
    for token in range(layout.num_tokens):
        scale = max(2.0, scale * (1 - 4 * (token + 2) / 100))
        expected.append(scale)
    guidance = Guidance(Sampling(cfg_scale=6.0, cfg_final=2.0), layout)
    expected_scales = [expected[layout.find_token_position(code)] for code in range(100)]
    np.testing.assert_allclose(guidance.scales(range(100)), expected_scales, rtol=1e-6)
    assert guidance.scales([0])[0] > guidance.scales([1])[0] > 2.0
    low_guidance = Guidance(Sampling(cfg_scale=1.5, cfg_final=2.0), layout)
    assert low_guidance.scales([0, 99]).tolist() == [2.0, 2.0]


def test_preserved_tokens_count_as_guided_tokens() -> None:
    preserved_codes = np.full(CODES, -1)
    preserved_codes[:12] = np.arange(12) % 5
    model = make_toy_model()
    prompt = replace(make_prompt(3), preserved_codes=preserved_codes)
    sampling = Sampling(cfg_scale=2.0, cfg_tokens=12)
    (codes,) = collect_codes(decode(model, [prompt], [5], sampling, SpeculativeJacobi(window=3)), 1)
    assert codes[:12] == preserved_codes[:12].tolist()
    (unguided_codes,) = collect_codes(decode(make_toy_model(), [prompt], [5], Sampling(), Autoregressive()), 1)
    assert codes == unguided_codes
