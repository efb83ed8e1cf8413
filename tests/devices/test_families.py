"""Decoders of every exported family generate the CPU's tokens on a device. PyTorch exports the bundles."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest

from lantern_rt import Pipeline

BUNDLES = [
    "t2i_drafter_bundle",
    "t2i_int8_bundle",
    "anole_bundle",
    "lumina_bundle",
    "lumina2_bundle",
    "glm_image_bundle",
    "emu3_bundle",
    "simplear_bundle",
    "par_bundle",
    "nar_bundle",
]


@pytest.mark.parametrize("name", BUNDLES)
def test_every_family_generates_the_cpus_tokens(request: pytest.FixtureRequest, provider: str, name: str) -> None:
    folder = request.getfixturevalue(name)
    # WebGPU lacks ops of SimpleAR's image decoder.
    on_device = f"{provider},vq_decoder=cpu" if name == "simplear_bundle" else provider
    pipe, on_cpu = (Pipeline.from_bundle(folder, provider=name) for name in (on_device, "cpu"))
    manifest = pipe.bundle.manifest
    subject: dict[str, Any] = {"prompts": "red"}
    if manifest.condition.kind == "class":
        subject = {"class_ids": 1}
    elif manifest.condition.kind == "embeddings":
        rows = np.random.default_rng(0).normal(size=(1, manifest.condition.prefix, manifest.condition.caption_dim))
        subject = {"embeddings": rows.astype(np.float32)}
    methods = ["groups"] if manifest.order else ["ar", "sjd:window=3", "rows:window=1"]
    if name == "t2i_int8_bundle":
        methods = ["ar"]  # only CPUs round activations for int8 weights, so later tokens differ
    for method in [*methods, *(["eagle:tree=chain-3"] if manifest.drafter else [])]:
        codes, expected = (
            list(islice(pipeline.stream(**subject, seed=3, method=method, temperature=0), 4))[-1].codes[0].tolist()
            for pipeline in (pipe, on_cpu)
        )
        assert codes == expected, method
    pipe.engines.load_all()
