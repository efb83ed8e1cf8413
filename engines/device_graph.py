"""Writer of decoder graphs in the device layout, the layout for GPUs and other devices.

The decoder graphs in a bundle are made for CPUs. They read embeddings, an attention mask, and past keys and values,
and return new keys and values. When a bundle is loaded for a device, its graphs are rewritten. The weights stay in the
files of the bundle, under the names that `export/graph/decoder_graph.py` gives them. Attention, norms and rotary
embeddings become one operator each, and the graphs have these tensors:

input | type and shape | contents
---|---|---
`token_ids` | int32 `[rows, nodes]` | rows of `embeddings` (target), or of the embedding weight (drafter)
`embeddings` | `[entries, hidden_size]` | embeddings of tokens; only a target has this input
`hidden` | `[any, any, hidden_size]` | hidden states of the target; only a drafter has this input
`hidden_ids` | int32 `[rows, nodes]` | each node's state in the flattened first two axes of `hidden`; only a drafter
`position_ids` | int64 `[rows, nodes]` |
`seen` | int32 `[rows, nodes, words]` | attention mask: bit c of word w is 1 if a node attends to column 16 w + c
`write` | int64, see below | columns to which the graph writes the keys and values of the new nodes
`past_key_values.{i}.key`, `.value` | see below | caches of layer i

The outputs are `logits` in float32, `hidden_states`, and the caches `present_key_values`, which contain the new
nodes. The caller binds `present_key_values` to the memory of `past_key_values`.

Without a capacity, the columns of a cache may be filled in any order, so that accepted nodes stay where they were
written. `write [rows, nodes, 1, 3]` is row, column and part index 0 of each node, `seen` covers all columns, and
caches are `[rows, columns, parts, part]`, with the sizes of `choose_column_part_shape`.

TensorRT engines have a capacity, and the entries of their caches are in order. The nodes of a row are written to
consecutive columns, and `write [rows]` is the first of them. `seen` may cover fewer columns. Caches are
`[rows, num_kv_heads, capacity, head_dim]`.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..bundle.decoder import EXPORT_AGAIN
from ..bundle.manifest import DecoderSizes
from ..bundle.onnx_scan import StoredTensor
from ..bundle.weights import INTEGERS, StoredWeights
from ..errors import BundleError
from ..inputs import convert_read_errors
from .columns import write_mask_unpacking
from .contracts import TensorSpec
from .decoder_tensors import declare_device_tensors, get_hidden_dtype
from .graph_writer import DecoderGraphWriter, GraphWriter, choose_column_part_shape
from .kv_cache import round_up

# Numbers that attention adds to the scores of masked columns; finite, as the softmax of infinities is NaN.
MASKED = {"float32": -1e9, "bfloat16": -1e9, "float16": -6e4}


class DeviceGraph(NamedTuple):
    """A decoder graph in the device layout."""

    model_bytes: bytes
    inputs: list[TensorSpec]
    outputs: list[TensorSpec]
    dtype: str  # type of caches; hidden states have the type `get_hidden_dtype(dtype)`


class DeviceGraphOptions(NamedTuple):
    """Options of `make_device_graph`."""

    dtype: str = "float32"  # type that the bundle's decoders compute in: float32, float16 or bfloat16
    # Whether to avoid the operators for attention, the type bfloat16 (float32 replaces it), and embedding tables in
    # float16 when the graph computes in float32.
    basic_ops_only: bool = False
    capacity: int | None = None  # number of columns of a cache with entries in order; None: entries are in any order
    max_nodes: int | None = None  # of a row in a pass; None: the number of rows of the rotary table
    use_multi_head_op: bool = False  # write the op MultiHeadAttention instead of Attention in half precision


def make_device_graph(path: Path, spec: DecoderSizes, options: DeviceGraphOptions) -> DeviceGraph:
    """Convert a target or drafter graph of a bundle to the device layout, or raise BundleError."""
    with convert_read_errors(path, "an ONNX graph", BundleError, EXPORT_AGAIN):
        weights = StoredWeights(path)
        if f"layers.{spec.num_layers}.ffn.up.weight" in weights:
            raise BundleError(field=str(path), found="more layers", expected=str(spec.num_layers), remedy=EXPORT_AGAIN)
        if options.basic_ops_only and options.dtype == "bfloat16":
            options = options._replace(dtype="float32")
        return _DeviceGraphWriter(spec, weights, options).write_graph()


class _DeviceGraphWriter(DecoderGraphWriter):
    """Writer of a decoder graph in the device layout.

    Graphs for TensorRT, which have a capacity, use opset 24 for the operator TensorScatter. Graphs for ONNX Runtime use
    operators of the domain `com.microsoft`.
    """

    weights: StoredWeights

    def __init__(self, spec: DecoderSizes, weights: StoredWeights, options: DeviceGraphOptions) -> None:
        self.capacity = options.capacity
        graph = GraphWriter({"": 23, "com.microsoft": 1} if self.capacity is None else {"": 24})
        super().__init__(graph, spec, weights, options.dtype)
        self.options = options
        self.parts = choose_column_part_shape(spec.num_kv_heads * spec.head_dim)
        self.decoded_weights: dict[str, str] = {}
        # TensorRT supports the operator Attention in float16 only. Other types use MatMul and Softmax.
        self.has_matmul_attention = options.basic_ops_only or (self.capacity is not None and not self.half)
        self.interleaved = int(self.architecture.rope_style == "interleaved")

    def write_graph(self) -> DeviceGraph:
        graph = self.graph
        spec = self.spec
        if spec.role == "drafter":
            states = graph.op("Reshape", "hidden", graph.int_vector(-1, spec.hidden_size))
            joint = [self.look_up_embeddings(), self.cast_input(graph.op("Gather", states, "hidden_ids"))]
            x = self.write_linear(graph.op("Concat", *joint, axis=-1), "fc")
        else:
            x = self.cast_input(graph.op("Gather", "embeddings", "token_ids"))
        self.attention_mask = self.write_attention_mask()
        self.rotations = self.write_rotary_operands()
        self.write_indices = graph.write_column_part_indices("write", self.parts[0]) if self.capacity is None else ""
        self.write_decoder(x)
        inputs, outputs = declare_device_tensors(spec, (self.dtype,), self.capacity)
        return DeviceGraph(graph.to_bytes(inputs, outputs), inputs, outputs, self.dtype)

    def split_and_rotate_qkv(self, qkv: str, layer_name: str) -> tuple[str, str, str]:
        graph = self.graph
        num_kv_heads = self.spec.num_kv_heads
        width = num_kv_heads * self.spec.head_dim
        parts = self.kv_group_size + 2  # queries, in `kv_group_size` parts as wide as the keys; keys; values
        epsilon = self.architecture.head_norm_eps
        if epsilon is not None:
            sizes = graph.int_vector((parts - 1) * width, width)
            query_key, value = graph.add_node(
                "Split", [qkv, sizes], [f"{layer_name}.unturned", f"{layer_name}.value"], axis=-1
            )
            norm_name = f"{layer_name}.attention.head_norm"
            query_key = self.normalize_heads(query_key, norm_name, self.num_heads + num_kv_heads, epsilon)
            qkv = graph.op("Concat", query_key, value, axis=-1)
        # Parts become nodes, [rows, nodes * parts, width], so that one op rotates all parts. The angle of values is 0.
        split = graph.reshape(qkv, 0, -1, width)
        for rotation in self.rotations:
            split = graph.op("RotaryEmbedding", split, *rotation, interleaved=self.interleaved, num_heads=num_kv_heads)
        rotated = graph.reshape(split, 0, -1, parts * width)
        sizes = graph.int_vector((parts - 2) * width, width, width)
        names = [f"{layer_name}.query", f"{layer_name}.new_key", f"{layer_name}.new_value"]
        query, key, value = graph.add_node("Split", [rotated, sizes], names, axis=-1)
        return query, key, value

    def write_attention(self, query: str, key: str, value: str, layer_name: str) -> str:
        """Write ops that store new keys and values in the cache, and then attention, which reads the cache.

        With a capacity, nodes are written to consecutive columns, for which TensorRT has kernels. TensorRT copies the
        cache if the operator Attention has a `scale`. Therefore the scale is applied to the queries instead.
        Without a `scale`, the operator divides scores by sqrt(head_dim).
        """
        graph = self.graph
        width = self.spec.head_dim
        num_kv_heads = self.spec.num_kv_heads
        present_kv: list[str] = []
        cache = layer_name.replace("layers", "key_values")
        for name, new in ((f"{cache}.key", key), (f"{cache}.value", value)):
            if self.capacity is None:
                present = graph.scatter_column_parts(
                    f"past_{name}", self.write_indices, new, self.parts, f"present_{name}"
                )
                present_kv.append(graph.reshape(present, 0, 0, num_kv_heads * width))
            else:
                columns = self.split_heads(new, num_kv_heads)
                present = graph.op("TensorScatter", f"past_{name}", columns, "write", name=f"present_{name}", axis=2)
                # Attention reads only the columns that the mask covers; `span` is their number.
                present_kv.append(graph.op("Slice", present, graph.int_vector(0), "span", graph.int_vector(2)))
        scale = self.architecture.attention_scale
        if self.has_matmul_attention:
            return self.write_matmul_attention(query, present_kv[0], present_kv[1], scale)
        if self.capacity is None:
            return self.write_fused_attention(query, present_kv, scale)
        query = self.split_heads(query, self.num_heads)
        if scale == 1.0:  # cancels the division by sqrt(head_dim) of the operator
            query = graph.op("Mul", query, self.add_scalar_constant(width**0.5))
        return self.join_heads(graph.op("Attention", query, *present_kv, self.attention_mask))

    def write_fused_attention(self, query: str, present_kv: list[str], scale: float) -> str:
        """Write the operator Attention or MultiHeadAttention.

        Query heads that share keys are joined along the axis of nodes. Otherwise ONNX Runtime on CUDA would copy the
        keys for every query head.
        """
        graph = self.graph
        num_kv_heads = self.spec.num_kv_heads
        kv_group_size = self.kv_group_size
        width = self.spec.head_dim
        if kv_group_size > 1:
            # [rows, nodes, num_kv_heads * group * width] to [rows, group * nodes, num_kv_heads * width]
            query = graph.transpose(graph.reshape(query, 0, 0, num_kv_heads, kv_group_size, width), 0, 3, 1, 2, 4)
            query = graph.reshape(query, 0, -1, num_kv_heads * width)
        if self.options.use_multi_head_op and self.half:
            inputs = query, *present_kv, "", "", self.attention_mask
            mixed = graph.op("com.microsoft.MultiHeadAttention", *inputs, num_heads=num_kv_heads, scale=scale)
        else:
            inputs = query, *present_kv, self.attention_mask
            mixed = graph.op("Attention", *inputs, q_num_heads=num_kv_heads, kv_num_heads=num_kv_heads, scale=scale)
        if kv_group_size > 1:  # back to [rows, nodes, heads * width]
            mixed = graph.transpose(graph.reshape(mixed, 0, kv_group_size, -1, num_kv_heads, width), 0, 2, 3, 1, 4)
            mixed = graph.reshape(mixed, 0, 0, self.num_heads * width)
        return mixed

    def write_matmul_attention(self, query: str, keys: str, values: str, scale: float) -> str:
        graph = self.graph
        num_kv_heads = self.spec.num_kv_heads
        query = self.split_heads(query, self.num_heads)
        if scale != 1.0:
            query = graph.op("Mul", query, self.add_scalar_constant(scale))
        if self.capacity is None:
            keys = self.split_heads(keys, num_kv_heads)
            values = self.split_heads(values, num_kv_heads)
        # scores: [rows, num_kv_heads, group * nodes, columns]; group is `kv_group_size`
        query = graph.reshape(query, 0, num_kv_heads, -1, self.spec.head_dim)
        scores = graph.op("MatMul", query, graph.transpose(keys, 0, 1, 3, 2))
        mixed = graph.op("MatMul", graph.op("Softmax", graph.op("Add", scores, self.attention_mask), axis=-1), values)
        return self.join_heads(graph.reshape(mixed, 0, self.num_heads, -1, self.spec.head_dim))

    def split_heads(self, x: str, num_heads: int) -> str:
        """Convert `[rows, nodes, num_heads * head_dim]` to `[rows, num_heads, nodes, head_dim]`."""
        return self.graph.transpose(self.graph.reshape(x, 0, 0, num_heads, self.spec.head_dim), 0, 2, 1, 3)

    def join_heads(self, x: str) -> str:
        """Convert `[rows, num_heads, nodes, head_dim]` to `[rows, nodes, num_heads * head_dim]`."""
        return self.graph.reshape(self.graph.transpose(x, 0, 2, 1, 3), 0, 0, self.num_heads * self.spec.head_dim)

    def normalize_heads(self, x: str, weight_prefix: str, num_heads: int, epsilon: float) -> str:
        """Write the norm of each head of queries and keys, in float32.

        The weight differs between heads, but the operator has one scale vector for all heads. Therefore the operator
        gets a scale filled with 1, and a Mul applies the weight.
        """
        graph = self.graph
        spec = self.spec
        x = self.to_float32(graph.reshape(x, 0, 0, num_heads, spec.head_dim))
        ones = graph.add_constant(np.ones(spec.head_dim, np.float32))
        op = "RMSNormalization" if self.architecture.rms_head_norm else "LayerNormalization"
        normed = graph.op(op, x, ones, axis=-1, epsilon=epsilon)
        scaled = graph.op("Mul", normed, self.write_weight(f"{weight_prefix}.weight"))
        if not self.architecture.rms_head_norm:
            scaled = graph.op("Add", scaled, self.write_weight(f"{weight_prefix}.bias"))
        return self.to_dtype(graph.reshape(scaled, 0, 0, num_heads * spec.head_dim))

    def write_norm(self, x: str, addend: str | None, weight: str, name: str | None) -> tuple[str, str]:
        graph = self.graph
        scale = self.to_dtype(self.write_weight(weight))
        epsilon = self.architecture.norm_eps
        if addend is not None and "com.microsoft" in graph.opset_versions:
            operands = [x, addend, scale]
            names = [name or f"{weight}.normed", "", "", f"{weight}.total"]
            op = "com.microsoft.SkipSimplifiedLayerNormalization"
            normed, *_, total = graph.add_node(op, operands, names, epsilon=epsilon)
        else:
            total = x if addend is None else graph.op("Add", x, addend)
            normed = graph.op("RMSNormalization", total, scale, name=name, axis=-1, epsilon=epsilon, stash_type=1)
        return total, normed

    def write_layer_norm(self, x: str) -> str:
        ones = self.to_dtype(self.graph.add_constant(np.ones(self.spec.hidden_size, np.float32)))
        return self.graph.op("LayerNormalization", x, ones, axis=-1, epsilon=self.architecture.norm_eps)

    def write_gelu(self, x: str) -> str:
        return self.graph.op("Gelu", x)

    def look_up_embeddings(self) -> str:
        if self.options.basic_ops_only and not self.half:  # decodes the whole table, as float16 tables must be avoided
            return self.graph.op("Gather", self.write_weight("embed.weight"), "token_ids")
        stored_weight = self.weights["embed.weight"]
        rows = self.graph.op("Gather", self.add_weight(stored_weight), "token_ids")
        return rows if stored_weight.dtype == self.dtype else self.graph.cast(rows, self.dtype)

    def cast_input(self, x: str) -> str:
        """Cast the graph input `x` to the type that the graph computes in, which differs for bfloat16 only."""
        return x if get_hidden_dtype(self.dtype) == self.dtype else self.to_dtype(x)

    def write_matmul(self, x: str, weight: str, output: str | None) -> str:
        return self.graph.op("MatMul", x, self.write_weight(weight), name=output)

    def write_weight(self, name: str) -> str:
        """Add a weight, decoded to the type that the graph computes in; a float32 weight stays float32."""
        stored_weight = self.weights[name]
        if stored_weight.name == name:  # an encoded weight is stored under another name
            return self.add_weight(stored_weight)
        if name not in self.decoded_weights:  # each weight is decoded once, even if several ops read it
            scales = self.weights[f"{name}.scales"] if stored_weight.dtype in INTEGERS else None
            self.decoded_weights[name] = (
                self.add_float_weight(stored_weight) if scales is None else self.write_dequantize(stored_weight, scales)
            )
        return self.decoded_weights[name]

    def write_dequantize(self, stored_weight: StoredTensor, stored_scale: StoredTensor) -> str:
        """Write the dequantization of an integer weight `[inputs, outputs]`.

        Scales are `[blocks of inputs, outputs]` or `[outputs]`. For scales per output, ONNX Runtime gets Cast and Mul,
        which it computes once when it loads the graph. It would run DequantizeLinear in every pass.
        """
        inputs, _ = stored_weight.shape
        count, *blocks = stored_scale.shape  # `count` is the number of blocks if the scales have two axes
        integers = self.add_weight(stored_weight)
        scales = self.add_float_weight(stored_scale)
        if blocks:
            return self.graph.op("DequantizeLinear", integers, scales, axis=0, block_size=inputs // count)
        if self.capacity is None:
            return self.graph.op("Mul", self.graph.cast(integers, self.dtype), scales)
        return self.graph.op("DequantizeLinear", integers, scales, axis=1)

    def add_float_weight(self, stored_weight: StoredTensor) -> str:
        name = self.add_weight(stored_weight)
        return name if stored_weight.dtype == self.dtype else self.graph.cast(name, self.dtype)

    def add_weight(self, stored_weight: StoredTensor) -> str:
        self.graph.weights[stored_weight.name] = stored_weight.tensor_message
        return stored_weight.name

    def write_rotary_operands(self) -> list[list[str]]:
        """Write the angle tables and angle indices that the operators RotaryEmbedding read.

        The tables in the file contain each cosine and sine twice, with the first sine negated. A node has
        `kv_group_size + 2` parts of equal width: queries, keys and values. Values are rotated by an angle of 0, which
        is added to the tables. ONNX Runtime requires at least as many angles as the longest pass has parts.

        For models with two grids, a position id is `shift * positions + row`, where `positions` is the number of rows
        of the table. The first rotation uses the angle in table row `row`. The second rotation uses the angle in table
        row `shift` with a negated sine, and so turns back.

        Returns the names of three tensors per rotation: cosines and sines, `[angles, head_dim / 2]`, and the index of
        the angle of each part, `[rows, nodes * parts]`.
        """
        graph = self.graph
        if self.architecture.rotary == "learned":
            return []
        width = self.spec.head_dim
        # Start, end and step of the table columns for the second number of each pair, whose sines are not negated.
        second = (1, width, 2) if self.interleaved else (width // 2, width, 1)
        slices = [graph.int_vector(number) for number in second]
        positions = self.weights["rotary.cos"].shape[0]
        parts = self.kv_group_size + 2
        tables = []
        for name, fill in (("rotary.cos", 1), ("rotary.sin", 0)):
            table = graph.op(
                "Slice", self.to_float32(self.write_weight(name)), *slices[:2], graph.int_vector(1), slices[2]
            )
            # At least one row is added after the table, for the angle 0: cosine 1 and sine 0.
            pads = graph.int_vector(0, 0, max(1, parts * round_up(self.options.max_nodes or positions) - positions), 0)
            tables.append(self.to_dtype(graph.op("Pad", table, pads, graph.add_constant(np.array(fill, np.float32)))))
        is_value = graph.add_constant(np.arange(parts) == parts - 1)  # values are the last part of a node
        no_angle = graph.int_vector(positions)  # the first row after the table

        def repeat_angles_per_part(angle_ids: str) -> str:  # [rows, nodes] to [rows, nodes * parts]
            angles = graph.op("Where", is_value, no_angle, graph.op("Unsqueeze", angle_ids, graph.int_vector(-1)))
            return graph.reshape(angles, 0, -1)

        if self.architecture.rotary != "grids":
            return [[*tables, repeat_angles_per_part("position_ids")]]
        cos, sin = tables
        shift = graph.op("Div", "position_ids", no_angle)
        rows = graph.op("Sub", "position_ids", graph.op("Mul", shift, no_angle))
        return [[cos, sin, repeat_angles_per_part(rows)], [cos, graph.op("Neg", sin), repeat_angles_per_part(shift)]]

    def write_attention_mask(self) -> str:
        """Write ops that unpack `seen` to numbers that are added to scores, `[rows, 1, nodes, columns]`.

        Query heads that share keys are joined along the axis of nodes, so the mask is repeated along this axis. The
        operator Attention of TensorRT is an exception, as this operator reads separate query heads.
        """
        graph = self.graph
        addend = write_mask_unpacking(graph, "seen", MASKED[self.dtype])
        if self.capacity is not None:
            graph.op("Shape", addend, name="span", start=2, end=3)
        mask = self.to_dtype(graph.op("Unsqueeze", addend, graph.int_vector(1)))
        return self.write_tiled_mask(mask) if self.has_matmul_attention or self.capacity is None else mask
