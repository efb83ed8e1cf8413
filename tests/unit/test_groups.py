"""Drawing in groups gives what its definition says, written down once more here, plainly and for one picture."""

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
from toy_engine import AnyOrder, Hashes, ToyCache, ToyModel, decode, likelihood, make_prompt, naive_distribution

from lantern_rt.methods import Groups, Sampling
from lantern_rt.requests import Settings
from lantern_rt.results import StreamState
from lantern_rt.runtime.engine import Pass, PassOutput
from lantern_rt.runtime.groups import GroupLayout, TwoHeadLayout
from lantern_rt.runtime.noise import Noise
from lantern_rt.runtime.state import Prompt

SQUARE = ((0,), (1, 2))  # of a grid with two columns
GUIDED = Sampling(cfg_scale=2.0, temperature=0.9)
PART = Sampling(cfg_scale=2.0, cfg_tokens=5, repetition_penalty=1.4)
VOCABULARY = 5
Groups_ = tuple[tuple[int, ...], ...]
REGIONS: Groups_ = ((0,), (2,), (8,), (10,), (1, 3, 9, 11), (4, 6, 12, 14), (5, 7, 13, 15))
GROWING: Groups_ = ((3,), (0, 1), (2, 5, 4))
DIAGONALS: Groups_ = ((0,), (1, 3), (2, 4, 6), (5, 7), (8,))  # by a target with two heads


@dataclass
class GroupTarget(AnyOrder):
    """Logits that differ between the nodes of a pass, though all of them see the same."""

    two_heads: bool = False

    def logits(self, context: Hashes) -> NDArray[np.float32]:
        own = super().logits(context)
        return np.concatenate([own, super().logits(context + np.uint64(11))], -1) if self.two_heads else own

    def _sums(self, batch: Pass, cache: ToyCache, new: Hashes) -> tuple[Hashes, NDArray[np.bool_]]:
        context, right = super()._sums(batch, cache, new)
        return (context if batch.embeds is not None else context + np.uint64(3) * new), right


class WobblyTarget(GroupTarget):
    """Logits that move a little with the shape of a pass."""

    def run(self, batch: Pass, cache: Any) -> PassOutput:
        output = super().run(batch, cache)
        moves = np.random.default_rng([*batch.positions.shape, int(cache.lengths.sum())])
        return output._replace(logits=output.logits + moves.uniform(-0.01, 0.01, output.logits.shape).astype("f4"))


def toy(groups: Groups_ = REGIONS, kind: type[GroupTarget] = GroupTarget, **fields: Any) -> ToyModel:
    two_heads = groups in (DIAGONALS, SQUARE)
    target = kind(VOCABULARY, vectors=3, two_heads=two_heads)
    columns = 3 if groups == DIAGONALS else 2
    image = TwoHeadLayout(groups, VOCABULARY, columns) if two_heads else GroupLayout(groups, VOCABULARY)
    return ToyModel(target, None, 100, image=image, **fields)


def layout_of(model: ToyModel) -> GroupLayout:
    assert isinstance(model.image, GroupLayout)
    return model.image


def drawn(model: ToyModel, prompts: Sequence[Prompt], seeds: Sequence[int], sampling: Sampling) -> list[list[int]]:
    """Pictures in raster order."""
    state = StreamState(len(prompts), model.num_codes)
    for step in decode(model, prompts, seeds, sampling, Groups()):
        shown = state.add(step, Settings(Groups(), sampling), lambda i, codes: Image.new("RGB", (8, 8)))
        assert shown.done == sum(int((cells >= 0).sum()) for cells in shown.cells)
    return [codes.tolist() for codes in shown.codes]


def passes_of(model: ToyModel) -> list[tuple[int, int]]:
    """Rows and nodes of every pass of the target."""
    assert isinstance(model.target, GroupTarget)
    return model.target.passes


