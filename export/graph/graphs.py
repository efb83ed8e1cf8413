"""Graphs before they are written: a PyTorch module, its inputs and outputs by name, and test cases.

Decoders and large conditions have a function that writes their graph; any other module is traced.
"""

from __future__ import annotations

import io
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from ...engines.contracts import TensorSpec
from ...engines.decoder_tensors import declare_host_tensors
from ...runtime.tree import DraftTree
from ..checkpoints.deferred import defer_permutation
from ..models.decoder import Decoder, DecoderConfig, LayerStack
from .decoder_graph import CPUDecoderWriter
from .graph_file import GraphFile
from .onnx_ops import IR_VERSION, OPSET, ExportGraphWriter
from .precision import ComputeType, StorageRule, choose_storage_types

# Added to the scores of masked columns. It is finite, because a node that attends to no column would get NaN.
HIDDEN = -1e9
HALF_TOLERANCE = 2e-2  # tolerance of graphs that compute in float16; see docs/exporting.md

_MAX_CASE_NODES = 128  # maximum number of nodes in a test case; longer prefixes would test nothing else
_MAX_CASE_NUMBERS = 1 << 20  # maximum count of keys and values, or of logits, per row of a test case, to save memory

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Graph:
    """Graph of a bundle, with the PyTorch module that defines its results.

    Args:
        module: PyTorch module with the same inputs and outputs; it returns one tensor or a tuple.
        test_cases: inputs on which file and module are compared, by name of the test case. Large graphs run only the
            first and the last case. A module without `write_nodes` is traced with the first case, in which every
            variable axis must have a size above 1.
        write_nodes: writes the graph; None: the module is traced.
        tolerance: maximum difference between the outputs of file and module. None: a multiple of the rounding errors in
            float32.
        compute_type: type in which the graph computes. Test cases and module stay float32.
        shared_weights: names of weights that the target has, too. The graph reads them from the target's files.
    """

    role: str
    module: nn.Module
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    test_cases: Mapping[str, Arrays]
    write_nodes: Callable[[ExportGraphWriter], None] | None = None
    tolerance: float | None = 1e-4
    compute_type: ComputeType = "float32"
    shared_weights: Set[str] = frozenset()


