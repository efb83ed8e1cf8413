"""What a graph file is made from: a torch module, its inputs and outputs by name, and inputs to check it with.

The decoders and the large conditions bring their own writer; any other module is traced. `check_parity`
holds either kind against the module. Masks of graphs are additive; `HIDDEN` is what hides a column. It is finite so
that a node that sees nothing gets finite numbers instead of NaN.
"""

from __future__ import annotations

import io
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from ...runtime.tree import DraftTree
from ..checkpoints.deferred import permuted
from ..models.decoder import Decoder, DecoderConfig, LayerStack
from .decoder_graph import PastFirstWriter
from .graph_file import GraphFile
from .onnx_ops import IR_VERSION, OPSET, Ops, Value
from .precision import Compute, Rule, choose_storages

HIDDEN = -1e9
HALF_TOLERANCE = 2e-2  # of a tensor's largest value, for graphs that compute in float16; see docs/exporting.md

_LONGEST_CASE = 128  # nodes of a check: longer prefixes show nothing new
_NUMBERS = 1 << 20  # of one row's keys and values, or logits, in a check: those of a large model are shorter

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Graph:
    """One graph of a bundle.

    `module` takes the inputs in order and returns the outputs in order (one tensor or a tuple). `cases`: inputs to
    check it with, by names for messages; a module without `write` is traced with the first: give it sizes other than
    0 and 1 on the named axes. Large graphs are compared on the first and the last only. `tolerance`: how far outputs
    may lie from the module's, None for as far as rounding to float32 brings them. `compute`: what it computes in; cases
    and module stay float32.
    """

    role: str
    module: nn.Module
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    cases: Mapping[str, Arrays]
    write: Callable[[Ops], None] | None = None
    tolerance: float | None = 1e-4
    compute: Compute = "float32"


def in_half(graph: Graph) -> Graph:
    """A decoder's graph as one that computes in float16: inputs, weights and outputs, but for norms and logits."""

    def halved(values: tuple[Value, ...]) -> tuple[Value, ...]:
        return tuple(replace(v, dtype="float16") if v.dtype == "float32" and v.name != "logits" else v for v in values)

    inputs, outputs = halved(graph.inputs), halved(graph.outputs)
    return replace(graph, inputs=inputs, outputs=outputs, compute="float16", tolerance=HALF_TOLERANCE)


def plan_graph(graph: Graph, rule: Rule = "fp32") -> GraphFile:
    """Describe a graph's files without writing them; no weight is read for it."""
    if graph.write is None:
        model, weights = _trace(graph)
        storages = choose_storages(weights, set(weights), set(), rule)
        if graph.compute == "float16":
            _narrow(model)
            storages, rule = dict.fromkeys(storages, "float16"), "fp16"
        return GraphFile(model, weights, storages, set(), rule, graph.compute)
    ops = Ops(half=graph.compute == "float16", int8_matmul=rule == "int8")
    graph.write(ops)
    model = ops.model(graph.role, graph.inputs, graph.outputs)
    names = graph.module.state_dict().keys()
    own = names | {name.partition(".")[2] for name in names}  # the module may wrap what the graph is written from
    matrices = {name for name in ops.matrices if ops.int8_matmul or not name.startswith("head.")}
    storages = choose_storages(ops.weights, own, matrices, rule, graph.compute)
    if ops.half:
        narrow = {name for name, kind in storages.items() if kind == "float32"} - ops.wide
        storages |= dict.fromkeys(narrow, "float16")
        rule = "fp16"
    return GraphFile(model, ops.weights, storages, matrices, rule, graph.compute)


def write_graph(graph: Graph, folder: Path, rule: Rule = "fp32") -> list[Path]:
    """Write `<role>.onnx`, and `<role>.onnx.data` if it has more than a megabyte of weights."""
    return plan_graph(graph, rule).write(folder / f"{graph.role}.onnx")


