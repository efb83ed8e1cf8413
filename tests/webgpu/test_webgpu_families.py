"""Every exported family's decoders on WebGPU: the CPU's codes. Needs PyTorch, which exports the bundles."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest

from lantern_rt import EngineError, Pipeline
from lantern_rt.engines.host import import_onnxruntime
from lantern_rt.engines.ort.providers import find_provider

try:
    find_provider("webgpu", import_onnxruntime())
except EngineError as error:
    pytest.skip(str(error), allow_module_level=True)


@pytest.mark.parametrize("name", ["t2i_drafter_bundle", "t2i_int8_bundle", "anole_bundle"])
def test_codes_of_a_family_are_the_cpus(request: pytest.FixtureRequest, name: str) -> None:
    folder = request.getfixturevalue(name)
    pipe, on_cpu = (Pipeline.from_bundle(folder, provider=name) for name in ("webgpu", "cpu"))
    condition = pipe.bundle.manifest.condition
    subject: dict[str, Any] = {"prompts": "red"}
    if condition.kind == "embeddings":
        rows = np.random.default_rng(0).normal(size=(1, condition.prefix, condition.caption_dim))
        subject = {"embeddings": rows.astype(np.float32)}
    for method in ("ar", "eagle:tree=chain-3"):
        found, expected = (
            list(islice(own.stream(**subject, seed=3, method=method, temperature=0), 4))[-1].codes[0].tolist()
            for own in (pipe, on_cpu)
        )
        assert found == expected, method
    pipe.engines.load_all()
