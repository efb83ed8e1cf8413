"""The decode loop with toy engines, which raise an error for every wrong mask, position, hidden state or rollback."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from toy_engine import ToyCache, ToyDrafter, ToyModel, ToyTarget, collect_codes, decode, make_model, make_prompt
from toy_methods import METHODS, NEIGHBORS, STATIC_TREE, VOCABULARY

from lantern_rt.errors import EngineError
from lantern_rt.methods import Autoregressive, DrafterName, Eagle, LanternPlusPlus, MethodConfig, Sampling
from lantern_rt.runtime import eagle as drafting
from lantern_rt.runtime import passes
from lantern_rt.runtime.decode import DecodeStep
from lantern_rt.runtime.drafters import count_draft_nodes
from lantern_rt.runtime.drafting import CommittedTokens
from lantern_rt.runtime.engine import PassInput, PassOutput
from lantern_rt.runtime.heads import DraftHeads, draft_head_shapes
from lantern_rt.runtime.state import DrafterLayout, Prompt
from lantern_rt.runtime.tree import DraftTree, StaticTreeShape
from lantern_rt.runtime.tree_names import parse_tree

CODES = 9
SAMPLINGS = {
    "sampling": Sampling(),
    "guided, top-k": Sampling(cfg_scale=2.0, temperature=0.8, top_k=4),
    "guided, top-p": Sampling(cfg_scale=1.5, top_p=0.8, filter_order="top-p, top-k"),
    "greedy": Sampling(temperature=0),
    "greedy, guided": Sampling(cfg_scale=3.0, temperature=0),
}
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
every_sampling = pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)


def make_tree_model(**options: Any) -> ToyModel:
    defaults = {"vocabulary": VOCABULARY, "codes": CODES, "past_length_multiple": 4, "neighbors": NEIGHBORS}
    return make_model(**(defaults | options))


def make_prompts(identities: Iterable[int]) -> list[Prompt]:
    return [make_prompt(i, padding=i % 3) for i in identities]


def decode_images(
    engine: ToyModel, identities: Iterable[int], sampling: Sampling, method: MethodConfig, seed_block: int = 0
) -> list[DecodeStep]:
    identities = list(identities)
    return list(decode(engine, make_prompts(identities), [1000 * seed_block + i for i in identities], sampling, method))


# ---------------------------------------------------------------- the steps of a decode


@every_method
@every_sampling
def test_every_image_is_complete_and_agrees_with_its_statistics(method: MethodConfig, sampling: Sampling) -> None:
    model = make_tree_model()
    num_images = 4
    steps = decode_images(model, range(num_images), sampling, method)
    codes = collect_codes(steps, num_images)
    assert [len(row) for row in codes] == [CODES] * num_images
    assert all(0 <= code < VOCABULARY for row in codes for code in row)
    assert [step.stats is not None for step in steps] == [False] * (len(steps) - 1) + [True]
    assert [step.done for step in steps] == np.cumsum([sum(len(p.codes) for p in s.parts) for s in steps]).tolist()
    assert all(step.total == num_images * CODES for step in steps)

    statistics = steps[-1].stats
    assert statistics is not None
    assert isinstance(model.target, ToyTarget)
    assert isinstance(model.drafter, ToyDrafter)
    assert statistics.target_passes == len(model.target.passes) == len(steps)
    assert statistics.drafter_passes == len(model.drafter.passes)
    steps_per_image = [sum(part.sequence == i for step in steps for part in step.parts) for i in range(num_images)]
    assert sum(statistics.accepted_lengths) == sum(steps_per_image) - num_images
    assert statistics.tokens_per_forward_pass == pytest.approx(np.mean([CODES / n for n in steps_per_image]))
    drafted = [part for step in steps[1:] for part in step.parts]
    lengths = np.bincount([len(part.acceptance.path) - 1 if part.acceptance else 0 for part in drafted])
    assert statistics.accepted_lengths == lengths.tolist()
    engine_seconds = statistics.target_seconds + statistics.drafter_seconds
    assert statistics.seconds >= engine_seconds
    assert statistics.host_seconds == pytest.approx(statistics.seconds - engine_seconds)
    tvd = 0 if method.exact else sum(part.acceptance.realised_tvd for part in drafted if part.acceptance)
    assert statistics.realised_tvd == pytest.approx(tvd / num_images)


@every_method
def test_a_step_commits_the_accepted_path_and_the_bonus_token(method: MethodConfig) -> None:
    for step in decode_images(make_tree_model(), range(3), Sampling(), method)[1:]:
        for part in step.parts:
            if isinstance(method, Autoregressive):
                assert (part.tree, part.acceptance) == (None, None)
                continue
            assert part.tree is not None
            assert part.acceptance is not None
            path = part.acceptance.path
            assert path[0] == 0
            assert all(part.tree.parents[child] == parent for parent, child in itertools.pairwise(path))
            bonus = [] if part.acceptance.bonus_token is None else [part.acceptance.bonus_token]
            assert part.codes.tolist() == [*part.tree.tokens[path[1:]], *bonus]
            assert part.tree.num_nodes <= count_draft_nodes(method)


@cache
def generate_alone(method: str, sampling: str, identity: int) -> list[int]:
    return collect_codes(decode_images(make_tree_model(), [identity], SAMPLINGS[sampling], METHODS[method]), 1)[0]


@pytest.mark.parametrize("method", METHODS)
@given(order=st.permutations(range(6)), size=st.integers(1, 6))
@settings(max_examples=4, suppress_health_check=[HealthCheck.too_slow])
def test_the_tokens_of_an_image_do_not_depend_on_the_batch(method: str, order: list[int], size: int) -> None:
    for name, sampling in SAMPLINGS.items():
        together = collect_codes(decode_images(make_tree_model(), order[:size], sampling, METHODS[method]), size)
        for identity, codes in zip(order[:size], together, strict=True):
            assert codes == generate_alone(method, name, identity)


@every_method
def test_equal_seeds_give_equal_images(method: MethodConfig) -> None:
    images, repeated_images, other_images = (
        collect_codes(decode_images(make_tree_model(), range(4), Sampling(), method, seed_block), 4)
        for seed_block in (1, 1, 2)
    )
    assert images == repeated_images
    assert images != other_images


@pytest.mark.parametrize("tree", ["chain-3", "balanced-25", "naive-57"])
@every_sampling
def test_all_tokens_of_a_perfect_drafter_are_accepted(tree: str, sampling: Sampling) -> None:
    """Use a drafter with the logits of the target: a wrong context, guidance or temperature would reject a token."""
    static_tree = parse_tree(tree)
    assert isinstance(static_tree, StaticTreeShape)
    steps = decode_images(make_tree_model(agreement=1.0, codes=40), range(3), sampling, Eagle(tree=tree))
    assert all(len(part.codes) == len(static_tree.levels) + 1 for step in steps[1:-1] for part in step.parts)


def test_relaxed_acceptance_accepts_more_and_reports_its_tvd() -> None:
    def decode_statistics(method: MethodConfig) -> Any:
        return decode_images(make_tree_model(codes=60), range(6), Sampling(), method)[-1].stats

    exact = decode_statistics(LanternPlusPlus(tree=STATIC_TREE, neighbors=3, lambda_=1 + 1e-12))
    relaxed = decode_statistics(METHODS["lantern++"])
    assert relaxed.tokens_per_forward_pass > exact.tokens_per_forward_pass
    assert relaxed.realised_tvd > 0


# ---------------------------------------------------------------- edge cases


@every_method
@pytest.mark.parametrize("sampling", [Sampling(top_k=1), Sampling(top_k=1, cfg_scale=2.0), Sampling(top_p=1e-6)])
def test_sampling_from_one_possible_token_is_greedy_decoding(method: MethodConfig, sampling: Sampling) -> None:
    greedy = Sampling(cfg_scale=sampling.cfg_scale, temperature=0)
    codes = collect_codes(decode_images(make_tree_model(), range(3), sampling, method), 3)
    if method.exact:
        assert codes == collect_codes(decode_images(make_tree_model(), range(3), greedy, METHODS["ar"]), 3)


@every_sampling
@pytest.mark.parametrize("tree", ["medusa-63", "dynamic-59"])
def test_a_tree_wider_than_the_vocabulary_is_pruned(tree: str, sampling: Sampling) -> None:
    method = Eagle(tree=tree)
    steps = decode_images(make_tree_model(vocabulary=3), range(2), sampling, method)
    assert [len(codes) for codes in collect_codes(steps, 2)] == [CODES] * 2
    for step in steps[1:]:
        for part in step.parts:
            assert part.tree is not None
            for children in part.tree.tree_structure.children:
                drafted = part.tree.tokens[[*children]].tolist()
                assert len(set(drafted)) == len(drafted) <= 3


@every_method
@pytest.mark.parametrize(("prefix", "codes"), [(1, 1), (2, 2), (8, 3), (8, CODES)])
def test_prompts_of_any_length_and_small_images_are_decoded(method: MethodConfig, prefix: int, codes: int) -> None:
    model = make_tree_model(prefix=prefix, codes=codes)
    prompts = [make_prompt(i, prefix, padding=max(0, prefix - 1 - i)) for i in range(3)]
    steps = list(decode(model, prompts, range(3), Sampling(cfg_scale=2.0), method))
    assert [len(row) for row in collect_codes(steps, 3)] == [codes] * 3


@every_method
def test_nodes_past_the_position_table_use_the_last_position(method: MethodConfig) -> None:
    """Check that a table with positions only for the prefix and the image gives the images of a larger table."""
    large_table = make_tree_model()
    full_table = make_tree_model(positions=3 + CODES)
    for sampling in [Sampling(temperature=0), Sampling(temperature=0, cfg_scale=2.0)]:
        codes = collect_codes(decode_images(full_table, range(3), sampling, method), 3)
        assert [len(row) for row in codes] == [CODES] * 3
        if method.exact:
            assert codes == collect_codes(decode_images(large_table, range(3), sampling, method), 3)


@pytest.mark.parametrize("masks_prefix", [True, False])
def test_drafters_with_and_without_prompt_padding_are_decoded(masks_prefix: bool) -> None:
    model = make_tree_model(layout=DrafterLayout(masks_prefix=masks_prefix, prefix_token=2))
    steps = decode_images(model, range(4), Sampling(cfg_scale=2.0), METHODS["eagle, static"])
    assert [len(row) for row in collect_codes(steps, 4)] == [CODES] * 4


def test_finished_images_leave_the_batch() -> None:
    model = make_tree_model(agreement=0.5, codes=20)
    decode_images(model, range(6), Sampling(cfg_scale=2.0), METHODS["eagle, dynamic"])
    assert isinstance(model.target, ToyTarget)
    rows = [rows for rows, _ in model.target.passes]
    assert rows[0] == 12
    assert rows == sorted(rows, reverse=True)
    assert rows[-1] < 12
    assert {nodes for _, nodes in model.target.passes[1:]} == {8}, "all verification passes have the same nodes"


class DamagedDrafter(ToyDrafter):
    """Drafter whose logits are NaN, like the logits of damaged weights."""

    def run(self, batch: PassInput, cache: ToyCache) -> PassOutput:
        output = super().run(batch, cache)
        output.logits[:] = np.nan
        return output


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("tree", ["balanced-25", "dynamic-10-3-3"])
@pytest.mark.parametrize("drafter", ["eagle", "heads"])
def test_drafter_logits_that_are_nan_are_an_error(drafter: DrafterName, tree: str, temperature: float) -> None:
    model = make_tree_model()
    tables = draft_head_shapes(VOCABULARY, 6, rank=3, units=2)
    heads = DraftHeads(**{name: np.full(shape, np.nan, np.float32) for name, shape in tables.items()})
    damaged = replace(model, drafter=DamagedDrafter(**vars(model.drafter)), heads=heads)
    with pytest.raises(EngineError, match="damaged"):
        decode_images(damaged, [0], Sampling(temperature=temperature), Eagle(tree=tree, drafter=drafter))


# ---------------------------------------------------------------- faults that the toy engines detect


def replace_structure_field(field: str, make: Callable[[DraftTree], Any]) -> tuple[type, str, Any]:
    get_structure = DraftTree.tree_structure.fget
    assert get_structure is not None
    return DraftTree, "tree_structure", property(lambda tree: replace(get_structure(tree), **{field: make(tree)}))


original_committed_mask = passes.build_committed_mask
original_prefill_mask = passes.build_prefill_mask
original_append = ToyCache.append
original_keep_rows = ToyCache.keep_rows
original_store_committed_tokens = drafting.EagleDrafter.store_committed_tokens


def append_first_nodes(cache: ToyCache, new_kv: Any, accepted_indices: list[NDArray[np.int64]]) -> None:
    original_append(cache, new_kv, [np.arange(len(nodes)) if cache.contiguous else nodes for nodes in accepted_indices])


def shift_hidden_states(shift: int, axis: int) -> tuple[type, str, Any]:
    """Return a fault that rolls the committed hidden states, `[rows, nodes, hidden_size]`."""

    def store(drafts: Any, committed: list[CommittedTokens]) -> None:
        shifted = [item._replace(hidden=np.roll(item.hidden, shift, axis)) for item in committed]
        original_store_committed_tokens(drafts, shifted)

    return drafting.EagleDrafter, "store_committed_tokens", store


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "nodes attend to all earlier nodes": replace_structure_field(
        "ancestor_mask", lambda t: np.tri(t.num_nodes, dtype=bool)
    ),
    "nodes do not attend to their ancestors": replace_structure_field(
        "ancestor_mask", lambda t: np.eye(t.num_nodes, dtype=bool)
    ),
    "depths are zero": replace_structure_field("depths", lambda t: np.zeros(t.num_nodes, np.int64)),
    "nodes attend to padding": (
        passes,
        "build_committed_mask",
        lambda *parts: original_committed_mask(*parts[:-1], parts[-1][:, :0]),
    ),
    "nodes attend to columns past the end": (
        passes,
        "build_committed_mask",
        lambda engine, cache, n, *parts: original_committed_mask(engine, cache, n + 1, *parts),
    ),
    "the prefix attends to padding": (
        passes,
        "build_prefill_mask",
        lambda real, nodes: original_prefill_mask(np.ones_like(real), nodes),
    ),
    "the first nodes are committed instead of the accepted ones": (ToyCache, "append", append_first_nodes),
    "drafts are not rolled back": (ToyCache, "truncate", lambda cache, lengths: None),
    "remaining rows are reversed": (ToyCache, "keep_rows", lambda cache, rows: original_keep_rows(cache, rows[::-1])),
    "hidden states are of other images": shift_hidden_states(2, 0),
    "hidden states are of the node before": shift_hidden_states(1, 1),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("method", ["eagle, static", "eagle, dynamic"])
def test_the_toy_engines_detect_every_fault(fault: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*FAULTS[fault])
    with pytest.raises((AssertionError, EngineError)):
        decode_images(make_tree_model(codes=20), range(5), Sampling(cfg_scale=1.5), METHODS[method])
