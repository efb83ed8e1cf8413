"""What a graph file is made from: a torch module, its inputs and outputs by name, and inputs to check it with.

The two decoders bring their own writer (`decoder_graph.py`). Any other module is traced with PyTorch's
TorchScript-based exporter: on these modules it takes a twentieth of the time of the newer one and gives the
same ops; `parity.py` holds either kind against the module.

Masks of graphs are additive; `HIDDEN` is what hides a column. It is finite so that a node that sees nothing
gets finite numbers instead of NaN.

Does not know checkpoints, manifests or what the tensors mean to a runtime.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from .decoder import Decoder
from .decoder_graph import cache_values, node_values, write_target
from .onnx_ops import IR_VERSION, OPSET, Ops, Value, halve_weights, save_model, take_weights

HIDDEN = -1e9

_LONGEST_CASE = 128  # nodes of a check: longer prefixes show nothing new

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Case:
    """Inputs for one run of a graph, under a name for messages."""

    name: str
    inputs: Arrays


@dataclass(frozen=True)
class Graph:
    """One graph of a bundle.

    `module` takes the inputs in order and returns the outputs in order (one tensor or a tuple). The first
    case is the one a traced module is traced with: give it sizes other than 0 and 1 on the named axes.
    `tolerance`: how far outputs may lie from the module's, as `check_parity` takes it; more than usual for a deep
    module that rounding alone moves that far.
    """

    role: str
    module: nn.Module
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    cases: tuple[Case, ...]
    write: Callable[[], Ops] | None = None
    tolerance: float = 1e-4


def write_graph(graph: Graph, folder: Path, halve: bool = False) -> list[Path]:
    """Write `<role>.onnx`, and `<role>.onnx.data` if it has more than a megabyte of weights.

    `halve`: store weights that float16 holds without loss in that format.
    """
    if graph.write is None:
        model = _trace(graph)
        weights = take_weights(model)
    else:
        ops = graph.write()
        model, weights = ops.model(graph.role, graph.inputs, graph.outputs), ops.weights
    if halve:
        weights = halve_weights(model, weights)
    return save_model(model, weights, folder / f"{graph.role}.onnx")


def run_module(graph: Graph, inputs: Arrays) -> list[NDArray[Any]]:
    """The module's outputs for a case, as arrays in the order of `graph.outputs`."""
    with torch.no_grad():
        result = graph.module(*(torch.from_numpy(inputs[value.name]) for value in graph.inputs))
    return [tensor.numpy() for tensor in ((result,) if isinstance(result, Tensor) else result)]


def target_graph(decoder: Decoder, code_embeddings: Tensor) -> Graph:
    """The graph of a decoder; `code_embeddings [codes, width]` serve as inputs of the checks."""
    config = decoder.config
    past, new = cache_values(config.layers, config.kv_heads, config.head_width)

    def inputs(generator: np.random.Generator, rows: int, nodes: int) -> Arrays:
        chosen = generator.integers(len(code_embeddings), size=(rows, nodes))
        return {"input_embeds": code_embeddings[torch.from_numpy(chosen)].numpy()}

    return Graph(
        role="target",
        module=Flat(decoder),
        inputs=(Value("input_embeds", ("rows", "nodes", config.width)), *node_values(), *past),
        outputs=(*decoder_outputs(config.vocabulary, config.width), *new),
        cases=tuple(decoder_cases(inputs, past, config.positions, max(config.prefix, 2))),
        write=lambda: write_target(decoder),
    )


def decoder_outputs(vocabulary: int, width: int) -> tuple[Value, Value]:
    """The outputs of both decoders that are not cache."""
    return Value("logits", ("rows", "nodes", vocabulary)), Value("hidden_states", ("rows", "nodes", width))


class Flat(nn.Module):
    """A decoder whose past and new keys and values are plain arguments and results."""

    def __init__(self, decoder: nn.Module, leading: int = 3) -> None:
        super().__init__()
        self.decoder, self.leading = decoder, leading

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        past = values[self.leading :]
        pairs = list(zip(past[::2], past[1::2], strict=True))
        logits, hidden, fresh = self.decoder(*values[: self.leading], pairs)
        return logits, hidden, *(tensor for pair in fresh for tensor in pair)


def decoder_cases(
    inputs: Callable[[np.random.Generator, int, int], Arrays], past: list[Value], positions: int, prefix: int
) -> Iterable[Case]:
    """Checks of a decoder: prefill on nothing, prefill, one node, a tree, two rows of different length."""
    generator = np.random.default_rng(0)
    prefix = min(prefix, _LONGEST_CASE)

    def case(name: str, rows: int, spans: list[int], visible: NDArray[np.bool_]) -> Case:
        """`spans`: committed entries per row; `visible [nodes, nodes]` among the new nodes."""
        nodes, longest = len(visible), max(spans)
        before = np.arange(longest) < np.array(spans)[:, None]  # [rows, longest]
        seen = np.concatenate(
            [np.broadcast_to(before[:, None], (rows, nodes, longest)), np.broadcast_to(visible, (rows, nodes, nodes))],
            2,
        )
        depth = visible.sum(1) - 1
        values = inputs(generator, rows, nodes)
        values["position_ids"] = np.minimum(np.array(spans)[:, None] + depth, positions - 1).astype(np.int64)
        values["attention_mask"] = np.where(seen, 0, HIDDEN).astype(np.float32)[:, None]
        for value in past:
            heads, width = (int(axis) for axis in value.axes[2:])
            values[value.name] = generator.standard_normal((longest, rows, heads, width), dtype=np.float32)
        return Case(name, values)

    parents = np.array([-1, 0, 0, 1, 1, 2, 3])
    tree = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        tree[node] |= tree[parent] if parent >= 0 else False
    causal = np.tril(np.ones((prefix, prefix), bool))
    yield case("prefill", 2, [0, 0], causal)
    yield case("one node", 2, [prefix + 3] * 2, np.ones((1, 1), bool))
    yield case("tree", 2, [prefix + 2] * 2, tree)
    yield case("rows of different length", 2, [prefix, prefix + 4], tree)
    yield case("three rows, causal", 3, [prefix + 1, 1, prefix], causal)


def _trace(graph: Graph) -> onnx.ModelProto:
    example = tuple(torch.from_numpy(graph.cases[0].inputs[value.name]) for value in graph.inputs)
    axes = {
        value.name: {i: axis for i, axis in enumerate(value.axes) if isinstance(axis, str)}
        for value in (*graph.inputs, *graph.outputs)
    }
    buffer = io.BytesIO()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # the exporter announces its successor, and the tracer constant sizes
        torch.onnx.export(
            graph.module,
            example,
            buffer,  # type: ignore[arg-type]  # the annotation knows paths only
            input_names=[value.name for value in graph.inputs],
            output_names=[value.name for value in graph.outputs],
            dynamic_axes=axes,
            opset_version=OPSET,
            dynamo=False,
        )
    model = onnx.load_from_string(buffer.getvalue())
    model.ir_version, model.producer_name, model.producer_version = IR_VERSION, "lantern-rt", ""
    model.graph.name = graph.role
    for entries, values in ((model.graph.input, graph.inputs), (model.graph.output, graph.outputs)):
        del entries[:]  # as declared: the tracer guesses output sizes from the example
        entries.extend(value.proto() for value in values)
    del model.graph.value_info[:]
    return model
