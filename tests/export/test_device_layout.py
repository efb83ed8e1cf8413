"""The layout that accelerators get computes what the same file's own graph does, for every kind of decoder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from small_models import CONFIG, randomise_norms
from torch import nn

from lantern_rt.bundle.manifest import Precision
from lantern_rt.export.graph.graphs import HALF_TOLERANCE, Graph, in_half, plan_graph, target_graph
from lantern_rt.export.graph.precision import Rule
from lantern_rt.export.models.decoder import Decoder, DecoderConfig
from lantern_rt.export.models.eagle import EagleDrafter, drafter_graph
from lantern_rt.export.parity import DeviceLayout, Sessions, difference

LLAMA = replace(CONFIG, rotary="sequence", rope_style="half", prefix_rotation="identity")
TARGETS: dict[str, DecoderConfig] = {
    "grid, interleaved": CONFIG,
    "grid, half": replace(CONFIG, rope_style="half"),
    "sequence, interleaved": replace(LLAMA, rope_style="interleaved"),
    "sequence, half": LLAMA,
    "prefix that turns": replace(CONFIG, prefix_rotation="identity"),
    "a head of its own for every query": replace(CONFIG, num_kv_heads=4),
    "one head for all queries": replace(CONFIG, num_kv_heads=1),
    "normed heads": replace(LLAMA, query_key_norm=True),
    "normed heads, another epsilon": replace(LLAMA, query_key_norm=True, norm_eps=1e-2),
    "large epsilon": replace(CONFIG, norm_eps=1e-2),
    "deep head": replace(LLAMA, head_hidden=48),
    "scale is no power of two": replace(CONFIG, hidden_size=96),  # head_dim 24
    "no norms": replace(CONFIG, input_norm=False, final_norm=False),
    "more than 64 columns": replace(CONFIG, prefix=70, spare_positions=64),  # no pass has more nodes than positions
}
DRAFTERS: dict[str, tuple[DecoderConfig, bool]] = {
    "drafter": (replace(CONFIG, final_norm=False), False),
    "drafter with bias": (replace(CONFIG, final_norm=False), True),
    "drafter without its first norm": (replace(CONFIG, num_layers=1, input_norm=False, final_norm=False), True),
    "drafter of a sequence": (replace(LLAMA, final_norm=False, norm_eps=1e-6), True),
}


def target(config: DecoderConfig) -> Graph:
    torch.manual_seed(0)
    decoder = Decoder(config)
    randomise_norms(decoder)
    return target_graph(decoder, 0.1 * torch.randn(config.vocab_size, config.hidden_size))  # where an epsilon shows


def drafter(config: DecoderConfig, bias: bool) -> Graph:
    torch.manual_seed(0)
    made = EagleDrafter(config, nn.Linear(config.hidden_size, config.vocab_size, bias=False), bias, tokens=50)
    randomise_norms(made)
    return drafter_graph(made)


GRAPHS = {name: target(config) for name, config in TARGETS.items()}
GRAPHS |= {name: drafter(*given) for name, given in DRAFTERS.items()}


def furthest(graph: Graph, folder: Path, rule: Rule = "fp32") -> float:
    """How far the two layouts of a graph's file are apart, on all of its cases."""
    path, *_ = plan_graph(graph, rule).write(folder / f"{graph.role}.onnx")
    plain, device, worst = Sessions(path, lean=True), DeviceLayout(graph, path, lean=True), 0.0
    for inputs in graph.cases.values():
        expected, found = plain.run(inputs), device.run(inputs)
        assert found.keys() == expected.keys()
        worst = max(worst, *(difference(found[name], expected[name]) for name in expected))
    return worst


@pytest.mark.parametrize("name", GRAPHS)
def test_both_layouts_of_a_file_compute_the_same(name: str, tmp_path: Path) -> None:
    assert furthest(GRAPHS[name], tmp_path) < 1e-5


@pytest.mark.parametrize("rule", [*(rule for rule in get_args(Precision) if rule != "int8"), "lossless"])
@pytest.mark.parametrize("name", ["normed heads, another epsilon", "deep head", "drafter with bias"])
def test_weights_that_are_stored_smaller_are_the_same_to_both(name: str, rule: Rule, tmp_path: Path) -> None:
    assert furthest(GRAPHS[name], tmp_path, rule) < 1e-5


@pytest.mark.parametrize("name", GRAPHS)
def test_both_layouts_of_a_graph_that_computes_in_float16_are_close(name: str, tmp_path: Path) -> None:
    assert furthest(in_half(GRAPHS[name]), tmp_path) < HALF_TOLERANCE


def test_columns_that_no_node_sees_do_not_matter(tmp_path: Path) -> None:
    graph = GRAPHS["grid, interleaved"]
    path, *_ = plan_graph(graph, "fp32").write(tmp_path / "target.onnx")
    device, inputs = DeviceLayout(graph, path), dict(graph.cases["rows of different length"])
    expected = device.run(inputs)
    for name in [name for name in inputs if name.startswith("past_")]:
        inputs[name] = inputs[name].copy()
        inputs[name][CONFIG.prefix :, 0] = 1e4  # of the shorter row, past its end
    for name, array in device.run(inputs).items():
        np.testing.assert_array_equal(array, expected[name])