def convert_to_float16(graph: Graph) -> Graph:
    """Convert a decoder's inputs, weights and outputs to float16; norms and logits stay float32."""

    def convert_specs_to_float16(values: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
        return tuple(
            replace(v, dtypes=("float16",)) if v.dtypes[0] == "float32" and v.name != "logits" else v for v in values
        )

    inputs = convert_specs_to_float16(graph.inputs)
    outputs = convert_specs_to_float16(graph.outputs)
    return replace(graph, inputs=inputs, outputs=outputs, compute_type="float16", tolerance=HALF_TOLERANCE)


def make_graph_file(graph: Graph, storage_rule: StorageRule = "fp32", target: GraphFile | None = None) -> GraphFile:
    """Describe the file of a graph. No file is written, and no weight is read.

    `target` is the target's file; None: the file has all weights, also those that the graph shares with the target.
    """
    if graph.write_nodes is None:
        model, weights = _trace_module(graph)
        storage_types = choose_storage_types(weights, set(weights), set(), storage_rule)
        if graph.compute_type == "float16":
            _convert_model_to_float16(model)
            storage_types = dict.fromkeys(storage_types, "float16")
            storage_rule = "fp16"
        return GraphFile(model, weights, storage_types, set(), storage_rule, graph.compute_type)
    ops = ExportGraphWriter(is_float16=graph.compute_type == "float16", int8_matmul=storage_rule == "int8")
    graph.write_nodes(ops)
    model = ops.make_model(graph.role, graph.inputs, graph.outputs)
    names = graph.module.state_dict().keys()
    # The names also without their first part, because another module may contain the module that is written.
    stored = names | {name.partition(".")[2] for name in names}
    matrix_names = {name for name in ops.matrix_names if ops.int8_matmul or not name.startswith("head.")}
    storage_types = choose_storage_types(ops.weights, stored, matrix_names, storage_rule, graph.compute_type)
    if ops.is_float16:
        narrow = {name for name, kind in storage_types.items() if kind == "float32"} - ops.float32_names
        storage_types |= dict.fromkeys(narrow, "float16")
        storage_rule = "fp16"
    sharing = (target, graph.shared_weights)
    return GraphFile(model, ops.weights, storage_types, matrix_names, storage_rule, graph.compute_type, *sharing)


def name_test_cases(*inputs: Arrays) -> dict[str, Arrays]:
    """Name test cases by the number of batch rows, such as `2 rows`: axis 0 of their first arrays."""
    return {f"{len(next(iter(arrays.values())))} rows": arrays for arrays in inputs}


def make_target_graph(decoder: Decoder, code_embeddings: Tensor, prompt_embeddings: Tensor | None = None) -> Graph:
    """Return the graph of a target, whose test cases choose their inputs from `code_embeddings`.

    Test cases with as many nodes as a real prompt have `prompt_embeddings [nodes, hidden_size]` instead, because on
    random inputs a trained model may be far more sensitive to rounding.
    """

    def make_inputs(generator: np.random.Generator, rows: int, nodes: int) -> Arrays:
        if prompt_embeddings is not None and nodes == len(prompt_embeddings):
            return {"input_embeds": np.tile(prompt_embeddings.numpy(), (rows, 1, 1))}
        chosen = generator.integers(len(code_embeddings), size=(rows, nodes))
        return {"input_embeds": code_embeddings[torch.from_numpy(chosen)].float().numpy()}

    return make_decoder_graph(
        decoder, make_inputs, lambda ops: CPUDecoderWriter(ops, decoder).write_graph("input_embeds")
    )


def make_prefix_graph(prefix_decoder: Decoder, code_embeddings: Tensor) -> Graph:
    """Return the graph of a decoder that `load_prefix_decoder` loaded; its tensors are those of the target's graph."""
    shared_weights = prefix_decoder.state_dict().keys() - prefix_decoder.checkpoint.weights.keys()
    graph = make_target_graph(prefix_decoder, code_embeddings)
    return replace(graph, role="prefix", shared_weights=shared_weights)


def make_decoder_graph(
    module: LayerStack,
    make_inputs: Callable[[np.random.Generator, int, int], Arrays],
    write_nodes: Callable[[ExportGraphWriter], None],
) -> Graph:
    """Return the graph of a target or drafter; `make_inputs` makes the inputs before positions, for rows and nodes."""
    spec = module.make_spec()
    inputs, outputs = map(tuple, declare_host_tensors(spec))
    past = [value for value in inputs if value.name.startswith("past_")]
    cases = dict(_iter_decoder_cases(make_inputs, past, module.config))
    return Graph(spec.role, module, inputs, outputs, cases, write_nodes)


def _iter_decoder_cases(
    make_inputs: Callable[[np.random.Generator, int, int], Arrays],
    past_inputs: Sequence[TensorSpec],
    config: DecoderConfig,
) -> Iterator[tuple[str, Arrays]]:
    generator = np.random.default_rng(0)
    heads = (config.num_kv_heads, config.head_dim)
    max_nodes = _MAX_CASE_NUMBERS // max(len(past_inputs) * math.prod(heads), config.num_logits)
    prefix = max(2, min(config.prefix, _MAX_CASE_NODES, max_nodes))

    def make_test_case(name: str, past_lengths: list[int], node_mask: NDArray[np.bool_]) -> tuple[str, Arrays]:
        rows = len(past_lengths)
        nodes = len(node_mask)
        longest = max(past_lengths)
        length = np.array(past_lengths)[:, None]
        mask = np.zeros((rows, nodes, longest + nodes), bool)
        mask[:, :, :longest] = (np.arange(longest) < length)[:, None]
        mask[:, :, longest:] = node_mask
        values = make_inputs(generator, rows, nodes)
        values["position_ids"] = np.minimum(length + node_mask.sum(1) - 1, config.num_rope_positions - 1).astype(
            np.int64
        )
        values["attention_mask"] = np.where(mask, 0, HIDDEN).astype(np.float32)[:, None]
        for value in past_inputs:
            values[value.name] = generator.standard_normal((longest, rows, *heads), dtype=np.float32)
        return name, values

    tree = make_tree_mask((-1, 0, 0, 1, 1, 2, 3))
    causal = np.tri(prefix, dtype=bool)
    yield make_test_case("prefill", [0, 0], causal)
    yield make_test_case("one node", [prefix + 3] * 2, np.ones((1, 1), bool))
    yield make_test_case("tree", [prefix + 2] * 2, tree)
    yield make_test_case("three rows, causal", [prefix + 1, 1, prefix], causal)
    yield make_test_case("rows of different length", [prefix, prefix + 4], tree)
    if config.rotary == "grids":
        name, values = make_test_case("positions moved back", [prefix, 0], tree)
        values["position_ids"] += config.num_rope_positions * np.arange(len(tree))
        yield name, values
    if config.conditions:
        name, values = make_test_case("two conditions", [prefix, 0], tree)
        values["position_ids"] += config.max_sequence_length * np.array([[1], [config.conditions - 1]])
        yield name, values


def make_tree_mask(parents: Sequence[int]) -> NDArray[np.bool_]:
    """Return the attention mask of a draft tree, `[nodes, nodes]`, by the parents of its nodes; -1 for the root."""
    return DraftTree(np.zeros(len(parents), np.int64), np.array(parents)).tree_structure.ancestor_mask


def _trace_module(graph: Graph) -> tuple[onnx.ModelProto, dict[str, Tensor]]:
    values = (*graph.inputs, *graph.outputs)
    example = next(iter(graph.test_cases.values()))
    buffer = io.BytesIO()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # the exporter announces its successor, and the tracer constant sizes
        torch.onnx.export(
            graph.module.eval(),  # the exporter sets all submodules to the mode of the outermost module
            tuple(torch.from_numpy(example[value.name]) for value in graph.inputs),
            buffer,  # type: ignore[arg-type]  # the annotation knows paths only
            input_names=[value.name for value in graph.inputs],
            output_names=[value.name for value in graph.outputs],
            dynamic_axes={v.name: {i: axis for i, axis in enumerate(v.shape) if isinstance(axis, str)} for v in values},
            opset_version=OPSET,
            export_params=False,
            do_constant_folding=False,  # folding would rename weights; runtimes fold constants when they load a graph
            dynamo=False,  # the older exporter is twenty times as fast, and gives the same ops for these modules
        )
    model = onnx.load_from_string(buffer.getvalue())
    model.ir_version = IR_VERSION
    model.producer_name = "lantern-rt"
    model.producer_version = ""
    model.graph.name = graph.role
    state = graph.module.state_dict()
    input_names = {value.name for value in graph.inputs}
    weights = {entry.name: state[entry.name] for entry in model.graph.input if entry.name not in input_names}
    declared = ExportGraphWriter().make_model(graph.role, graph.inputs, graph.outputs).graph
    # The tracer guesses output sizes from the example.
    for entries, replacements in ((model.graph.input, declared.input), (model.graph.output, declared.output)):
        del entries[:]
        entries.extend(replacements)
    del model.graph.value_info[:]
    _fold_transposes(model, weights)
    return model, weights


def _convert_model_to_float16(model: onnx.ModelProto) -> None:
    """Convert a traced graph to float16; instance norms compute in float32, and outputs stay float32."""
    nodes = list(model.graph.node)
    outputs = {value.name for value in model.graph.output}
    del model.graph.node[:]
    for node in nodes:
        for attribute in node.attribute:
            tensor = attribute.t
            if node.op_type == "Cast" and attribute.i == TensorProto.FLOAT:
                attribute.i = TensorProto.FLOAT16
            elif tensor.data_type == TensorProto.FLOAT and not tensor.dims:  # norms and resizing keep float32 vectors
                tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16)))
        output, *_ = node.output
        norm = node.op_type == "InstanceNormalization"
        if norm:
            model.graph.node.append(helper.make_node("Cast", node.input[:1], [f"{output}.wide"], to=TensorProto.FLOAT))
            node.input[0] = f"{output}.wide"
        cast = norm or output in outputs
        if cast:
            node.output[0] = f"{output}.uncast"
        model.graph.node.append(node)
        if cast:
            to = TensorProto.FLOAT16 if norm else TensorProto.FLOAT
            model.graph.node.append(helper.make_node("Cast", node.output, [output], to=to))


def _fold_transposes(model: onnx.ModelProto, weights: dict[str, Tensor]) -> None:
    """Remove aliases of weights. A weight that the graph only uses transposed is stored transposed instead."""
    names: dict[str, str] = {}  # name of the weight by name of the alias
    uses = Counter(name for node in model.graph.node for name in node.input)
    remaining = []
    for node in model.graph.node:
        source = names.get(node.input[0], node.input[0]) if node.input else ""
        if source in weights and node.op_type == "Identity":
            names[node.output[0]] = source
            uses[source] += uses[node.output[0]] - 1
        elif source in weights and node.op_type == "Transpose" and uses[source] == 1:
            (axes,) = (tuple(attribute.ints) for attribute in node.attribute)
            names[node.output[0]] = source
            weights[source] = defer_permutation(weights[source], axes)
        else:
            remaining.append(node)
    for node in remaining:
        node.input[:] = [names.get(name, name) for name in node.input]
    del model.graph.node[:]
    model.graph.node.extend(remaining)
