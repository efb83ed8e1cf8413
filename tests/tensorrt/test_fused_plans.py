"""What TensorRT-RTX makes of decoders, read off what its builder says: few layers, fused attention, caches in place."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lantern_rt.bundle.manifest import DecoderSpec, DrafterSpec
from lantern_rt.engines.device_graph import make_device_graph
from lantern_rt.engines.profiles import Profile
from lantern_rt.engines.trt.builder import shape_bounds

for needed in ("torch", "tensorrt_rtx"):
    pytest.importorskip(needed, reason="needs lantern-rt[export,tensorrt-rtx]")

COLUMNS = 448
TREE = Profile(name="tree", rows=(1, 2, 8), nodes=(2, 16, 64), columns=(64, 320, COLUMNS))
_LAYER = re.compile(r"Name: (.*?), LayerType: (\w+), Inputs: \[(.*?)\], Constants: .*?, Outputs: \[(.*?)\], Tac")
_TENSOR = re.compile(r"\{ Name: (\S+), ")
_NO_WORK = ("shape_call", "signal", "wait")  # kinds of layers that compute nothing on the device


class Step(NamedTuple):
    """A layer of an engine: its name, which has what it does in it, kind, and the names of its tensors."""

    name: str
    kind: str
    inputs: list[str]
    outputs: list[str]


def write_decoder(
    folder: Path, layers: int, compute: str, rule: str, drafts: bool
) -> tuple[Path, DecoderSpec | DrafterSpec]:
    """A decoder of LlamaGen-XL's widths."""
    import torch

    from lantern_rt.export.graph.graphs import convert_to_float16, target_graph, write_graph
    from lantern_rt.export.models.decoder import Decoder, DecoderConfig, decoder_fields
    from lantern_rt.export.models.eagle import EagleDrafter, drafter_graph

    config = DecoderConfig(1280, layers, 20, 20, 3584, vocab_size=512, grid=16, prefix=120)
    torch.manual_seed(0)
    spec: DecoderSpec | DrafterSpec
    if drafts:
        head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        own = replace(config, final_norm=False, input_norm=False)
        graph = drafter_graph(EagleDrafter(own, head, bias=True).eval())
        spec = DrafterSpec(**decoder_fields(own))
    else:
        graph = target_graph(Decoder(config).eval(), torch.zeros(4, config.hidden_size))
        spec = DecoderSpec(**decoder_fields(config), max_positions=config.positions)
    made: Any = convert_to_float16(graph) if compute == "float16" else replace(graph, compute=compute)
    (path, *_) = write_graph(made, folder, rule)  # type: ignore[arg-type]
    return path, spec


def steps_of(path: Path, spec: DecoderSpec | DrafterSpec, drafts: bool, compute: str) -> list[Step]:
    """The layers of the decoder's engine that work on the device."""
    import tensorrt_rtx as library

    said: list[str] = []

    class Logger(library.ILogger):  # type: ignore[misc]
        def log(self, severity: Any, message: str) -> None:
            said.append(message)

    builder = library.Builder(logger := Logger())
    network = builder.create_network(0)
    graph = make_device_graph(path, spec, drafts, compute, capacity=COLUMNS)
    parser = library.OnnxParser(network, logger)
    assert parser.parse(graph.model, str(path)), said[-3:]
    for layer in map(network.get_layer, range(network.num_layers)):
        if layer.type == library.LayerType.ATTENTION_INPUT:
            layer.__class__ = library.IAttentionInputLayer
            layer.attention.decomposable = True  # as Polygraphy marks them: allowed, where there is no kernel
    config = builder.create_builder_config()
    config.profiling_verbosity = library.ProfilingVerbosity.DETAILED
    config.clear_flag(library.BuilderFlag.TF32)
    config.num_compute_capabilities = 1
    config.set_compute_capability(library.ComputeCapability.SM89, 0)
    shapes = builder.create_optimization_profile()
    for tensor in graph.inputs:
        shapes.set_shape(tensor.name, *shape_bounds(tensor.name, tensor.shape, TREE, entries=512))
    config.add_optimization_profile(shapes)
    assert builder.build_serialized_network(network, config) is not None, said[-3:]
    lines = [line for text in said if text.startswith("Layers:\n") for line in text.splitlines()]
    found = [Step(one[1], one[2], *map(_TENSOR.findall, one.group(3, 4))) for one in map(_LAYER.match, lines) if one]
    assert found, "the builder does not list its layers any more"
    views = {
        "reshape",
        "cast",
    }  # of what is known when the engine is loaded, where only the builder's own tensors go in
    works = [step for step in found if step.kind not in _NO_WORK]
    return [step for step in works if step.kind not in views or not all("mye" in name for name in step.inputs)]


def copies_of_past(steps: list[Step]) -> list[Step]:
    """Layers that read a cache and do nothing but move what they read, perhaps times a number."""
    moving = {"Conc", "Move", "Mul", "Repl", "Resh", "Slic", "Tran"}
    found = []
    for step in steps:
        words = re.fullmatch(r"__myl_((?:[A-Z][a-z]+)+)_myl.*", step.name)
        reads = any("key_values" in name for name in step.inputs)
        if reads and words and set(re.findall("[A-Z][a-z]+", words[1])) <= moving:
            found.append(step)
    return found


@pytest.mark.parametrize("drafts", [False, True], ids=["target", "drafter"])
@pytest.mark.parametrize(
    ("compute", "rule", "most"),
    [
        ("float16", "fp16", 12),
        ("float32", "fp32", 15),
        ("bfloat16", "bf16", 12),
        ("float16", "int4-weights", 13),
        ("bfloat16", "int4-weights", 13),
    ],
)
def test_a_decoder_layer_is_few_layers_of_a_plan(
    tmp_path: Path, drafts: bool, compute: str, rule: str, most: int
) -> None:
    counts = []
    for layers in (2, 4):
        (folder := tmp_path / str(layers)).mkdir()
        steps = steps_of(*write_decoder(folder, layers, compute, rule, drafts), drafts, compute)
        counts.append(len(steps))
        if rule == "int4-weights":
            assert sum("CastMulCastFc" in step.name for step in steps) >= 5 * layers  # products turn weights back
        if compute != "float32":
            assert sum("_mha_" in step.name for step in steps) == layers  # attention is one kernel
        moved = copies_of_past(steps)  # laid out for the kernel, but only up to the last column that is seen
        assert [step.name for step in moved if "Slic" not in step.name] == []
        assert len(moved) == 2 * layers
    assert (counts[1] - counts[0]) / 2 <= most
