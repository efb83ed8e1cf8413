"""Bundles with int8 matmuls: tokens, memory estimates, TensorRT graphs, and supported providers."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import onnx
import pytest

from lantern_rt import Pipeline, open_bundle
from lantern_rt.bundle.onnx_scan import read_graph_weights
from lantern_rt.engines.build import write_engine_graphs
from lantern_rt.engines.loader import choose_providers
from lantern_rt.engines.ort.providers import ProviderChoice
from lantern_rt.engines.precisions import check_matmul_support
from lantern_rt.engines.profiles import BuildOptions
from lantern_rt.errors import RequestError
from lantern_rt.memory import count_weight_bytes

PROMPT_EMBEDDINGS = np.random.default_rng(1).normal(size=(4, 6, 32)).astype(np.float32)
METHODS = ["eagle:tree=mc-25", "eagle:tree=dynamic-16", "sjd:window=3", "sjd:window=15", None]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_exact_methods_generate_the_tokens_of_ar_with_int8(t2i_products_bundle: Path, temperature: float) -> None:
    pipe = Pipeline.from_bundle(t2i_products_bundle)
    request = {"embeddings": PROMPT_EMBEDDINGS, "temperature": temperature, "seed": [5, 6, 7, 8]}
    expected = pipe(**request, method="ar").codes
    alone = pipe(embeddings=PROMPT_EMBEDDINGS[2:3], temperature=temperature, seed=7, method="ar").codes
    np.testing.assert_array_equal(alone[0], expected[2])
    for method in METHODS:
        np.testing.assert_array_equal(pipe(**request, method=method).codes, expected)


def test_near_equal_logits_of_int8_bundles_need_no_recomputation(t2i_products_bundle: Path) -> None:
    assert Pipeline.from_bundle(t2i_products_bundle).engines.rounding_bound == 0.0


def test_the_memory_estimate_of_int8_weights_is_their_file_size(t2i_products_bundle: Path) -> None:
    bundle = open_bundle(t2i_products_bundle)
    stored = sum(entry.bytes for role, entry in bundle.manifest.files.items() if role in ("target", "target.data"))
    assert count_weight_bytes(bundle, "target") == stored


def test_float_weights_are_counted_as_float32_in_memory(float_scenes_bundle: Path) -> None:
    bundle = open_bundle(float_scenes_bundle)
    stored = read_graph_weights(bundle.path("target")).values()
    assert {weight.dtype for weight in stored} >= {"float16", "float32"}
    assert count_weight_bytes(bundle, "target") == 4 * sum(prod(weight.shape) for weight in stored if weight.dtype)


def test_tensorrt_graphs_dequantize_all_int8_weights(t2i_products_bundle: Path, tmp_path: Path) -> None:
    bundle = open_bundle(t2i_products_bundle)
    options = BuildOptions("tensorrt-rtx")
    _ = [*write_engine_graphs(bundle, options, tmp_path)]
    nodes = onnx.load(tmp_path / "target.onnx", load_external_data=False).graph.node
    dequantized = {node.input[0] for node in nodes if node.op_type == "DequantizeLinear"}
    stored = {name for name in read_graph_weights(bundle.path("target")) if name.endswith(".int8")}
    assert dequantized == stored
    assert len(stored) > 10


def test_int8_graphs_run_on_the_cpu_unless_requested_otherwise(t2i_products_bundle: Path) -> None:
    bundle = open_bundle(t2i_products_bundle)
    assert choose_providers(ProviderChoice(), bundle) == ProviderChoice("cpu")
    int8_decoder_bundle = replace(bundle, manifest=bundle.manifest.model_copy(update={"vq_precision": "int8"}))
    assert choose_providers(ProviderChoice("webgpu"), int8_decoder_bundle).get_provider("vq_decoder") == "cpu"
    assert (
        choose_providers(ProviderChoice("webgpu", {"vq_decoder": "cuda"}), int8_decoder_bundle).get_provider(
            "vq_decoder"
        )
        == "cuda"
    )


def test_providers_without_quantized_matmuls_are_rejected(t2i_products_bundle: Path) -> None:
    bundle = open_bundle(t2i_products_bundle)
    with pytest.raises(RequestError):
        check_matmul_support(bundle, "onnxruntime-openvino")
    check_matmul_support(bundle, "onnxruntime-cuda")
    target = bundle.manifest.target
    target = target.model_copy(update={"precision": "int4-weights", "dtype": "bfloat16"})
    bfloat16_bundle = replace(bundle, manifest=bundle.manifest.model_copy(update={"target": target, "drafter": None}))
    check_matmul_support(bfloat16_bundle, "tensorrt-rtx")
    with pytest.raises(RequestError, match="bfloat16"):
        check_matmul_support(bfloat16_bundle, "onnxruntime-cuda")
