"""A bundle that multiplies integers: exact methods draw the pictures of plain decoding, without settling ties."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lantern_rt import Pipeline, open_bundle
from lantern_rt.bundle.onnx_scan import graph_weights
from lantern_rt.engines.build import build_engines
from lantern_rt.engines.memory import check_products, weight_bytes
from lantern_rt.engines.profiles import BuildOptions
from lantern_rt.errors import RequestError

CAPTIONS = np.random.default_rng(1).normal(size=(4, 6, 32)).astype(np.float32)
METHODS: list[dict[str, Any]] = [
    {"method": "eagle", "tree": "mc-25"},
    {"method": "eagle", "tree": "dynamic-16"},
    {"method": "sjd", "window": 3},
    {"method": "sjd", "window": 15},
    {"method": "auto"},
]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_exact_method_draws_the_same_codes(t2i_products_bundle: Path, temperature: float) -> None:
    pipe = Pipeline.from_bundle(t2i_products_bundle)
    asked = {"embeddings": CAPTIONS, "temperature": temperature, "seed": [5, 6, 7, 8]}
    plain = pipe(**asked, method="ar").codes
    alone = pipe(embeddings=CAPTIONS[2:3], temperature=temperature, seed=7, method="ar").codes
    np.testing.assert_array_equal(alone[0], plain[2])
    for options in METHODS:
        np.testing.assert_array_equal(pipe(**asked, **options).codes, plain)


def test_no_two_scores_need_to_be_settled(t2i_products_bundle: Path) -> None:
    assert Pipeline.from_bundle(t2i_products_bundle).engines.rounding == 0.0


def test_weights_in_memory_are_those_of_the_file(t2i_products_bundle: Path) -> None:
    bundle = open_bundle(t2i_products_bundle)
    stored = sum(entry.bytes for role, entry in bundle.manifest.files.items() if role in ("target", "target.data"))
    assert weight_bytes(bundle, "target") == stored


def test_float_weights_in_memory_are_float32_however_they_are_stored() -> None:
    bundle = open_bundle("scenes")
    stored = graph_weights(bundle.path("target")).values()
    assert {weight.dtype for weight in stored} >= {"float16", "float32"}
    assert weight_bytes(bundle, "target") == 4 * sum(prod(weight.shape) for weight in stored if weight.dtype)


def test_only_cpus_run_it(t2i_products_bundle: Path, tmp_path: Path) -> None:
    bundle = open_bundle(t2i_products_bundle)
    options = BuildOptions("tensorrt-rtx")
    for call, found in (
        (lambda: Pipeline.from_bundle(bundle, provider="cuda"), "onnxruntime-cuda"),
        (lambda: build_engines(bundle, "tiny", options, tmp_path / "engines", False, lambda *_: None), "tensorrt-rtx"),
    ):
        with pytest.raises(RequestError) as caught:
            call()
        assert caught.value.found == found


def test_a_drafter_of_integers_runs_on_cpus_alone_as_well(t2i_products_bundle: Path) -> None:
    bundle = open_bundle(t2i_products_bundle)
    target = bundle.manifest.target.model_copy(update={"precision": "fp32"})
    mixed = replace(bundle, manifest=bundle.manifest.model_copy(update={"target": target}))
    check_products(mixed, "onnxruntime-cpu")
    with pytest.raises(RequestError):
        check_products(mixed, "onnxruntime-cuda")
    check_products(mixed, "onnxruntime-cuda", "onnxruntime-cpu")
    target = target.model_copy(update={"precision": "int4-weights", "dtype": "bfloat16"})
    mixed = replace(bundle, manifest=bundle.manifest.model_copy(update={"target": target, "drafter": None}))
    check_products(mixed, "tensorrt-rtx")
    with pytest.raises(RequestError, match="bfloat16"):
        check_products(mixed, "onnxruntime-cuda")
