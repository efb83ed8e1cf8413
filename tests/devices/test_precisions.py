"""Precisions on a device; float16 where the device has it, as Mesa's lavapipe does and SwiftShader does not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lantern_rt import EngineError, Pipeline
from lantern_rt.runtime.engine import PassInput

pytest.importorskip("torch", reason="needs lantern-rt[export]")


@pytest.mark.parametrize(
    "names", ["float16 fp16", "float16 int8-weights", "float16 int4-weights", "float32 int4-weights", "bfloat16 bf16"]
)
def test_logits_agree_with_the_cpu_up_to_float16_rounding(tmp_path: Path, provider: str, names: str) -> None:
    from random_bundle import SHAPES, random_bundle

    folder = random_bundle(SHAPES["tiny"], tmp_path / "bundle", *names.split())
    nodes = 6
    outputs = []
    tokens = np.arange(2 * nodes).reshape(2, nodes)
    for name in (provider, "cpu"):
        try:
            engine = Pipeline.from_bundle(folder, provider=name).engines.target
            cache = engine.new_cache(2, 32)
            mask = np.zeros((2, nodes, engine.padded_past_length(cache, nodes) + nodes), bool)
            mask[:, :, -nodes:] = np.tri(nodes)
            output = engine.run(PassInput(np.tile(np.arange(nodes), (2, 1)), mask, tokens), cache)
        except EngineError as error:
            if not any(problem in error.problem for problem in ("requires f16", "no module", "finds no device")):
                raise
            pytest.skip(error.problem)
        outputs.append(output.logits[:, :nodes])
    np.testing.assert_allclose(*outputs, rtol=0, atol=0.02 * np.abs(outputs[1]).max())
