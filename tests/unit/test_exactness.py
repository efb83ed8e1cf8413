"""Exactness of whole images: with the same seed, every exact method generates the tokens of `ar`.

Chi-square tests show that images have the target's joint distribution. Relaxed methods that borrow no probability
use rejection sampling: their tokens differ from the tokens of `ar`, but have the same distribution.
"""

from __future__ import annotations

import itertools
import runpy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import chi2_contingency, chisquare
from toy_distributions import compute_joint_distribution
from toy_engine import ToyModel, collect_codes, decode, make_model, make_prompt

from lantern_rt.engines.sampling_head import SamplingHead
from lantern_rt.methods import (
    Autoregressive,
    Eagle,
    Lantern,
    LanternPlusPlus,
    MethodConfig,
    Sampling,
    SpeculativeJacobi,
    TreeMethod,
    find_sampling_class,
)
from lantern_rt.runtime import acceptance
from lantern_rt.runtime.drafters import DRAFTERS
from lantern_rt.runtime.noise import Noise
from lantern_rt.runtime.sampling import Probabilities
from lantern_rt.runtime.state import ImageSequence
from lantern_rt.runtime.tree import DraftTree
from lantern_rt.runtime.tree_drafts import TreeDrafter, make_chain
from lantern_rt.runtime.windows import AdaptiveWindow

STATIC_TREE = "tree-3-210-100"
NO_RELAXATION = 1 + 1e-12  # a lambda that borrows no probability
NEIGHBORS = np.array([[1, 2], [0, 2], [0, 1]])


def generate_images(
    model: ToyModel, sampling: Sampling, method: MethodConfig, seeds: range, batch: int = 2000
) -> NDArray[np.int64]:
    prompt = make_prompt(7, padding=1)
    codes = list[list[int]]()
    for start in range(0, len(seeds), batch):
        batch_seeds = seeds[start : start + batch]
        steps = decode(model, [prompt] * len(batch_seeds), batch_seeds, sampling, method)
        codes += collect_codes(steps, len(batch_seeds))
    return np.array(codes, np.int64)


