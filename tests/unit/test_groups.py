"""Decoding in groups of cells, compared with a slow reference implementation."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from scipy.stats import chisquare
from toy_distributions import compute_naive_distribution
from toy_engine import AnyOrderTarget, Hashes, ToyCache, ToyModel, compute_likelihood, decode, make_prompt

from lantern_rt.bundle.manifest import Size
from lantern_rt.methods import GroupDecoding, Sampling
from lantern_rt.requests import GenerationSettings
from lantern_rt.results import StreamStepBuilder
from lantern_rt.runtime.engine import PassInput, PassOutput
from lantern_rt.runtime.groups import GroupLayout, TwoHeadLayout
from lantern_rt.runtime.noise import Noise
from lantern_rt.runtime.state import Prompt

SQUARE = ((0,), (1, 2))  # the grid has two columns
GUIDED = Sampling(cfg_scale=2.0, temperature=0.9)
PARTLY_GUIDED = Sampling(cfg_scale=2.0, cfg_tokens=5, repetition_penalty=1.4)
VOCABULARY = 5
CellGroups = tuple[tuple[int, ...], ...]
REGIONS: CellGroups = ((0,), (2,), (8,), (10,), (1, 3, 9, 11), (4, 6, 12, 14), (5, 7, 13, 15))
GROWING: CellGroups = ((3,), (0, 1), (2, 5, 4))
DIAGONALS: CellGroups = ((0,), (1, 3), (2, 4, 6), (5, 7), (8,))  # for a target with two heads


@dataclass
class GroupTarget(AnyOrderTarget):
    """Target whose logits differ between the nodes of a pass, though all of them attend to the same tokens."""

    two_heads: bool = False

    def compute_logits(self, context: Hashes) -> NDArray[np.float32]:
        logits = super().compute_logits(context)
        if not self.two_heads:
            return logits
        return np.concatenate([logits, super().compute_logits(context + np.uint64(11))], -1)

    def _compute_context_hashes(
        self, batch: PassInput, cache: ToyCache, new_hashes: Hashes
    ) -> tuple[Hashes, NDArray[np.bool_]]:
        context, is_right = super()._compute_context_hashes(batch, cache, new_hashes)
        return (context if batch.embeds is not None else context + np.uint64(3) * new_hashes), is_right


class TargetWithRoundingErrors(GroupTarget):
    def run(self, batch: PassInput, cache: Any) -> PassOutput:
        output = super().run(batch, cache)
        noise = np.random.default_rng([*batch.positions.shape, int(cache.lengths.sum())])
        return output._replace(logits=output.logits + noise.uniform(-0.01, 0.01, output.logits.shape).astype("f4"))


def make_toy_model(groups: CellGroups = REGIONS, target_type: Any = GroupTarget, **fields: Any) -> ToyModel:
    two_heads = groups in (DIAGONALS, SQUARE)
    target = target_type(VOCABULARY, vectors=3, two_heads=two_heads)
    columns = 3 if groups == DIAGONALS else 2
    image = TwoHeadLayout(groups, VOCABULARY, columns) if two_heads else GroupLayout(groups, VOCABULARY)
    return ToyModel(target, None, 100, image=image, **fields)


def get_layout(model: ToyModel) -> GroupLayout:
    assert isinstance(model.image, GroupLayout)
    return model.image


def generate_images(
    model: ToyModel, prompts: Sequence[Prompt], seeds: Sequence[int], sampling: Sampling
) -> list[list[int]]:
    state = StreamStepBuilder(len(prompts), model.num_codes)
    settings = GenerationSettings(GroupDecoding(), sampling, Size(name="8x8", rows=4, columns=4))
    for step in decode(model, prompts, seeds, sampling, GroupDecoding()):
        view = state.add_step(step, settings, lambda i, codes: Image.new("RGB", (8, 8)))
        assert view.done == sum(int((cells >= 0).sum()) for cells in view.cells)
    return [codes.tolist() for codes in view.codes]


def list_passes(model: ToyModel) -> list[tuple[int, int]]:
    assert isinstance(model.target, GroupTarget)
    return model.target.passes


def compute_group_distributions(
    model: ToyModel, prompt: Prompt, sampling: Sampling, group: int, known: dict[int, int]
) -> list[NDArray]:
    """Return the target's distribution of every cell of a group, `[vocabulary]` each."""
    target = model.target
    layout = get_layout(model)
    assert isinstance(target, GroupTarget)
    rows = []
    num_earlier_cells = sum(map(len, layout.groups[:group]))
    for prefix_row in (prompt.cond, prompt.uncond):
        hashes = [target.hash_prefix(prefix_row.embeds)[prefix_row.is_real_token]]
        node_hashes = None
        for number in range(1, group + 1):
            inputs = [(known[cell], cell) for cell in layout.groups[number - 1]]
            vectors = 0 if target.two_heads else len(layout.groups[number]) - len(inputs)
            inputs += [(VOCABULARY + i, model.num_codes) for i in range(vectors)]
            tokens, positions = np.array(inputs).T
            node_hashes = target.hash_codes(tokens, len(prefix_row.is_real_token) + positions)
            hashes.append(node_hashes)
        context = np.concatenate(hashes).sum(dtype=np.uint64, keepdims=True)
        contexts = context if node_hashes is None else context + np.uint64(3) * node_hashes
        rows.append(target.compute_logits(contexts).astype(np.float64))
    if isinstance(layout, TwoHeadLayout):
        rows = [average_heads(logits, layout, group) for logits in rows]
    earlier_codes = {known[cell] for cell in itertools.chain(*layout.groups[:group])}
    penalty = sampling.repetition_penalty or 1.0
    distributions = []
    for i, (cond, uncond) in enumerate(zip(*rows, strict=True)):
        for code in earlier_codes:
            cond[code] = cond[code] * penalty if cond[code] < 0 else cond[code] / penalty
        guided = num_earlier_cells + i < sampling.count_guided_tokens(model.num_codes)
        scale = sampling.cfg_scale if guided else 1.0
        distributions.append(compute_naive_distribution(uncond + scale * (cond - uncond), sampling))
    return distributions


