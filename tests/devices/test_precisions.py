"""Logits in every precision on a device; float16 is skipped on devices without it, such as SwiftShader."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lantern_rt import EngineError, Pipeline
from lantern_rt.runtime.engine import PassInput

pytest.importorskip("torch", reason="needs lantern-rt[export]")


@pytest.mark.parametrize(
    "precisions",  # dtype of activations, and precision of stored weights
    ["float16 fp16", "float16 int8-weights", "float16 int4-weights", "float32 int4-weights", "bfloat16 bf16"],
)
def test_logits_agree_with_the_cpu_up_to_rounding(tmp_path: Path, provider: str, precisions: str) -> None:
    from random_bundle import SHAPES, random_bundle

    folder = random_bundle(SHAPES["tiny"], tmp_path / "bundle", *precisions.split())
    nodes = 6
    outputs = []
    tokens = np.arange(2 * nodes).reshape(2, nodes)
    for name in (provider, "cpu"):
        try:
            engine = Pipeline.from_bundle(folder, provider=name).engines.target
            cache = engine.make_cache(2, 32)
            mask = np.zeros((2, nodes, engine.past_columns(cache, nodes) + nodes), bool)
            mask[:, :, -nodes:] = np.tri(nodes)
            output = engine.run(PassInput(np.tile(np.arange(nodes), (2, 1)), mask, tokens), cache)
        except EngineError as error:
            if not any(problem in error.problem for problem in ("requires f16", "no module", "finds no device")):
                raise
            pytest.skip(error.problem)
        outputs.append(output.logits[:, :nodes])  # a pass pads nodes, so the output may have more
    np.testing.assert_allclose(*outputs, rtol=0, atol=0.02 * np.abs(outputs[1]).max())
