"""Weights read from graph files as float32, in every storage format."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from refusals import expect_error
from small_models import make_target

from lantern_rt.bundle.weights import StoredWeights
from lantern_rt.errors import BundleError
from lantern_rt.export.graph.graphs import make_graph_file
from lantern_rt.export.graph.precision import StorageRule, fake_quantize


@pytest.mark.parametrize("rule", ["fp32", "fp16", "int8", "int8-weights", "int4-weights"])
def test_stored_weights_are_read_with_the_rounded_values(rule: StorageRule, tmp_path: Path) -> None:
    graph = make_target(torch.float32)
    plan = make_graph_file(graph, rule)
    stored_weights = StoredWeights(plan.write(tmp_path / "target.onnx")[0])
    module_weights = graph.module.state_dict()
    for name in ("layers.1.attention.out.weight", "layers.2.ffn.down.weight", "head.weight"):
        expected = fake_quantize(module_weights[name], plan.storage_types[name], name in plan.matrix_names)
        np.testing.assert_array_equal(stored_weights.float32(name), expected.T)
        assert stored_weights[name].shape == tuple(expected.T.shape)
    assert "layers.9" not in stored_weights
    with expect_error(BundleError, "target.onnx: has no weight layers.9; export the bundle again"):
        stored_weights.float32("layers.9")