def average_heads(logits: NDArray, layout: TwoHeadLayout, number: int) -> NDArray:
    """Return the mean of the logits of both heads for the cells of a group, `[cells, vocabulary]`."""
    right, below = np.split(logits, 2, 1)
    if number == 0:
        return (right + below) / 2
    previous_group = layout.groups[number - 1]
    means = []
    for cell in layout.groups[number]:
        logits_of_cell = [right[previous_group.index(cell - 1)]] if cell % layout.columns else []
        logits_of_cell += [below[previous_group.index(cell - layout.columns)]] if cell >= layout.columns else []
        means.append(np.mean(logits_of_cell, 0))
    return np.array(means)


def generate_reference_image(
    model: ToyModel, prompt: Prompt, sampling: Sampling, choose_token: Callable[[int, NDArray], int]
) -> list[int]:
    """Return the tokens of an image; `choose_token` gets each cell and its distribution."""
    known: dict[int, int] = {}
    for number, group in enumerate(get_layout(model).groups):
        distributions = compute_group_distributions(model, prompt, sampling, number, known)
        known |= {cell: choose_token(cell, p) for cell, p in zip(group, distributions, strict=True)}
    return [known[cell] for cell in range(model.num_codes)]


@pytest.mark.parametrize("groups", [REGIONS, GROWING, DIAGONALS, SQUARE, ((0,), (1,), (2,))])
@pytest.mark.parametrize(
    "sampling", [Sampling(), GUIDED, PARTLY_GUIDED, Sampling(cfg_scale=3.0, cfg_tokens=2, temperature=0)]
)
def test_groups_generate_the_images_of_the_reference(groups: CellGroups, sampling: Sampling) -> None:
    model = make_toy_model(groups)
    prompts = [make_prompt(i, padding=i % 3) for i in range(8)]
    seeds = range(8)
    expected = []
    for prompt, seed in zip(prompts, seeds, strict=True):
        noise = Noise(seed)

        def choose_token(cell: int, p: NDArray, noise: Noise = noise) -> int:
            gumbel = 0 if sampling.greedy else noise.gumbel(cell, 1, len(p))[0]
            return int(np.argmax(np.log(p) + gumbel))

        expected.append(generate_reference_image(model, prompt, sampling, choose_token))
    assert generate_images(model, prompts, seeds, sampling) == expected
    assert len(list_passes(model)) == len(groups)
    *_, last_step = decode(model, prompts[:1], [0], sampling, GroupDecoding())
    assert last_step.stats is not None
    assert last_step.stats.per_image[0].accepted_per_step == [len(group) - 1 for group in groups[1:]]
    for i in (0, 5):
        assert generate_images(make_toy_model(groups), [prompts[i]], [seeds[i]], sampling) == [expected[i]]
    assert generate_images(make_toy_model(groups), prompts[2:5], seeds[2:5], sampling) == expected[2:5]


def test_unconditional_rows_leave_after_the_last_guided_token() -> None:
    model = make_toy_model()
    generate_images(model, [make_prompt(1)], [3], PARTLY_GUIDED)
    # The fifth pass is for four tokens, of which only the first is guided.
    assert [rows for rows, _ in list_passes(model)] == [2] * 5 + [1] * 2


