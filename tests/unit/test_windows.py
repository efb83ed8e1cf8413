"""The adaptive window of method sjd, which changes the number of draft tokens but not the images.

The window is small if many images share a forward pass, or if draft tokens are often rejected.
"""

from __future__ import annotations

import pytest
from toy_engine import ToyTarget, collect_codes, decode, make_model, make_prompt

from lantern_rt.methods import Autoregressive, Sampling, SpeculativeJacobi
from lantern_rt.runtime.windows import NODE_COST, AdaptiveWindow


def test_always_rejected_drafts_cost_at_most_ten_percent() -> None:
    window = AdaptiveWindow(31)
    cost = 0.0  # total cost, where a pass of method ar costs 1
    for _ in range(256):
        cost += 1 + NODE_COST * (window.choose_size(1) - 1)  # a pass of ar has two nodes, too
        window.record(window.choose_size(1), 0)
    assert window.choose_size(1) == 1
    assert cost < 1.1 * 256


def test_a_window_grows_when_drafts_are_accepted() -> None:
    window = AdaptiveWindow(7)
    for _ in range(64):
        window.record(window.choose_size(1), 0)
    sizes = []
    for _ in range(64):
        sizes.append(window.choose_size(1))
        window.record(window.choose_size(1), window.choose_size(1))
    assert list(dict.fromkeys(sizes)) == [1, 3, 7]


def test_a_few_rejected_drafts_do_not_change_the_window() -> None:
    window = AdaptiveWindow(7)
    for accepted in (3, 0, 0, 0, 0, 4, 0, 2, 0, 0, 0, 3):
        assert window.choose_size(1) == 7
        window.record(7, accepted)


@pytest.mark.parametrize(("images", "size"), [(1, 15), (2, 7), (3, 3), (4, 3), (5, 2), (8, 2), (9, 1), (64, 1)])
def test_the_window_shrinks_with_the_images_of_a_pass(images: int, size: int) -> None:
    assert AdaptiveWindow(15).choose_size(images) == size


@pytest.mark.parametrize("images", [1, 3, 6, 10])
def test_adaptive_windows_limit_nodes_and_keep_the_tokens(images: int) -> None:
    model = make_model(5, 25, past_length_multiple=4)
    prompts = [make_prompt(i) for i in range(images)]
    sampling = Sampling()
    codes = collect_codes(
        decode(model, prompts, range(images), sampling, SpeculativeJacobi(window=12), adaptive_window=True), images
    )
    assert isinstance(model.target, ToyTarget)
    prefill, *passes = model.target.passes
    assert prefill[0] == images
    max_nodes = {1: 13, 3: 4, 6: 3, 10: 2}[images]
    assert all(nodes <= max_nodes for rows, nodes in passes if rows == images)
    assert codes == collect_codes(
        decode(make_model(5, 25, past_length_multiple=4), prompts, range(images), sampling, Autoregressive()), images
    )
