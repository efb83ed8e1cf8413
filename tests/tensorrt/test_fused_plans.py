"""TensorRT-RTX engines of decoders, as its builder describes them: few layers, fused attention, caches in place."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lantern_rt.bundle.manifest import DecoderSpec, DrafterSpec
from lantern_rt.engines.device_graph import make_device_graph
from lantern_rt.engines.profiles import ShapeProfile
from lantern_rt.engines.trt.builder import make_shape_bounds

for needed in ("torch", "tensorrt_rtx"):
    pytest.importorskip(needed, reason="needs lantern-rt[export,tensorrt-rtx]")

COLUMNS = 448
TREE = ShapeProfile(name="tree", rows=(1, 2, 8), nodes=(2, 16, 64), columns=(64, 320, COLUMNS))
_LAYER = re.compile(r"Name: (.*?), LayerType: (\w+), Inputs: \[(.*?)\], Constants: .*?, Outputs: \[(.*?)\], Tac")
_TENSOR = re.compile(r"\{ Name: (\S+), ")
_NO_WORK = ("shape_call", "signal", "wait")  # kinds of layers that compute nothing on the device


class EngineLayer(NamedTuple):
    """A layer of an engine: name, which describes its operations, kind, and names of its tensors."""

    name: str
    kind: str
    inputs: list[str]
    outputs: list[str]


def write_decoder(
    folder: Path, layers: int, compute: str, rule: str, drafts: bool
) -> tuple[Path, DecoderSpec | DrafterSpec]:
    """Write a decoder with the widths of LlamaGen-XL.

    Args:
        folder: folder for the graph.
        layers: number of layers.
        compute: dtype of the computation.
        rule: precision of the weights.
        drafts: whether it is a drafter.
    """
    import torch

    from lantern_rt.export.graph.graphs import convert_to_float16, make_target_graph, write_graph
    from lantern_rt.export.models.decoder import Decoder, DecoderConfig, get_decoder_spec_fields
    from lantern_rt.export.models.eagle import EagleDrafter, make_drafter_graph

    config = DecoderConfig(1280, layers, 20, 20, 3584, vocab_size=512, grid=16, prefix=120)
    torch.manual_seed(0)
    spec: DecoderSpec | DrafterSpec
    if drafts:
        head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        drafter_config = replace(config, final_norm=False, input_norm=False)
        graph = make_drafter_graph(EagleDrafter(drafter_config, head, bias=True).eval())
        spec = DrafterSpec(**get_decoder_spec_fields(drafter_config))
    else:
        graph = make_target_graph(Decoder(config).eval(), torch.zeros(4, config.hidden_size))
        spec = DecoderSpec(**get_decoder_spec_fields(config), max_positions=config.num_rope_positions)
    written_graph: Any = convert_to_float16(graph) if compute == "float16" else replace(graph, compute_type=compute)
    (path, *_) = write_graph(written_graph, folder, rule)  # type: ignore[arg-type]
    return path, spec


def build_layers(path: Path, spec: DecoderSpec | DrafterSpec, drafts: bool, compute: str) -> list[EngineLayer]:
    """Build the decoder's engine; return its layers that compute on the device."""
    import tensorrt_rtx as library

    messages: list[str] = []

    class Logger(library.ILogger):  # type: ignore[misc]
        def log(self, severity: Any, message: str) -> None:
            messages.append(message)

    builder = library.Builder(logger := Logger())
    network = builder.create_network(0)
    graph = make_device_graph(path, spec, drafts, compute, capacity=COLUMNS)
    parser = library.OnnxParser(network, logger)
    assert parser.parse(graph.model_bytes, str(path)), messages[-3:]
    for layer in map(network.get_layer, range(network.num_layers)):
        if layer.type == library.LayerType.ATTENTION_INPUT:
            layer.__class__ = library.IAttentionInputLayer
            layer.attention.decomposable = True  # as Polygraphy sets it, for shapes without a fused kernel
    config = builder.create_builder_config()
    config.profiling_verbosity = library.ProfilingVerbosity.DETAILED
    config.clear_flag(library.BuilderFlag.TF32)
    config.num_compute_capabilities = 1
    config.set_compute_capability(library.ComputeCapability.SM89, 0)
    shapes = builder.create_optimization_profile()
    for tensor in graph.inputs:
        shapes.set_shape(tensor.name, *make_shape_bounds(tensor.name, tensor.shape, TREE, max_entries=512))
    config.add_optimization_profile(shapes)
    assert builder.build_serialized_network(network, config) is not None, messages[-3:]
    lines = [line for text in messages if text.startswith("Layers:\n") for line in text.splitlines()]
    matches = filter(None, map(_LAYER.match, lines))
    layers = [EngineLayer(match[1], match[2], *map(_TENSOR.findall, match.group(3, 4))) for match in matches]
    assert layers, "the builder's list of layers has another format"
    # Layers of these kinds whose inputs are all internal tensors of the builder are computed when the engine is loaded.
    views = {"reshape", "cast"}
    computing = [layer for layer in layers if layer.kind not in _NO_WORK]
    return [layer for layer in computing if layer.kind not in views or not all("mye" in name for name in layer.inputs)]


def copies_of_past(layers: list[EngineLayer]) -> list[EngineLayer]:
    """Return the layers that only copy a cache, perhaps multiplied by a number."""
    moving = {"Conc", "Move", "Mul", "Repl", "Resh", "Slic", "Tran"}
    copying_layers = []
    for layer in layers:
        words = re.fullmatch(r"__myl_((?:[A-Z][a-z]+)+)_myl.*", layer.name)
        reads_cache = any("key_values" in name for name in layer.inputs)
        if reads_cache and words and set(re.findall("[A-Z][a-z]+", words[1])) <= moving:
            copying_layers.append(layer)
    return copying_layers


@pytest.mark.parametrize("drafts", [False, True], ids=["target", "drafter"])
@pytest.mark.parametrize(
    ("compute", "rule", "max_layers"),
    [
        ("float16", "fp16", 12),
        ("float32", "fp32", 15),
        ("bfloat16", "bf16", 12),
        ("float16", "int4-weights", 13),
        ("bfloat16", "int4-weights", 13),
    ],
)
def test_a_decoder_layer_is_few_layers_of_an_engine(
    tmp_path: Path, drafts: bool, compute: str, rule: str, max_layers: int
) -> None:
    counts = []
    for layers in (2, 4):
        folder = tmp_path / str(layers)
        folder.mkdir()
        steps = build_layers(*write_decoder(folder, layers, compute, rule, drafts), drafts, compute)
        counts.append(len(steps))
        if rule == "int4-weights":
            assert sum("CastMulCastFc" in step.name for step in steps) >= 5 * layers  # matmuls dequantize weights
        if compute != "float32":
            assert sum("_mha_" in step.name for step in steps) == layers  # attention is one kernel
        moved = copies_of_past(steps)  # copied for the kernel, but only up to the last column in use
        assert [step.name for step in moved if "Slic" not in step.name] == []
        assert len(moved) == 2 * layers
    assert (counts[1] - counts[0]) / 2 <= max_layers
