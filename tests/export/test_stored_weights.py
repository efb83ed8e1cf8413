"""Weights of graphs come back as float32, however they are stored."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from refusals import expects_error
from small_models import make_target

from lantern_rt.bundle.weights import StoredWeights
from lantern_rt.errors import BundleError
from lantern_rt.export.graph.graphs import plan_graph
from lantern_rt.export.graph.precision import Rule, fake_quantize


@pytest.mark.parametrize("rule", ["fp32", "fp16", "int8", "int8-weights", "int4-weights"])
def test_every_weight_comes_back_as_the_graph_computes_with_it(rule: Rule, tmp_path: Path) -> None:
    graph = make_target(torch.float32)
    plan = plan_graph(graph, rule)
    found = StoredWeights(plan.write(tmp_path / "target.onnx")[0])
    own = graph.module.state_dict()
    for name in ("layers.1.attention.out.weight", "layers.2.ffn.down.weight", "head.weight"):
        expected = fake_quantize(own[name], plan.storages[name], name in plan.matrices)
        np.testing.assert_array_equal(found.float32(name), expected.T)
        assert found[name].shape == tuple(expected.T.shape)
    assert "layers.9" not in found
    with expects_error(BundleError, "target.onnx: has no weight layers.9; export the bundle again"):
        found.float32("layers.9")