def distributions(
    model: ToyModel, prompt: Prompt, sampling: Sampling, group: int, known: dict[int, int]
) -> list[NDArray]:
    """The target's distribution of every cell of a group after the codes of the groups before, from its table."""
    target = model.target
    layout = layout_of(model)
    assert isinstance(target, GroupTarget)
    rows = []
    drawn_before = sum(map(len, layout.groups[:group]))
    for side in (prompt.cond, prompt.uncond):
        seen = [target.prefix_hash(side.embeds)[side.real]]
        own = None
        for number in range(1, group + 1):
            fed = [(known[cell], cell) for cell in layout.groups[number - 1]]
            vectors = 0 if target.two_heads else len(layout.groups[number]) - len(fed)
            fed += [(VOCABULARY + i, model.num_codes) for i in range(vectors)]
            tokens, places = np.array(fed).T
            own = target.code_hash(tokens, len(side.real) + places)
            seen.append(own)
        context = np.concatenate(seen).sum(dtype=np.uint64, keepdims=True)
        contexts = context if own is None else context + np.uint64(3) * own
        rows.append(target.logits(contexts).astype(np.float64))
    if isinstance(layout, TwoHeadLayout):
        rows = [mean_of_heads(logits, layout, group) for logits in rows]
    before = {known[cell] for cell in itertools.chain(*layout.groups[:group])}
    penalty = sampling.repetition_penalty or 1.0
    found = []
    for i, (cond, uncond) in enumerate(zip(*rows, strict=True)):
        for code in before:
            cond[code] = cond[code] * penalty if cond[code] < 0 else cond[code] / penalty
        guided = drawn_before + i < sampling.count_guided(model.num_codes)
        found.append(naive_distribution(uncond + (sampling.cfg_scale if guided else 1.0) * (cond - uncond), sampling))
    return found


def mean_of_heads(logits: NDArray, layout: TwoHeadLayout, number: int) -> NDArray:
    """Logits `[cells, vocabulary]` of a group from those of both heads after the cells of the group before."""
    right, below = np.split(logits, 2, 1)
    if number == 0:
        return (right + below) / 2
    before = layout.groups[number - 1]
    means = []
    for cell in layout.groups[number]:
        parts = [right[before.index(cell - 1)]] if cell % layout.columns else []
        parts += [below[before.index(cell - layout.columns)]] if cell >= layout.columns else []
        means.append(np.mean(parts, 0))
    return np.array(means)


def told(model: ToyModel, prompt: Prompt, sampling: Sampling, draw: Callable[[int, NDArray], int]) -> list[int]:
    """The picture by the definition; `draw(cell, p)` draws from a distribution."""
    known: dict[int, int] = {}
    for number, group in enumerate(layout_of(model).groups):
        shares = distributions(model, prompt, sampling, number, known)
        known |= {cell: draw(cell, p) for cell, p in zip(group, shares, strict=True)}
    return [known[cell] for cell in range(model.num_codes)]


@pytest.mark.parametrize("groups", [REGIONS, GROWING, DIAGONALS, SQUARE, ((0,), (1,), (2,))])
@pytest.mark.parametrize("sampling", [Sampling(), GUIDED, PART, Sampling(cfg_scale=3.0, cfg_tokens=2, temperature=0)])
def test_every_code_is_the_choice_after_the_groups_before_with_the_noise_of_its_cell(
    groups: Groups_, sampling: Sampling
) -> None:
    model = toy(groups)
    prompts = [make_prompt(i, padding=i % 3) for i in range(8)]
    seeds = range(8)
    expected = []
    for prompt, seed in zip(prompts, seeds, strict=True):
        noise = Noise(seed)

        def draw(cell: int, p: NDArray, noise: Noise = noise) -> int:
            loud = 0 if sampling.greedy else noise.gumbel(cell, 1, len(p))[0]
            return int(np.argmax(np.log(p) + loud))

        expected.append(told(model, prompt, sampling, draw))
    assert drawn(model, prompts, seeds, sampling) == expected
    assert len(passes_of(model)) == len(groups)
    *_, last = decode(model, prompts[:1], [0], sampling, Groups())
    assert last.stats is not None
    assert last.stats.per_image[0].accepted_per_step == [len(group) - 1 for group in groups[1:]]
    for i in (0, 5):
        assert drawn(toy(groups), [prompts[i]], [seeds[i]], sampling) == [expected[i]]
    assert drawn(toy(groups), prompts[2:5], seeds[2:5], sampling) == expected[2:5]


def test_guidance_ends_with_the_rows_that_it_needs() -> None:
    model = toy()
    drawn(model, [make_prompt(1)], [3], PART)
    assert [rows for rows, _ in passes_of(model)] == [
        2,
        2,
        2,
        2,
        2,
        1,
        1,
    ]  # the fifth pass draws four codes, of which one is guided


