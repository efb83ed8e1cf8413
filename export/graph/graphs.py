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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..checkpoints.deferred import computed, deferred
from ..models.decoder import Decoder
from .decoder_graph import cache_values, node_values, write_target
from .onnx_ops import IR_VERSION, OPSET, Ops, Value
from .precision import Rule
from .weight_file import GraphFile, graph_file, half_graph_file

HIDDEN = -1e9
HALF_TOLERANCE = 2e-2  # of a tensor's largest value, for graphs that compute in float16; see docs/exporting.md

_LONGEST_CASE = 128  # nodes of a check: longer prefixes show nothing new
_CASE_BYTES = 1 << 24  # of one row's keys and values in a check: the checks of a large model are shorter

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
    case is the one a traced module is traced with: give it sizes other than 0 and 1 on the named axes. Large
    graphs are compared on the first and the last case only.
    `tolerance`: how far outputs may lie from the module's, as `check_parity` takes it; more than usual for a deep
    module that rounding alone moves that far. `half`: it computes in float16; cases and module stay float32.
    """

    role: str
    module: nn.Module
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    cases: tuple[Case, ...]
    write: Callable[[Ops], None] | None = None
    tolerance: float = 1e-4
    half: bool = False


def in_half(graph: Graph) -> Graph:
    """A decoder's graph as one that computes in float16: inputs, weights and outputs, but for norms and logits."""
    assert graph.write is not None

    def halved(values: tuple[Value, ...]) -> tuple[Value, ...]:
        return tuple(replace(v, dtype="float16") if v.dtype == "float32" and v.name != "logits" else v for v in values)

    inputs, outputs = halved(graph.inputs), halved(graph.outputs)
    return replace(graph, inputs=inputs, outputs=outputs, half=True, tolerance=HALF_TOLERANCE)


def plan_graph(graph: Graph, rule: Rule = "fp32") -> GraphFile:
    """Describe a graph's files without writing them; no weight is read for it."""
    if graph.write is None:
        model, weights = _trace(graph)
        return graph_file(model, weights, set(weights), set(), rule)
    ops = Ops(half=graph.half)
    graph.write(ops)
    names = graph.module.state_dict().keys()
    own = names | {name.partition(".")[2] for name in names}  # the module may wrap what the graph is written from
    matrices = {name for name in ops.matrices if not name.startswith("head.")}  # a head stays float16 at the least
    model = ops.model(graph.role, graph.inputs, graph.outputs)
    if graph.half:
        return half_graph_file(model, ops.weights, ops.wide)
    return graph_file(model, ops.weights, own, matrices, rule)


def write_graph(graph: Graph, folder: Path, rule: Rule = "fp32") -> list[Path]:
    """Write `<role>.onnx`, and `<role>.onnx.data` if it has more than a megabyte of weights."""
    return plan_graph(graph, rule).write(folder / f"{graph.role}.onnx")


