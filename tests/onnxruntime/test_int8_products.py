"""A bundle that multiplies integers: exact methods draw the pictures of plain decoding, without settling ties."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals import refused

from lantern_rt import Pipeline, open_bundle
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


def test_auto_races_exact_methods(t2i_products_bundle: Path) -> None:
    assert "while drawing" in str(Pipeline.from_bundle(t2i_products_bundle)(embeddings=CAPTIONS).settings.choice)


def test_no_two_scores_need_to_be_settled(t2i_products_bundle: Path) -> None:
    assert Pipeline.from_bundle(t2i_products_bundle).engines.rounding == 0.0


def test_weights_in_memory_are_those_of_the_file(t2i_products_bundle: Path) -> None:
    bundle = open_bundle(t2i_products_bundle)
    stored = sum(entry.bytes for role, entry in bundle.manifest.files.items() if role in ("target", "target.data"))
    assert weight_bytes(bundle, "target") == stored


def test_only_cpus_run_it(t2i_products_bundle: Path, tmp_path: Path) -> None:
    bundle = open_bundle(t2i_products_bundle)
    found = f"but bundle {bundle.manifest.name} multiplies integers (int8), which only CPUs do"
    cure = "export it with --precision fp32 or fp16, or use provider cpu"
    with refused(RequestError, f"found onnxruntime-cuda, {found}; {cure}"):
        Pipeline.from_bundle(bundle, provider="cuda")
    with refused(RequestError, f"found tensorrt-rtx, {found}; {cure}"):
        build_engines(bundle, "tiny", BuildOptions("tensorrt-rtx"), tmp_path / "engines", False, lambda *_: None)


def test_a_drafter_of_integers_runs_on_cpus_alone_as_well(t2i_products_bundle: Path) -> None:
    bundle = open_bundle(t2i_products_bundle)
    target = bundle.manifest.target.model_copy(update={"precision": "fp32"})
    mixed = replace(bundle, manifest=bundle.manifest.model_copy(update={"target": target}))
    check_products(mixed, "onnxruntime-cpu")
    with refused(RequestError, "found onnxruntime-cuda, but bundle"):
        check_products(mixed, "onnxruntime-cuda")


def test_optimised_graphs_give_the_same_codes(t2i_products_bundle: Path, tmp_path: Path) -> None:
    bundle, folder = open_bundle(t2i_products_bundle), tmp_path / "engines"
    build_engines(bundle, "tiny", BuildOptions("onnxruntime"), folder, False, lambda *_: None)
    own, built = (
        Pipeline.from_bundle(bundle, engines=engines)(embeddings=CAPTIONS, seed=1).codes for engines in (None, folder)
    )
    for one, other in zip(own, built, strict=True):
        np.testing.assert_array_equal(one, other)
