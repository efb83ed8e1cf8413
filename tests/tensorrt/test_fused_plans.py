"""Layers of TensorRT-RTX engines of decoders: the builder must fuse operations and write the KV cache in place."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lantern_rt.bundle.manifest import DecoderSizes
from lantern_rt.engines.device_graph import DeviceGraphOptions, make_device_graph
from lantern_rt.engines.profiles import ShapeProfile
from lantern_rt.engines.trt.builder import make_shape_bounds

for module in ("torch", "tensorrt_rtx"):
    pytest.importorskip(module, reason="needs lantern-rt[export,tensorrt-rtx]")

COLUMNS = 448  # columns of the KV cache
TREE_PROFILE = ShapeProfile(name="tree", rows=(1, 2, 8), nodes=(2, 16, 64), columns=(64, 320, COLUMNS))
_LAYER_PATTERN = re.compile(
    r"Name: (.*?), LayerType: (\w+), Inputs: \[(.*?)\], Constants: .*?, Outputs: \[(.*?)\], Tac"
)
_TENSOR_PATTERN = re.compile(r"\{ Name: (\S+), ")
_KINDS_WITHOUT_WORK = ("shape_call", "signal", "wait")  # kinds of layers that compute nothing on the device


class EngineLayer(NamedTuple):
    name: str
    kind: str
    inputs: list[str]
    outputs: list[str]


def write_decoder(
    folder: Path, num_layers: int, compute_dtype: str, weight_precision: str, is_drafter: bool
) -> tuple[Path, DecoderSizes]:
    import torch
    from tiny_graphs import write_graph

    from lantern_rt.export.graph.graphs import convert_to_float16, make_target_graph
    from lantern_rt.export.models.decoder import Decoder, DecoderConfig
    from lantern_rt.export.models.eagle import EagleDrafter, make_drafter_graph

    config = DecoderConfig(1280, num_layers, 20, 20, 3584, vocab_size=512, grid=16, prefix=120)
    torch.manual_seed(0)
    spec: DecoderSizes
    if is_drafter:
        head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        drafter_config = replace(config, final_norm=False, input_norm=False)
        graph = make_drafter_graph(EagleDrafter(drafter_config, head, bias=True).eval())
        spec = drafter_config.make_drafter_spec()
    else:
        graph = make_target_graph(Decoder(config).eval(), torch.zeros(4, config.hidden_size))
        spec = config.make_target_spec()
    written_graph: Any = (
        convert_to_float16(graph) if compute_dtype == "float16" else replace(graph, compute_type=compute_dtype)
    )
    path = write_graph(written_graph, folder, weight_precision)  # type: ignore[arg-type]
    return path, spec


def build_engine_layers(path: Path, spec: DecoderSizes, compute_dtype: str) -> list[EngineLayer]:
    import tensorrt_rtx as library

    messages: list[str] = []

    class Logger(library.ILogger):  # type: ignore[misc]
        def log(self, severity: Any, message: str) -> None:
            messages.append(message)

    builder = library.Builder(logger := Logger())
    network = builder.create_network(0)
    graph = make_device_graph(path, spec, DeviceGraphOptions(compute_dtype, capacity=COLUMNS))
    parser = library.OnnxParser(network, logger)
    assert parser.parse(graph.model_bytes, str(path)), messages[-3:]
    for layer in map(network.get_layer, range(network.num_layers)):
        if layer.type == library.LayerType.ATTENTION_INPUT:
            layer.__class__ = library.IAttentionInputLayer
            layer.attention.decomposable = True  # Polygraphy sets this, too, for shapes without a fused kernel
    config = builder.create_builder_config()
    config.profiling_verbosity = library.ProfilingVerbosity.DETAILED
    config.clear_flag(library.BuilderFlag.TF32)
    config.num_compute_capabilities = 1
    config.set_compute_capability(library.ComputeCapability.SM89, 0)
    optimization_profile = builder.create_optimization_profile()
    for tensor in graph.inputs:
        optimization_profile.set_shape(
            tensor.name, *make_shape_bounds(tensor.name, tensor.shape, TREE_PROFILE, max_entries=512)
        )
    config.add_optimization_profile(optimization_profile)
    assert builder.build_serialized_network(network, config) is not None, messages[-3:]
    lines = [line for text in messages if text.startswith("Layers:\n") for line in text.splitlines()]
    matches = filter(None, map(_LAYER_PATTERN.match, lines))
    layers = [EngineLayer(match[1], match[2], *map(_TENSOR_PATTERN.findall, match.group(3, 4))) for match in matches]
    assert layers, "the builder's list of layers has another format"
    # Layers of these kinds are computed when the engine is loaded, if all inputs are internal tensors of the builder.
    view_kinds = {"reshape", "cast"}
    working_layers = [layer for layer in layers if layer.kind not in _KINDS_WITHOUT_WORK]
    return [
        layer
        for layer in working_layers
        if layer.kind not in view_kinds or not all("mye" in name for name in layer.inputs)
    ]


def find_cache_copies(layers: list[EngineLayer]) -> list[EngineLayer]:
    copying_operations = {"Conc", "Move", "Mul", "Repl", "Resh", "Slic", "Tran"}
    copying_layers = []
    for layer in layers:
        fused_name = re.fullmatch(r"__myl_((?:[A-Z][a-z]+)+)_myl.*", layer.name)
        reads_cache = any("key_values" in name for name in layer.inputs)
        if reads_cache and fused_name and set(re.findall("[A-Z][a-z]+", fused_name[1])) <= copying_operations:
            copying_layers.append(layer)
    return copying_layers


@pytest.mark.parametrize("is_drafter", [False, True], ids=["target", "drafter"])
@pytest.mark.parametrize(
    ("compute_dtype", "weight_precision", "max_layers"),
    [
        ("float16", "fp16", 12),
        ("float32", "fp32", 15),
        ("bfloat16", "bf16", 12),
        ("float16", "int4-weights", 13),
        ("bfloat16", "int4-weights", 13),
    ],
)
def test_a_decoder_layer_becomes_few_fused_layers(
    tmp_path: Path, is_drafter: bool, compute_dtype: str, weight_precision: str, max_layers: int
) -> None:
    counts = []
    for num_layers in (2, 4):
        folder = tmp_path / str(num_layers)
        folder.mkdir()
        engine_layers = build_engine_layers(
            *write_decoder(folder, num_layers, compute_dtype, weight_precision, is_drafter), compute_dtype
        )
        counts.append(len(engine_layers))
        if weight_precision == "int4-weights":
            # Matmuls dequantize the weights.
            assert sum("CastMulCastFc" in layer.name for layer in engine_layers) >= 5 * num_layers
        if compute_dtype != "float32":
            assert sum("_mha_" in layer.name for layer in engine_layers) == num_layers  # attention is one kernel
        cache_copies = find_cache_copies(engine_layers)  # the attention kernel needs a copy of the columns in use
        assert [layer.name for layer in cache_copies if "Slic" not in layer.name] == []
        assert len(cache_copies) == 2 * num_layers
    assert (counts[1] - counts[0]) / 2 <= max_layers