def target_graph(decoder: Decoder, code_embeddings: Tensor) -> Graph:
    """The graph of a decoder; `code_embeddings [codes, width]` serve as inputs of the checks."""
    config = decoder.config
    past, new = cache_values(config.num_layers, config.num_kv_heads, config.head_dim)

    def inputs(generator: np.random.Generator, rows: int, nodes: int) -> Arrays:
        chosen = generator.integers(len(code_embeddings), size=(rows, nodes))
        return {"input_embeds": code_embeddings[torch.from_numpy(chosen)].float().numpy()}

    return Graph(
        role="target",
        module=Flat(decoder),
        inputs=(Value("input_embeds", ("rows", "nodes", config.hidden_size)), *node_values(), *past),
        outputs=(*decoder_outputs(config.vocab_size, config.hidden_size), *new),
        cases=tuple(decoder_cases(inputs, past, config.positions, max(config.prefix, 2))),
        write=lambda ops: write_target(ops, decoder),
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
    entry = 4 * sum(int(np.prod([int(axis) for axis in value.axes[2:]])) for value in past)
    prefix = min(prefix, _LONGEST_CASE, max(2, _CASE_BYTES // entry))

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
    yield case("three rows, causal", 3, [prefix + 1, 1, prefix], causal)
    yield case("rows of different length", 2, [prefix, prefix + 4], tree)


def _trace(graph: Graph) -> tuple[onnx.ModelProto, dict[str, Tensor]]:
    """The graph of a module, and its weights by name: the module's own tensors, not copies."""
    example = tuple(torch.from_numpy(graph.cases[0].inputs[value.name]) for value in graph.inputs)
    axes = {
        value.name: {i: axis for i, axis in enumerate(value.axes) if isinstance(axis, str)}
        for value in (*graph.inputs, *graph.outputs)
    }
    own = graph.module.state_dict()
    buffer = io.BytesIO()
    with warnings.catch_warnings(), torch.no_grad(), _hollow(graph.module):
        warnings.simplefilter("ignore")  # the exporter announces its successor, and the tracer constant sizes
        torch.onnx.export(
            graph.module,
            example,
            buffer,  # type: ignore[arg-type]  # the annotation knows paths only
            input_names=[value.name for value in graph.inputs],
            output_names=[value.name for value in graph.outputs],
            dynamic_axes=axes,
            opset_version=OPSET,
            export_params=False,
            do_constant_folding=False,  # it would need the weights; runtimes do it when they load
            dynamo=False,
        )
    model = onnx.load_from_string(buffer.getvalue())
    model.ir_version, model.producer_name, model.producer_version = IR_VERSION, "lantern-rt", ""
    model.graph.name = graph.role
    inputs = {value.name for value in graph.inputs}
    weights = {entry.name: own[entry.name] for entry in model.graph.input if entry.name not in inputs}
    for entries, values in ((model.graph.input, graph.inputs), (model.graph.output, graph.outputs)):
        del entries[:]  # as declared: the tracer guesses output sizes from the example
        entries.extend(value.proto() for value in values)
    del model.graph.value_info[:]
    _fold_transposes(model, weights)
    return model, weights


@contextmanager
def _hollow(module: nn.Module) -> Iterator[None]:
    """The module with float32 weights of the right shapes that take no memory: enough to trace it.

    Each holds a number of its own: the exporter takes equal weights for one.
    """
    kept: list[tuple[dict[str, Any], str, Tensor]] = []
    hollow: dict[int, Tensor] = {}  # a tensor that two modules share stays shared
    for part in module.modules():
        both: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for own in both:
            for name, value in own.items():
                if value is not None and value.is_floating_point() and name not in part._non_persistent_buffers_set:
                    kept.append((own, name, value))
                    empty = hollow.setdefault(id(value), torch.tensor(1e-6 * len(kept)).expand(value.shape))
                    own[name] = nn.Parameter(empty, requires_grad=False) if own is part._parameters else empty
    try:
        yield
    finally:
        for own, name, value in kept:
            own[name] = value


def _fold_transposes(model: onnx.ModelProto, weights: dict[str, Tensor]) -> None:
    """Store a weight transposed where the graph only ever transposes it; drop weights' second names."""
    names: dict[str, str] = {}  # second name -> weight
    uses = Counter(name for node in model.graph.node for name in node.input)
    kept = []
    for node in model.graph.node:
        source = names.get(node.input[0], node.input[0]) if node.input else ""
        if source in weights and node.op_type == "Identity":
            names[node.output[0]] = source
            uses[source] += uses[node.output[0]] - 1
        elif source in weights and node.op_type == "Transpose" and uses[source] == 1:
            (axes,) = (tuple(attribute.ints) for attribute in node.attribute)
            names[node.output[0]] = source
            weights[source] = _permuted(weights[source], axes)
        else:
            kept.append(node)
    for node in kept:
        for i, name in enumerate(node.input):
            node.input[i] = names.get(name, name)
    del model.graph.node[:]
    model.graph.node.extend(kept)


def _permuted(weight: Tensor, axes: tuple[int, ...]) -> Tensor:
    return deferred(lambda: computed(weight).permute(axes), [weight.shape[axis] for axis in axes], weight.dtype)