@pytest.mark.parametrize("groups", [((0,), (2, 1)), SQUARE])
def test_the_codes_of_a_group_have_the_joint_distribution_of_the_definition(groups: Groups_) -> None:
    model = toy(groups)
    prompt = make_prompt(2)
    count = 6000
    expected = np.zeros((VOCABULARY,) * 3)
    for codes in itertools.product(range(VOCABULARY), repeat=3):
        chances: list[float] = []

        def draw(cell: int, p: NDArray, codes: tuple[int, ...] = codes, chances: list[float] = chances) -> int:
            chances.append(p[codes[cell]])
            return codes[cell]

        told(model, prompt, GUIDED, draw)
        expected[codes] = np.prod(chances)
    assert expected.sum() == pytest.approx(1)
    counts = np.zeros_like(expected)
    for codes in drawn(model, [prompt] * count, range(count), GUIDED):
        counts[tuple(codes)] += 1
    likely = expected * count >= 5
    observed = np.append(counts[likely], counts[~likely].sum())
    assert chisquare(observed, count * np.append(expected[likely], expected[~likely].sum())).pvalue > 1e-3


@pytest.mark.parametrize("groups", [REGIONS, DIAGONALS])
@given(kept=st.lists(st.sampled_from([-1, -1, 0, 4]), min_size=16, max_size=16).map(np.array), seed=st.integers(0, 99))
@settings(max_examples=25)
def test_preserved_codes_stand_in_their_cells_wherever_the_order_has_them(
    groups: Groups_, kept: NDArray[np.int64], seed: int
) -> None:
    model = toy(groups)
    prompt = make_prompt(3, padding=1)
    noise = Noise(seed)
    kept = kept[: model.num_codes]

    def draw(cell: int, p: NDArray) -> int:
        return int((np.log(p) + noise.gumbel(cell, 1, len(p))[0]).argmax()) if kept[cell] < 0 else int(kept[cell])

    assert drawn(model, [replace(prompt, preserved=kept)], [seed], GUIDED) == [told(model, prompt, GUIDED, draw)]


@pytest.mark.parametrize("groups", [REGIONS, DIAGONALS])
@pytest.mark.parametrize("sampling", [Sampling(), GUIDED, PART])
def test_the_likelihood_is_that_of_the_definition(groups: Groups_, sampling: Sampling) -> None:
    model = toy(groups)
    prompt = make_prompt(3, padding=1)
    (codes,) = drawn(model, [prompt], [4], sampling)
    nats: dict[int, float] = {}

    def draw(cell: int, p: NDArray) -> int:
        nats[cell] = -np.log(p[codes[cell]])
        return codes[cell]

    told(model, prompt, sampling, draw)
    counted = np.arange(model.num_codes) % 3 == 0
    found = likelihood(model, prompt, np.array(codes), sampling, counted)
    assert found.nats == pytest.approx(np.mean([nats[cell] for cell in range(0, model.num_codes, 3)]), abs=1e-5)


@pytest.mark.parametrize("groups", [REGIONS, DIAGONALS])
@pytest.mark.parametrize("sampling", [GUIDED, Sampling(top_k=3), Sampling(temperature=0)])
def test_rounding_that_depends_on_the_batch_changes_no_code(groups: Groups_, sampling: Sampling) -> None:
    model = toy(groups, WobblyTarget, rounding=0.02)
    prompts = [make_prompt(i) for i in range(8)]
    seeds = range(8)
    together = drawn(model, prompts, seeds, sampling)
    alone = [drawn(model, [prompt], [seed], sampling)[0] for prompt, seed in zip(prompts, seeds, strict=True)]
    assert together == alone
    steps = [*decode(model, prompts, seeds, sampling, Groups())]
    assert steps[-1].stats is not None
    assert sum(image.tie_passes for image in steps[-1].stats.per_image) > 0


def test_noise_is_forgotten_as_far_as_the_image_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten: list[int] = []
    monkeypatch.setattr(Noise, "forget", lambda own, before: forgotten.append(before))
    drawn(toy(), [make_prompt(1)], [3], Sampling())
    assert forgotten == [1, 1, 1, 4, 5, 16]