@pytest.mark.parametrize("groups", [((0,), (2, 1)), SQUARE])
def test_groups_have_the_joint_distribution_of_the_reference(groups: CellGroups) -> None:
    model = make_toy_model(groups)
    prompt = make_prompt(2)
    count = 6000
    expected = np.zeros((VOCABULARY,) * 3)
    for codes in itertools.product(range(VOCABULARY), repeat=3):
        probabilities: list[float] = []

        def choose_token(
            cell: int, p: NDArray, codes: tuple[int, ...] = codes, probabilities: list[float] = probabilities
        ) -> int:
            probabilities.append(p[codes[cell]])
            return codes[cell]

        generate_reference_image(model, prompt, GUIDED, choose_token)
        expected[codes] = np.prod(probabilities)
    assert expected.sum() == pytest.approx(1)
    counts = np.zeros_like(expected)
    for codes in generate_images(model, [prompt] * count, range(count), GUIDED):
        counts[tuple(codes)] += 1
    likely = expected * count >= 5
    observed = np.append(counts[likely], counts[~likely].sum())
    assert chisquare(observed, count * np.append(expected[likely], expected[~likely].sum())).pvalue > 1e-3


@pytest.mark.parametrize("groups", [REGIONS, DIAGONALS])
@given(
    preserved_codes=st.lists(st.sampled_from([-1, -1, 0, 4]), min_size=16, max_size=16).map(np.array),
    seed=st.integers(0, 99),
)
@settings(max_examples=25)
def test_groups_preserve_the_tokens_of_an_edit_in_every_order(
    groups: CellGroups, preserved_codes: NDArray[np.int64], seed: int
) -> None:
    model = make_toy_model(groups)
    prompt = make_prompt(3, padding=1)
    noise = Noise(seed)
    preserved_codes = preserved_codes[: model.num_codes]

    def choose_token(cell: int, p: NDArray) -> int:
        if preserved_codes[cell] >= 0:
            return int(preserved_codes[cell])
        return int((np.log(p) + noise.gumbel(cell, 1, len(p))[0]).argmax())

    expected = generate_reference_image(model, prompt, GUIDED, choose_token)
    assert generate_images(model, [replace(prompt, preserved_codes=preserved_codes)], [seed], GUIDED) == [expected]


class TargetWithNan(GroupTarget):
    def run(self, batch: PassInput, cache: ToyCache) -> PassOutput:
        output = super().run(batch, cache)
        output.logits[:, 1::2] = np.nan
        return output


def test_logits_of_preserved_tokens_may_be_nan() -> None:
    preserved_codes = np.full(16, -1)
    preserved_codes[[3, 11, 6, 14, 7, 15]] = 0
    prompt = replace(make_prompt(3), preserved_codes=preserved_codes)
    healthy, damaged = (make_toy_model(target_type=kind) for kind in (GroupTarget, TargetWithNan))
    assert generate_images(damaged, [prompt], [1], GUIDED) == generate_images(healthy, [prompt], [1], GUIDED)


@pytest.mark.parametrize("groups", [REGIONS, DIAGONALS])
@pytest.mark.parametrize("sampling", [Sampling(), GUIDED, PARTLY_GUIDED])
def test_an_images_likelihood_agrees_with_the_reference(groups: CellGroups, sampling: Sampling) -> None:
    model = make_toy_model(groups)
    prompt = make_prompt(3, padding=1)
    (codes,) = generate_images(model, [prompt], [4], sampling)
    nats: dict[int, float] = {}

    def choose_token(cell: int, p: NDArray) -> int:
        nats[cell] = -np.log(p[codes[cell]])
        return codes[cell]

    generate_reference_image(model, prompt, sampling, choose_token)
    is_counted = np.arange(model.num_codes) % 3 == 0
    result = compute_likelihood(model, prompt, np.array(codes), sampling, is_counted)
    assert result.nats == pytest.approx(np.mean([nats[cell] for cell in range(0, model.num_codes, 3)]), abs=1e-5)


@pytest.mark.parametrize("groups", [REGIONS, DIAGONALS])
@pytest.mark.parametrize("sampling", [GUIDED, Sampling(top_k=3), Sampling(temperature=0)])
def test_rounding_errors_of_the_batch_size_change_no_token(groups: CellGroups, sampling: Sampling) -> None:
    model = make_toy_model(groups, TargetWithRoundingErrors, rounding_bound=0.02)
    prompts = [make_prompt(i) for i in range(8)]
    seeds = range(8)
    together = generate_images(model, prompts, seeds, sampling)
    alone = [generate_images(model, [prompt], [seed], sampling)[0] for prompt, seed in zip(prompts, seeds, strict=True)]
    assert together == alone
    steps = [*decode(model, prompts, seeds, sampling, GroupDecoding())]
    assert steps[-1].stats is not None
    assert sum(image.tie_passes for image in steps[-1].stats.per_image) > 0


def test_noise_is_freed_up_to_the_first_cell_without_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    freed_before: list[int] = []
    monkeypatch.setattr(Noise, "discard_noise_before", lambda noise, before: freed_before.append(before))
    generate_images(make_toy_model(), [make_prompt(1)], [3], Sampling())
    assert freed_before == [1, 1, 1, 4, 5, 16]
