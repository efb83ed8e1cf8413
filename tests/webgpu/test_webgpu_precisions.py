"""Precisions on WebGPU: float16 where the device has it, which SwiftShader has not and Mesa's lavapipe has."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lantern_rt import EngineError, Pipeline
from lantern_rt.engines.host import import_onnxruntime
from lantern_rt.engines.ort.providers import find_provider
from lantern_rt.runtime.engine import Pass

pytest.importorskip("torch", reason="needs lantern-rt[export]")
try:
    find_provider("webgpu", import_onnxruntime())
except EngineError as error:
    pytest.skip(str(error), allow_module_level=True)


@pytest.mark.parametrize(
    "names", ["float16 fp16", "float16 int8-weights", "float16 int4-weights", "float32 int4-weights", "bfloat16 bf16"]
)
def test_logits_are_the_cpus_up_to_what_float16_rounds(tmp_path: Path, names: str) -> None:
    from random_bundle import Shape, random_bundle
    from torch import float32

    from lantern_rt.export.graph.graphs import HALF_TOLERANCE

    shape = Shape(2, 4, 256, 512, 512, grid=4, dtype=float32, vq_width=32)
    folder, nodes = random_bundle(shape, tmp_path / "bundle", *names.split()), 6
    tokens, outputs = np.arange(2 * nodes).reshape(2, nodes), []
    for provider in ("webgpu", "cpu"):
        engine = Pipeline.from_bundle(folder, provider=provider).engines.target
        try:
            cache = engine.new_cache(2, 32)
            sees = np.zeros((2, nodes, engine.next_past_length(cache, nodes) + nodes), bool)
            sees[:, :, -nodes:] = np.tri(nodes)
            output = engine.run(Pass(np.tile(np.arange(nodes), (2, 1)), sees, tokens), cache)
        except EngineError as error:
            if "requires f16" not in error.problem:
                raise
            pytest.skip(error.problem)
        outputs.append((output.logits[:, :nodes], output.hidden[:, :nodes]))
    for found, expected in zip(*outputs, strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=HALF_TOLERANCE * np.abs(expected).max())
