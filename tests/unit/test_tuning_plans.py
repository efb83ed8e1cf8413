"""What tuning plans with: acceptance rates, costs, and the tree or window that gives the most codes a second."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from statistics_entries import CHEAP, DEAR, falling_rates, statistics_of, windows_of
from toy_engine import make_model, make_prompt
from tree_figures import expected_tokens, slots_per_level

from lantern_rt.errors import TreeError
from lantern_rt.methods import Ar, Auto, Eagle, MethodConfig, RowParallel, Sampling, Sjd
from lantern_rt.planning.acceptance_statistics import Fronts, Quality
from lantern_rt.planning.budget import budget_of
from lantern_rt.planning.costs import HostCosts, pass_seconds
from lantern_rt.planning.store import Choice
from lantern_rt.planning.tree_search import best_plan, speed_by_nodes
from lantern_rt.runtime.decode import RequestStep, decode
from lantern_rt.runtime.grid import Raster, row_batch_sizes
from lantern_rt.runtime.likelihood import Likelihood
from lantern_rt.runtime.tree import StaticTree
from lantern_rt.runtime.tree_names import named_tree, tree_name
from lantern_rt.tuning.acceptance_counts import PROBE_PATHS, AcceptanceCounts
from lantern_rt.tuning.measure import likelihood_ratio
from lantern_rt.tuning.tune import Finalist, choose, choose_finalists

# ---------------------------------------------------------------- rates


def test_rates_predict_how_many_tokens_another_tree_gives() -> None:
    model, sampling = make_model(vocabulary=6, codes=50, agreement=0.7), Sampling()
    counts = AcceptanceCounts()

    def parts(seeds: range, tree: str) -> list[RequestStep]:
        prompts = [make_prompt(i) for i in seeds]
        return [part for step in decode(model, prompts, seeds, sampling, Eagle(tree=tree)) for part in step.parts]

    for part in parts(range(40), tree_name(PROBE_PATHS)):
        counts.add(part)
    for name in ("chain-3", "tree-3-210-110"):
        tree = named_tree(name)
        assert isinstance(tree, StaticTree)
        given = [len(part.codes) for part in parts(range(40, 80), name) if part.acceptance]
        assert np.mean(given) == pytest.approx(expected_tokens(tree.paths, counts.rates().tolist()), abs=0.12)


def test_a_depth_or_rank_that_was_never_tried_has_rate_zero() -> None:
    counts = AcceptanceCounts()
    counts.tried[0, :2], counts.accepted[0, :2] = 100, (50, 20)
    counts.tried[1, 0], counts.accepted[1, 0] = 4, 4
    rates = counts.rates()
    assert rates[0, 0] == pytest.approx(0.5, abs=0.01)
    assert 0.5 < rates[1, 0] < 0.75  # four tries do not outweigh the depth above
    assert rates[0, 2:].max() == 0
    assert rates[2:].max() == 0


# ---------------------------------------------------------------- trees


def test_free_nodes_give_a_large_tree_and_dear_ones_none() -> None:
    large = best_plan(statistics_of(Eagle(), 0.6), CHEAP)
    assert len(large.paths) > 40
    assert large.tokens == pytest.approx(expected_tokens(large.paths, falling_rates(0.6).tolist()))
    none = best_plan(statistics_of(Eagle(), 0.6), DEAR)
    assert (none.paths, none.tokens) == ((), 1.0)


def test_the_plan_is_the_best_of_all_small_trees() -> None:
    rates = ((0.7, 0.5, 0.2), (0.5, 0.4, 0.0), (0.4, 0.0, 0.0))
    costs = HostCosts({2: 1.0, 4: 1.1, 8: 1.5}, {2: 0.2, 4: 0.25}, 0.05, 0.03)
    every = [(), *(path for d in (1, 2, 3) for path in itertools.product(range(3), repeat=d))]
    trees: set[frozenset[tuple[int, ...]]] = {frozenset()}
    for _ in range(6):  # all trees of up to six drafted nodes
        trees |= {
            tree | {path}
            for tree in trees
            for path in every[1:]
            if path not in tree
            and (len(path) == 1 or path[:-1] in tree)
            and (path[-1] == 0 or (*path[:-1], path[-1] - 1) in tree)
        }

    def rate(tree: frozenset[tuple[int, ...]]) -> float:
        paths = tuple(tree)
        if not paths:
            return 1 / costs.plain_seconds
        return expected_tokens(paths, rates) / costs.tree_seconds(len(paths) + 1, slots_per_level(paths))

    found = best_plan(statistics_of(Eagle(), acceptance_rates=rates), costs, most_nodes=7)
    assert found.rate == pytest.approx(max(map(rate, trees)))
    assert found.rate == pytest.approx(rate(frozenset(found.paths)))


@pytest.mark.parametrize("name", ["chain-3", "balanced-25", "naive-57", "medusa-63", "mc-25"])
def test_a_trees_name_holds_its_whole_shape(name: str) -> None:
    tree = named_tree(name)
    assert isinstance(tree, StaticTree)
    again = named_tree(tree_name(tree.paths))
    assert isinstance(again, StaticTree)
    assert again.paths == tree.paths


def test_a_tree_name_that_does_not_add_up_is_refused() -> None:
    with pytest.raises(TreeError, match="'tree-2-1' does not add up; each level needs one digit"):
        named_tree("tree-2-1")
    with pytest.raises(TreeError, match="found a node with 36 children, expected at most 35"):
        tree_name([(rank,) for rank in range(36)])


def test_costs_are_lines_between_what_was_measured() -> None:
    cost = {2: 1.0, 4: 1.2, 8: 2.0}
    assert pass_seconds(cost, 3) == pytest.approx(1.1)
    assert pass_seconds(cost, 16) == pytest.approx(3.6)
    assert HostCosts(cost, {2: 0.5}, 0.1, 0.05).tree_seconds(4, [1, 3]) == pytest.approx(0.1 + 1.2 + 1.1)
    assert HostCosts(cost, None, 0.1, 0.0, redraft=0.02).window_seconds(7) == pytest.approx(0.1 + 2.0 + 0.14)


def test_rows_are_planned_by_the_nodes_of_all_their_passes() -> None:
    sizes = row_batch_sizes(Raster(16, 4), 2)
    assert (sum(sizes), len(sizes)) == (18, 9)  # 15 tokens, and 3 in place of tokens that first ones of rows wait for
    fronts = Fronts(drafts=0, tokens=15, passes={nodes: sizes.count(nodes) for nodes in sorted({*sizes})})
    found = statistics_of(RowParallel(window=2), fronts=(fronts,), acceptance_rates=())
    costs = HostCosts({2: 1.0, 4: 1.2}, None, 0.1, redraft=0.01)
    plan = best_plan(found, costs)
    assert (plan.nodes, plan.tokens, plan.drafting) == (max(sizes), 15 / 9, {"drafts": 0})
    each = [0.1 + (1.0 if nodes < 3 else 1.1 if nodes == 3 else 1.2) + 0.01 * nodes for nodes in sizes]
    assert plan.seconds == pytest.approx(sum(each) / 9)
    assert best_plan(found, costs, most_nodes=max(sizes) - 1).nodes == 1


def test_rows_keep_to_a_budget_if_the_interval_of_their_likelihood_does() -> None:
    rows, balanced = RowParallel(window=4), budget_of(Auto(quality="balanced"))
    sure, unsure = (Quality(images=99, tvd_per_token=0.0, nll_ratio=1.01, nll_error=error) for error in (0.005, 0.006))
    assert balanced.allows(rows, sure)
    assert not balanced.allows(rows, unsure)
    assert not budget_of(Auto(quality="strict")).allows(rows, sure)
    assert not budget_of(Auto(quality="tvd=0.10")).allows(rows, sure), "their total variation is not known"


def test_the_best_window_is_the_one_whose_codes_outweigh_its_pass() -> None:
    windows = windows_of({3: 2.0, 7: 2.7, 15: 3.4})
    assert best_plan(windows, CHEAP).window == 15  # nodes are free
    curve = HostCosts({2: 1.0, 4: 1.2, 8: 1.5, 16: 2.4}, None, 0.1, redraft=0.01)
    plan = best_plan(windows, curve)
    assert (plan.window, plan.tokens, plan.drafting) == (7, 2.7, {"window": 7})
    assert plan.rate == pytest.approx(2.7 / (0.1 + 1.5 + 0.07))
    assert best_plan(windows, DEAR).drafting == {}


def test_the_fastest_finalist_wins_that_keeps_to_the_budget_when_compared() -> None:
    def finalist(speed_up: float, tvd: float, nll_ratio: float, **relaxation: Any) -> Finalist:
        method = Sjd(window=7, **relaxation)
        choice = Choice(method=method, speed_up=speed_up, tvd_per_token=tvd, nll_ratio=nll_ratio)
        return Finalist(statistics_of(Sjd(**relaxation), images=2), choice, 3, 0.0, [speed_up] * 5, [1.0] * 5, {})

    balanced, loose = budget_of(Auto(quality="balanced")), budget_of(Auto(quality="TVD=0.1"))
    exact = finalist(1.5, 0.0, 1.3)
    wasteful, unlikely = finalist(2.0, 0.07, 1.0, omega=2.0), finalist(1.9, 0.05, 1.1, omega=1.5)
    assert choose([wasteful, exact, unlikely], balanced, {}).method == Sjd(window=7)
    assert choose([wasteful, exact, unlikely], loose, {}).method == Sjd(window=7, omega=2.0)
    assert choose([finalist(1.01, 0.0, 1.0)], balanced, {}).method == Ar()
    assert choose([], balanced, {}).method == Ar()
    known: dict[MethodConfig, Quality] = {
        Sjd(omega=2.0): Quality(images=50, tvd_per_token=0.05, nll_ratio=1.0, nll_error=0.0)
    }
    assert choose([wasteful, exact, unlikely], balanced, known).method == Sjd(window=7, omega=2.0)  # of more images


def test_likelihoods_are_compared_by_what_exceeds_the_entropy() -> None:
    plain = [Likelihood(1.0, 0.9), Likelihood(2.0, 2.1), Likelihood(3.0, 3.0)]  # pictures differ a lot
    assert likelihood_ratio(plain, plain) == (1.0, 0.0)
    alike = [Likelihood(score.nats + 0.7, score.entropy + 0.7) for score in plain]  # other pictures, drawn as fairly
    assert likelihood_ratio(alike, plain) == pytest.approx((1.0, 0.0))
    unlikely = [
        Likelihood(score.nats + more, score.entropy) for score, more in zip(plain, (0.1, 0.2, 0.3), strict=True)
    ]
    ratio, error = likelihood_ratio(unlikely, plain)
    assert ratio == pytest.approx(1 + 0.2 / 2)
    assert error == pytest.approx(0.1 / 3**0.5 / 2)
    assert likelihood_ratio(unlikely[:1], plain)[1] == float("inf")


def test_speed_by_nodes_is_that_of_the_best_draft_of_each_size() -> None:
    trees, windows = statistics_of(Eagle(), 0.6), windows_of({3: 2.0, 7: 2.5})
    speeds = speed_by_nodes(trees, CHEAP)
    assert list(speeds) == sorted(speeds)
    assert speeds[64] == pytest.approx(best_plan(trees, CHEAP).rate, rel=1e-6)
    assert speed_by_nodes(trees, HostCosts({2: 1.0, 8: 1.6}, None)) == {}
    assert speed_by_nodes(windows, HostCosts({2: 1.0, 8: 1.6}, None)) == pytest.approx({4: 2.0 / 1.2, 8: 2.5 / 1.6})


def test_finalists_are_the_most_promising() -> None:
    window, tree = statistics_of(Sjd(), 4.0), statistics_of(Eagle(), 0.6)
    useless = statistics_of(Eagle(), 0.0)
    finalists = choose_finalists([useless, tree, window], CHEAP)
    assert [entry for entry, _ in finalists] == [window, tree]
    assert [list(plan.drafting) for _, plan in finalists] == [["window"], ["tree"]]
    assert choose_finalists([useless], CHEAP) == []