def cases_of(*inputs: Arrays) -> dict[str, Arrays]:
    """Checks of a graph that is no decoder; the first axis of the first input counts rows."""
    return {f"{len(next(iter(arrays.values())))} rows": arrays for arrays in inputs}


def target_graph(decoder: Decoder, code_embeddings: Tensor, prefix: Tensor | None = None) -> Graph:
    """The graph of a decoder; `code_embeddings [codes, hidden_size]` serve as inputs of the checks.

    prefix: a prompt's `[nodes, hidden_size]`, for passes of as many nodes: a trained model may be far more sensitive to
    rounding on what no prompt gives.
    """

    def inputs(generator: np.random.Generator, rows: int, nodes: int) -> Arrays:
        if prefix is not None and nodes == len(prefix):
            return {"input_embeds": np.tile(prefix.numpy(), (rows, 1, 1))}
        chosen = generator.integers(len(code_embeddings), size=(rows, nodes))
        return {"input_embeds": code_embeddings[torch.from_numpy(chosen)].float().numpy()}

    embeds = Value("input_embeds", ("rows", "nodes", decoder.config.hidden_size))
    return decoder_graph(
        "target", decoder, (embeds,), inputs, lambda ops: PastFirstWriter(ops, decoder).write("input_embeds")
    )


def decoder_graph(
    role: str,
    module: LayerStack,
    leading: tuple[Value, ...],
    inputs: Callable[[np.random.Generator, int, int], Arrays],
    write: Callable[[Ops], None],
) -> Graph:
    """The graph of a target or drafter with a cache; leading: what it takes besides positions, mask and past.

    inputs: random arrays for `leading`, of so many rows and nodes.
    """
    config = module.config
    parts = [f"{i}.{part}" for i in range(config.num_layers) for part in ("key", "value")]
    heads = (config.num_kv_heads, config.head_dim)
    past = tuple(Value(f"past_key_values.{part}", ("past", "rows", *heads)) for part in parts)
    new = (Value(f"new_key_values.{part}", ("nodes", "rows", *heads)) for part in parts)
    positions = Value("position_ids", ("rows", "nodes"), "int64")
    logits = Value("logits", ("rows", "nodes", config.vocab_size))
    return Graph(
        role=role,
        module=module,
        inputs=(*leading, positions, Value("attention_mask", ("rows", 1, "nodes", "past + nodes")), *past),
        outputs=(logits, Value("hidden_states", ("rows", "nodes", config.hidden_size)), *new),
        cases=dict(_decoder_cases(inputs, past, config)),
        write=write,
    )


def _decoder_cases(
    inputs: Callable[[np.random.Generator, int, int], Arrays], past: Sequence[Value], config: DecoderConfig
) -> Iterator[tuple[str, Arrays]]:
    """Checks of a decoder: prefill on nothing, prefill, one node, a tree, two rows of different length."""
    generator, heads = np.random.default_rng(0), (config.num_kv_heads, config.head_dim)
    most = _NUMBERS // max(len(past) * math.prod(heads), config.vocab_size)
    prefix = max(2, min(config.prefix, _LONGEST_CASE, most))

    def case(name: str, lengths: list[int], visible: NDArray[np.bool_]) -> tuple[str, Arrays]:
        """`lengths`: committed entries per row; `visible [nodes, nodes]` among the new nodes."""
        rows, nodes, longest, length = len(lengths), len(visible), max(lengths), np.array(lengths)[:, None]
        seen = np.zeros((rows, nodes, longest + nodes), bool)
        seen[:, :, :longest], seen[:, :, longest:] = (np.arange(longest) < length)[:, None], visible
        values = inputs(generator, rows, nodes)
        values["position_ids"] = np.minimum(length + visible.sum(1) - 1, config.positions - 1).astype(np.int64)
        values["attention_mask"] = np.where(seen, 0, HIDDEN).astype(np.float32)[:, None]
        for value in past:
            values[value.name] = generator.standard_normal((longest, rows, *heads), dtype=np.float32)
        return name, values

    tree = tree_mask((-1, 0, 0, 1, 1, 2, 3))
    causal = np.tri(prefix, dtype=bool)
    yield case("prefill", [0, 0], causal)
    yield case("one node", [prefix + 3] * 2, np.ones((1, 1), bool))
    yield case("tree", [prefix + 2] * 2, tree)
    yield case("three rows, causal", [prefix + 1, 1, prefix], causal)
    yield case("rows of different length", [prefix, prefix + 4], tree)


