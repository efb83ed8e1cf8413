"""Prompts of different lengths in one batch: padding, attention masks, positions, and images."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from toy_engine import ToyModel, collect_codes, decode

from lantern_rt.engines.kv_cache import KVCache
from lantern_rt.methods import Autoregressive, Eagle, MethodConfig, Sampling
from lantern_rt.runtime.engine import HiddenStateView, PassInput, PassOutput
from lantern_rt.runtime.passes import PrefixBatch, stack_masks
from lantern_rt.runtime.raster import RasterLayout
from lantern_rt.runtime.state import DrafterLayout, PrefixRow, Prompt

WIDTH = 3
VOCABULARY = 7
CODES = 12
OFFSET = 100  # first token id of the codes in the drafter


@dataclass
class SumEngine:
    """An engine whose logits depend on the sum of value * (1 + position) of the entries to which a node attends."""

    reads_tokens: bool = False
    passes: list[PassInput] = field(default_factory=list)

    def make_cache(self, rows: int, capacity: int) -> KVCache:
        return KVCache.empty(rows, capacity, 1, 1, WIDTH, np.float32)

    def past_columns(self, cache: KVCache, nodes: int) -> int:
        return cache.past_length()

    def run(self, batch: PassInput, cache: KVCache) -> PassOutput:
        self.passes.append(batch)
        rows, nodes = batch.positions.shape
        values = batch.embeds[..., 0] if batch.embeds is not None else batch.tokens.astype(np.float32) % OFFSET + 1
        new_entries = np.zeros((nodes, rows, 1, WIDTH), np.float32)
        new_entries[:, :, 0, 0] = values.T
        new_entries[:, :, 0, 1] = batch.positions.T
        past_length = batch.attention_mask.shape[2] - nodes
        entries = np.concatenate([cache.tensors[0][:past_length], new_entries])[:, :, 0]  # [past + nodes, rows, width]
        weighted = entries[..., 0] * (1 + entries[..., 1])
        sums = np.einsum("rnc,cr->rn", batch.attention_mask, weighted)
        logits = np.cos(sums[..., None] * (1 + np.arange(VOCABULARY))).astype(np.float32) * 3
        hidden = np.repeat(sums[..., None], WIDTH, 2).astype(np.float32)
        return PassOutput(logits, hidden, [new_entries, new_entries])


def make_sum_prompt(cond_length: int, uncond_length: int) -> Prompt:
    lengths_and_ids = ((cond_length, np.arange(cond_length)), (uncond_length, np.arange(uncond_length) + 50))
    return Prompt(*(PrefixRow(np.full((n, WIDTH), n, "f4"), np.ones(n, bool), ids) for n, ids in lengths_and_ids))


def make_sum_model(drafter: SumEngine | None = None, target: SumEngine | None = None) -> ToyModel:
    layout = DrafterLayout(code_offset=OFFSET)
    return ToyModel(target or SumEngine(), drafter, 200, layout, image=RasterLayout(CODES))


def generate_tokens(prompts: list[Prompt], method: MethodConfig, sampling: Sampling, **engines: Any) -> list[list[int]]:
    seeds = [len(p.cond.embeds) for p in prompts]
    return collect_codes(decode(make_sum_model(**engines), prompts, seeds, sampling, method), len(prompts))


def test_a_prefill_pads_rows_to_one_length_and_masks_padding() -> None:
    engine = SumEngine()
    rows = [np.full((n, WIDTH), n, np.float32) for n in (4, 2)]
    padding = [np.array([True, False, False, False]), np.zeros(2, bool)]
    hidden = stack_masks(padding)
    assert hidden.tolist() == [[True, False, False, False], [False] * 4]
    prefixes = PrefixBatch([PrefixRow(row, ~is_padding) for row, is_padding in zip(rows, padding, strict=True)])
    batch = prefixes.build_prefill_input(engine, engine.make_cache(2, 10))
    assert batch.embeds is not None
    assert batch.embeds[..., 0].tolist() == [[4] * 4, [2] * 4]
    assert batch.positions.tolist() == [[0, 1, 2, 3]] * 2
    mask_of_new_nodes = batch.attention_mask[:, :, -4:]  # the last columns are the nodes of this pass
    expected_mask = np.tri(4, dtype=bool) & ~padding[0]
    expected_mask[0] = True  # padding attends to everything
    assert mask_of_new_nodes[0].tolist() == expected_mask.tolist()
    assert mask_of_new_nodes[1].tolist() == np.tri(4, dtype=bool).tolist()


def test_padding_at_the_end_of_a_short_row_attends_to_the_row_alone() -> None:
    engine = SumEngine()
    is_real = [np.ones(4, bool), np.array([True, False])]
    prefixes = PrefixBatch([PrefixRow(np.zeros((len(row), WIDTH), np.float32), row) for row in is_real])
    batch = prefixes.build_prefill_input(engine, engine.make_cache(2, 10))
    assert batch.attention_mask[1, 1, -4:].tolist() == [True, True, False, False]
    assert prefixes.padding.tolist() == [[False] * 4, [False, True, False, False]]


@pytest.mark.parametrize("sampling", [Sampling(cfg_scale=2.0), Sampling(cfg_scale=2.0, temperature=0), Sampling()])
@pytest.mark.parametrize("tree", [None, "chain-2", "dynamic-8-3-3"])
def test_prompts_of_different_lengths_do_not_change_images(sampling: Sampling, tree: str | None) -> None:
    method = Autoregressive() if tree is None else Eagle(tree=tree)
    prompts = [make_sum_prompt(*lengths) for lengths in ((5, 2), (2, 2), (9, 2), (3, 3))]
    batch_images = generate_tokens(prompts, method, sampling, drafter=SumEngine(True))
    images = [generate_tokens([prompt], method, sampling, drafter=SumEngine(True))[0] for prompt in prompts]
    assert batch_images == images
    if sampling.greedy:
        assert batch_images == generate_tokens(prompts, Autoregressive(), sampling)


def test_rows_of_different_prefixes_have_the_right_positions() -> None:
    target = SumEngine()
    drafter = SumEngine(True)
    prompts = [make_sum_prompt(5, 2)]
    codes = generate_tokens(prompts, Eagle(tree="chain-1"), Sampling(cfg_scale=2.0), target=target, drafter=drafter)
    assert target.passes[1].positions.tolist() == [[5, 6], [2, 3]]
    prefill = drafter.passes[0]
    assert prefill.tokens is not None
    assert prefill.tokens.tolist() == [[1, 2, 3, 4, OFFSET + codes[0][0]], [51, OFFSET + codes[0][0], 0, 0, 0]]
    assert isinstance(prefill.hidden, HiddenStateView)
    assert prefill.hidden.rows[:, 0].tolist() == [0, 1]
    assert prefill.hidden.nodes[0].tolist() == [0, 1, 2, 3, 4]
    assert prefill.positions[:, 0].tolist() == [0, 0]
    second_pass = drafter.passes[1]
    assert second_pass.tokens is not None
    assert second_pass.tokens.min() >= 0
    assert (second_pass.tokens[:, 0] >= OFFSET).all()
    assert second_pass.positions[:, 0].tolist() == [5, 2]