def count_images(codes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how often each image occurs, in an array with an axis of length `vocabulary` for each token."""
    counts = np.zeros((3,) * codes.shape[1], np.int64)
    np.add.at(counts, tuple(codes.T), 1)
    return counts


def compute_p_value(counts: NDArray[np.int64], joint: NDArray[np.float64]) -> float:
    """Return the p-value of a chi-square test of image counts against a joint distribution.

    Images with an expected count below 10 are merged into one class.
    """
    expected = joint.ravel() * counts.sum()
    observed = counts.ravel().astype(float)
    assert (observed[expected == 0] == 0).all(), "an impossible image was generated"
    is_rare = expected < 10
    merged_observed = np.append(observed[~is_rare], observed[is_rare].sum())
    merged_expected = np.append(expected[~is_rare], expected[is_rare].sum())
    if merged_expected[-1] < 10:  # merge the remaining images into the least probable image
        merged_observed[np.argmin(merged_expected[:-1])] += merged_observed[-1]
        merged_expected[np.argmin(merged_expected[:-1])] += merged_expected[-1]
        merged_observed = merged_observed[:-1]
        merged_expected = merged_expected[:-1]
    return float(chisquare(merged_observed, merged_expected).pvalue)


SAMPLINGS = {
    "default": Sampling(),
    "temperature 1.3, top-k 2, penalty": Sampling(temperature=1.3, top_k=2, repetition_penalty=1.5),
    "guided, temperature 1.4, top-p 0.9": Sampling(cfg_scale=1.5, temperature=1.4, top_p=0.9),
    "guided, min-p 0.4": Sampling(cfg_scale=1.5, min_p=0.4),
    "guided with a linear schedule": Sampling(cfg_scale=4.0, cfg_schedule="linear"),
    "guided for two tokens": Sampling(cfg_scale=3.0, cfg_tokens=2),
    "guided for a quarter, penalty": Sampling(cfg_scale=2.0, cfg_tokens="25%", repetition_penalty=1.5),
}
METHODS: dict[str, MethodConfig] = {
    "ar": Autoregressive(),
    "by rejection, static tree": LanternPlusPlus(tree=STATIC_TREE, neighbors=2, lambda_=NO_RELAXATION),
    "by rejection, dynamic tree": Lantern(tree="dynamic-8-3-2", neighbors=2, delta=1e-12),
    "by rejection, window 2": SpeculativeJacobi(window=2, neighbors=2, lambda_=NO_RELAXATION),
}
# Each sampling with a method, and each method with a sampling: acceptance steps are enumerated in `test_acceptance.py`.
CASES = [
    ("ar", "default"),
    ("ar", "guided with a linear schedule"),
    ("ar", "guided for a quarter, penalty"),
    ("by rejection, static tree", "guided, min-p 0.4"),
    ("by rejection, static tree", "guided, temperature 1.4, top-p 0.9"),
    ("by rejection, dynamic tree", "temperature 1.3, top-k 2, penalty"),
    ("by rejection, window 2", "guided for two tokens"),
]


def make_toy_model(codes: int = 4) -> ToyModel:
    return make_model(vocabulary=3, codes=codes, past_length_multiple=4, columns=2, neighbors=NEIGHBORS)


def compute_p_value_of_images(method: str, sampling: str, seeds: range) -> float:
    codes = generate_images(make_toy_model(), SAMPLINGS[sampling], METHODS[method], seeds)
    return compute_p_value(
        count_images(codes),
        compute_joint_distribution(make_toy_model(), make_prompt(7, padding=1), SAMPLINGS[sampling]),
    )


@pytest.mark.parametrize(("method", "sampling"), CASES)
def test_images_of_2_000_seeds_have_the_joint_distribution(method: str, sampling: str) -> None:
    assert compute_p_value_of_images(method, sampling, range(2_000)) > 0.001


@pytest.mark.usefixtures("own_registrations")
def test_a_setting_of_a_user_changes_the_distribution_as_its_filter_says() -> None:
    runpy.run_path(str(Path(__file__).parents[2] / "examples/own_sampling_setting.py"))
    changed, unchanged = (
        find_sampling_class()(cfg_scale=1.5, top_p=0.95, **own) for own in ({"epsilon_cutoff": 0.25}, {})
    )
    assert (SamplingHead.supports(changed), SamplingHead.supports(unchanged)) == (False, True)
    model = make_toy_model()
    joint, unfiltered = (
        compute_joint_distribution(model, make_prompt(7, padding=1), sampling) for sampling in (changed, unchanged)
    )
    assert (joint == 0).sum() > (unfiltered == 0).sum()
    for method in (METHODS["ar"], METHODS["by rejection, static tree"]):
        codes = generate_images(model, changed, method, range(2_000))
        assert compute_p_value(count_images(codes), joint) > 0.001
    plain, drafted = (
        generate_images(model, changed, method, range(200)) for method in (Autoregressive(), SpeculativeJacobi())
    )
    assert plain.tolist() == drafted.tolist()


@pytest.mark.slow
@pytest.mark.parametrize(("method", "sampling"), CASES)
def test_images_of_200_000_seeds_have_the_joint_distribution(
    method: str, sampling: str, record_property: Callable[[str, object], None]
) -> None:
    p = compute_p_value_of_images(method, sampling, range(10**6, 10**6 + 200_000))
    record_property("p_value", p)
    print(f"{method}, {sampling}: p = {p:.4f}")
    assert p > 0.001


@given(
    seed=st.integers(0, 2**64 - 1),
    table=st.integers(0, 1000),
    agreement=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.6]),
    cfg_scale=st.sampled_from([1.0, 3.0]),
    cfg_tokens=st.sampled_from([None, 0, 1, 5, 15, 16, "50%"]),
    top_k=st.sampled_from([0, 1, 5]),
    top_p=st.sampled_from([1.0, 0.8, 0.3]),
    min_p=st.sampled_from([None, 0.1, 0.7]),
)
@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
def test_every_exact_method_generates_the_tokens_of_ar(
    seed: int,
    table: int,
    agreement: float,
    temperature: float,
    cfg_scale: float,
    cfg_tokens: int | str | None,
    top_k: int,
    top_p: float,
    min_p: float | None,
) -> None:
    filters = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    sampling = Sampling(cfg_scale=cfg_scale, cfg_tokens=cfg_tokens, temperature=temperature, **filters)
    model = make_model(9, 16, seed=table, agreement=agreement)
    prompts = [make_prompt(i) for i in range(3)]
    seeds = [seed, (seed + 1) % 2**64, seed // 2]

    expected = collect_codes(decode(model, prompts, seeds, sampling, Autoregressive()), 3)
    trees = ("chain-2", STATIC_TREE, "dynamic-8-4-2", "medusa-63", "dynamic-59")
    for method in (*(Eagle(tree=name) for name in trees), *(SpeculativeJacobi(window=size) for size in (1, 6, 16))):
        assert collect_codes(decode(model, prompts, seeds, sampling, method), 3) == expected


class RandomDrafter(TreeDrafter):
    """Drafter that proposes any tokens, in chains and in trees of any shape."""

    def __init__(self, model: ToyModel, seed: int) -> None:
        super().__init__(model.max_nodes)
        self.num_codes = model.target.vocabulary
        self.rng = np.random.default_rng(seed)

    def draft_trees(self, sequences: Sequence[ImageSequence]) -> list[DraftTree]:
        return [self.make_tree(sequence.codes[-1], sequence.max_nodes) for sequence in sequences]

    def make_tree(self, root: int, max_nodes: int) -> DraftTree:
        tokens = [root, *self.rng.integers(0, self.num_codes, self.rng.integers(max_nodes)).tolist()]
        if self.rng.random() < 0.5:
            return make_chain(tokens)
        return DraftTree(np.array(tokens), np.array([-1, *(self.rng.integers(node) for node in range(1, len(tokens)))]))


@given(
    seed=st.integers(0, 1000),
    method=st.sampled_from([Eagle(tree="chain-2"), Eagle(tree="dynamic-59"), SpeculativeJacobi(window=6)]),
    sampling=st.sampled_from([*SAMPLINGS.values(), Sampling(temperature=0)]),
    row_ends=st.booleans(),
    preserved_codes=st.lists(st.integers(-3, 2), min_size=16, max_size=16),
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_images_are_exact_whatever_a_drafter_proposes(
    seed: int, method: MethodConfig, sampling: Sampling, row_ends: bool, preserved_codes: list[int]
) -> None:
    model = make_model(3, 16, seed=seed, columns=4, row_ends=row_ends)
    edited = replace(make_prompt(2), preserved_codes=np.maximum(preserved_codes, -1))
    prompts = [make_prompt(0), make_prompt(1, padding=1), edited]
    expected = collect_codes(decode(model, prompts, range(3), sampling, Autoregressive()), 3)
    with pytest.MonkeyPatch.context() as patch:
        for kind in (TreeMethod, SpeculativeJacobi):
            factory = DRAFTERS[kind]._replace(make_drafter=lambda model, method, timer: RandomDrafter(model, seed))
            patch.setitem(DRAFTERS, kind, factory)
        steps = list(decode(model, prompts, range(3), sampling, method))
    assert collect_codes(steps, 3) == expected
    assert steps[-1].stats is not None
    assert steps[-1].stats.realised_tvd == 0


@given(st.lists(st.integers(1, 8), min_size=1, max_size=30), st.sampled_from(sorted(SAMPLINGS)))
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
def test_a_window_that_changes_after_any_step_changes_no_token(sizes: list[int], sampling: str) -> None:
    model = make_model(5, 25, past_length_multiple=4)
    prompts = [make_prompt(i, padding=i) for i in range(3)]
    next_sizes = itertools.cycle(sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AdaptiveWindow, "choose_size", lambda window, images: next(next_sizes))
        steps = decode(model, prompts, range(3), SAMPLINGS[sampling], SpeculativeJacobi(window=8), adaptive_window=True)
        codes = collect_codes(steps, 3)
    assert codes == collect_codes(decode(model, prompts, range(3), SAMPLINGS[sampling], Autoregressive()), 3)


def compute_p_value_of_neighbouring_seeds(seeds: range) -> float:
    """Return the p-value of a test that the first tokens of seeds n and n + 1 are independent."""
    codes = generate_images(make_toy_model(1), Sampling(), Autoregressive(), seeds)[:, 0]
    table = np.zeros((3, 3))
    np.add.at(table, (codes[:-1], codes[1:]), 1)
    return float(chi2_contingency(table).pvalue)


def test_tokens_of_neighbouring_seeds_are_independent() -> None:
    assert compute_p_value_of_neighbouring_seeds(range(8_001)) > 0.001


def patch_noise_to_ignore_the_position(patch: pytest.MonkeyPatch) -> None:
    gumbel = Noise.gumbel
    patch.setattr(Noise, "gumbel", lambda noise, first, count, size: gumbel(noise, 0, count, size))


def patch_noise_to_ignore_the_last_seed_bit(patch: pytest.MonkeyPatch) -> None:
    gumbel = Noise.gumbel
    patch.setattr(Noise, "gumbel", lambda noise, *block: gumbel(Noise(noise.seed // 2), *block))


@pytest.mark.parametrize("fault", [patch_noise_to_ignore_the_position, patch_noise_to_ignore_the_last_seed_bit])
def test_the_chi_square_tests_detect_noise_that_is_used_twice(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    assert (
        min(
            compute_p_value_of_images("ar", "default", range(1_000)),
            compute_p_value_of_neighbouring_seeds(range(1_000)),
        )
        < 1e-6
    )


@pytest.mark.parametrize("omitted_step", ["subtracting q", "removing the rejected token"])
def test_the_chi_square_test_detects_a_wrong_residual(omitted_step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong_residual(p: Probabilities, q: Probabilities | None, code: int, *arguments: object) -> Probabilities:
        residual = p.copy()
        if omitted_step == "subtracting q":
            residual[code] = 0
        return residual / max(residual.sum(), 1e-300)

    monkeypatch.setattr(acceptance, "compute_residual_distribution", wrong_residual)
    assert compute_p_value_of_images("by rejection, static tree", "default", range(3_000)) < 1e-6