def tree_mask(parents: Sequence[int]) -> NDArray[np.bool_]:
    """Return the attention mask of a draft tree, `[nodes, nodes]`: each node sees itself and its ancestors.

    parents: index of each node's parent, -1 for the root.
    """
    return DraftTree(np.zeros(len(parents), np.int64), np.array(parents)).structure.ancestors


def _trace(graph: Graph) -> tuple[onnx.ModelProto, dict[str, Tensor]]:
    """A module of float32 weights as ONNX, and its weights by name: the module's own tensors, not copies.

    By PyTorch's TorchScript-based exporter: on these modules it takes a twentieth of the time of the newer one and
    gives the same ops.
    """
    values, example = (*graph.inputs, *graph.outputs), next(iter(graph.cases.values()))
    buffer = io.BytesIO()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # the exporter announces its successor, and the tracer constant sizes
        torch.onnx.export(
            graph.module.eval(),  # or the exporter would leave all of it in training mode, if its outermost part is
            tuple(torch.from_numpy(example[value.name]) for value in graph.inputs),
            buffer,  # type: ignore[arg-type]  # the annotation knows paths only
            input_names=[value.name for value in graph.inputs],
            output_names=[value.name for value in graph.outputs],
            dynamic_axes={v.name: {i: axis for i, axis in enumerate(v.axes) if isinstance(axis, str)} for v in values},
            opset_version=OPSET,
            export_params=False,
            do_constant_folding=False,  # weights would lose their names; runtimes do it when they load
            dynamo=False,
        )
    model = onnx.load_from_string(buffer.getvalue())
    model.ir_version, model.producer_name, model.producer_version = IR_VERSION, "lantern-rt", ""
    model.graph.name = graph.role
    own, given = graph.module.state_dict(), {value.name for value in graph.inputs}
    weights = {entry.name: own[entry.name] for entry in model.graph.input if entry.name not in given}
    for entries, declared in ((model.graph.input, graph.inputs), (model.graph.output, graph.outputs)):
        del entries[:]  # as declared: the tracer guesses output sizes from the example
        entries.extend(value.proto() for value in declared)
    del model.graph.value_info[:]
    _fold_transposes(model, weights)
    return model, weights


def _narrow(model: onnx.ModelProto) -> None:
    """Have a traced graph compute in float16, but for the sums of norms, and give float32."""
    nodes, outputs = list(model.graph.node), {value.name for value in model.graph.output}
    del model.graph.node[:]
    for node in nodes:
        for each in node.attribute:
            if node.op_type == "Cast" and each.i == TensorProto.FLOAT:
                each.i = TensorProto.FLOAT16
            elif each.t.data_type == TensorProto.FLOAT and not each.t.dims:  # vectors are what norms and resizing read
                each.t.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(each.t).astype(np.float16)))
        (output,), around, norm = node.output, [node], node.op_type == "InstanceNormalization"
        if norm:
            around.insert(0, helper.make_node("Cast", node.input[:1], [f"{output}.wide"], to=TensorProto.FLOAT))
            node.input[0] = f"{output}.wide"
        if norm or output in outputs:
            node.output[0], to = f"{output}.uncast", TensorProto.FLOAT16 if norm else TensorProto.FLOAT
            around.append(helper.make_node("Cast", node.output, [output], to=to))
        model.graph.node.extend(around)


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
            weights[source] = permuted(weights[source], axes)
        else:
            kept.append(node)
    for node in kept:
        node.input[:] = [names.get(name, name) for name in node.input]
    del model.graph.node[:]
    model.graph.node.extend(kept)
