"""Writer of ONNX graphs that does not need the onnx package, and base class of all writers of decoder graphs.

Exporters use the writer. Engines use it, too, as they make graphs when a bundle is loaded. Methods take names of
tensors as operands, and return the names of results.
"""

from __future__ import annotations

import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..bundle.manifest import DecoderSizes
from .contracts import TensorSpec

_IR_VERSION = 11  # version of the ONNX file format
# Numbers of `TensorProto.DataType`.
TYPES = {
    "float32": 1,
    "uint8": 2,
    "int8": 3,
    "int32": 6,
    "int64": 7,
    "bool": 9,
    "float16": 10,
    "float64": 11,
    "bfloat16": 16,
    "int4": 22,
}
_MAX_PART = 8  # maximum width of a part of a column
# Numbers of `AttributeProto.AttributeType`.
_FLOAT = 1
_INT = 2
_STRING = 3
_TENSOR = 4
_INTS = 7
MODULATION = ".modulation"  # end of the names of linear layers whose outputs depend only on class and position
Attribute = int | float | str | Sequence[int] | NDArray[Any]


@dataclass
class GraphWriter:
    """ONNX graph under construction. Nodes must be added in an order in which they can run."""

    opset_versions: dict[str, int] = field(default_factory=lambda: {"": 23})  # operator set versions by domain
    nodes: list[bytes] = field(default_factory=list)
    # Initializers by name, as serialized protobuf messages or in a form that a subclass defines.
    weights: dict[str, Any] = field(default_factory=dict)

    def add_node(
        self, op_type: str, inputs: Iterable[str], outputs: Sequence[str], **attributes: Attribute
    ) -> Sequence[str]:
        """Add a node with any number of outputs, and return their names; the name "" omits an optional input or output.

        An operator outside ONNX has its domain as prefix, such as `com.microsoft.Attention`.
        """
        # The numbers below are the field numbers of the messages in onnx.proto.
        domain, _, op_type = op_type.rpartition(".")
        parts = [_encode_field(1, name) for name in inputs] + [_encode_field(2, name) for name in outputs]
        parts += [_encode_field(3, outputs[0]), _encode_field(4, op_type), _encode_field(7, domain)]
        parts += [_encode_field(5, _encode_attribute(name, value)) for name, value in attributes.items()]
        self.nodes.append(b"".join(parts))
        return outputs

    def op(self, op: str, *inputs: str, name: str | None = None, **attributes: Attribute) -> str:
        """Add a node with one output, and return its name; None: a name made from the operator's name."""
        return self.add_node(op, inputs, [name or f"{op.lower()}_{len(self.nodes)}"], **attributes)[0]

    def add_constant(self, array: NDArray[Any], name: str | None = None) -> str:
        name = name or f"constant_{len(self.weights)}"
        self.weights[name] = _encode_tensor(array, name)
        return name

    def int_vector(self, *values: int) -> str:
        """Add a constant int64 vector, for axes and shapes. Equal vectors share a constant."""
        name = "ints_" + "_".join(map(str, values)).replace("-", "m")
        return name if name in self.weights else self.add_constant(np.array(values, np.int64), name)

    def cast(self, x: str, dtype: str, name: str | None = None) -> str:
        return self.op("Cast", x, name=name, to=TYPES[dtype])

    def reshape(self, x: str, *shape: int) -> str:
        """Add a Reshape node; a size of 0 keeps the size of the axis, and -1 stands for the remaining size."""
        return self.op("Reshape", x, self.int_vector(*shape))

    def transpose(self, x: str, *axes: int, name: str | None = None) -> str:
        return self.op("Transpose", x, name=name, perm=axes)

    def write_column_part_indices(self, first_part_indices: str, num_parts: int) -> str:
        """Write the indices (row, column, part) of all parts of columns, int64 `[rows, nodes, num_parts, 3]`.

        They are for `scatter_column_parts`. Those of first parts, (row, column, 0), are int64 `[rows, nodes, 1, 3]`.
        """
        # Row and column come from the first part, and the part numbers from this constant, [num_parts, 3].
        numbers = np.zeros((num_parts, 3), np.int64)
        numbers[:, 2] = np.arange(num_parts)
        is_part = self.add_constant(np.array([False, False, True]))
        return self.op("Where", is_part, self.add_constant(numbers), first_part_indices)

    def scatter_column_parts(
        self, table: str, indices: str, columns: str, part_shape: tuple[int, int], name: str
    ) -> str:
        """Write a ScatterND of `columns [rows, nodes, parts * part]` into a table `[rows, columns, parts, part]`."""
        return self.op("ScatterND", table, indices, self.reshape(columns, 0, 0, *part_shape), name=name)

    def to_bytes(self, inputs: Iterable[TensorSpec], outputs: Iterable[TensorSpec], name: str = "graph") -> bytes:
        # The numbers below are the field numbers of the messages in onnx.proto.
        parts = [_encode_field(1, node) for node in self.nodes] + [_encode_field(2, name)]
        parts += [_encode_field(5, weight) for weight in self.weights.values() if isinstance(weight, bytes)]
        parts += [_encode_field(11, _encode_value_info(tensor)) for tensor in inputs]
        parts += [_encode_field(12, _encode_value_info(tensor)) for tensor in outputs]
        opsets = [
            _encode_field(8, _encode_field(1, domain) + _encode_field(2, number))
            for domain, number in self.opset_versions.items()
        ]
        return _encode_field(1, _IR_VERSION) + _encode_field(7, b"".join(parts)) + b"".join(opsets)


class DecoderGraphWriter(ABC):
    """Base class of writers of decoder graphs.

    A subclass determines the operators of matmuls, norms and rotary embeddings, where keys and values are stored, and
    the form of `weights`. Computations except norms and logits have the type `dtype`: float32, float16 or bfloat16.
    Tensors `x` are `[rows, nodes, width]` or, in some subclasses, `[nodes, rows, width]`, and `position_ids` likewise.
    """

    def __init__(self, graph: GraphWriter, spec: DecoderSizes, weights: Mapping[str, Any], dtype: str) -> None:
        self.graph = graph
        self.spec = spec
        self.architecture = spec.architecture
        self.weights = weights
        self.dtype = dtype
        self.num_heads = spec.architecture.num_heads
        self.kv_group_size = self.num_heads // spec.num_kv_heads  # query heads that share a head of keys and values
        self.half = dtype != "float32"
        self.position_ids = "position_ids"

    def write_decoder(self, x: str) -> None:
        """Write all layers and the output heads, which write `hidden_states` and `logits`.

        With two heads, the first head reads the layer before the last, and only the second head reads the last layer.
        `hidden_states` are the states that the first head reads.
        """
        graph = self.graph
        two_heads = self.architecture.two_heads
        x, addend = (AdaptiveLayers(self) if self.architecture.conditions else self).write_layers(x)
        if two_heads and addend is not None:
            x = graph.op("Add", x, addend)
            addend = None
        # NumPy has no bfloat16, so hidden states are returned as float32.
        name = "narrow_states" if self.dtype == "bfloat16" else "hidden_states"
        norm = "norm.weight" if self.architecture.final_norm else None
        hidden = self.write_sum_and_norm(x, addend, norm, name)[1]
        if self.dtype == "bfloat16":
            graph.cast(hidden, "float32", "hidden_states")
        if two_heads:
            last = self.write_layer(x, None, self.spec.num_layers - 1)
            self.write_output_head(hidden, self.write_sum_and_norm(*last, "below_norm.weight", "states_below")[1])
        else:
            self.write_output_head(hidden)

    def write_layers(self, x: str) -> tuple[str, str | None]:
        """Write all layers before the last norm; the results are those of `write_layer`."""
        addend = None
        for i in range(self.spec.num_layers - self.architecture.two_heads):
            x, addend = self.write_layer(x, addend, i)
        return x, addend

    def write_layer(self, x: str, addend: str | None, index: int) -> tuple[str, str]:
        """Write a layer, and return the residual stream and the output of the feed-forward network.

        That output is not yet added to the residual stream, as some operators add and normalize at once. The next
        layer gets it as `addend`.
        """
        layer_name = f"layers.{index}"
        has_norm = index > 0 or self.architecture.input_norm
        x, normed = self.write_sum_and_norm(x, addend, f"{layer_name}.attention_norm.weight" if has_norm else None)
        addend = self.write_post_norm(
            self.write_attention_block(normed, layer_name), f"{layer_name}.attention_post_norm.weight"
        )
        x, normed = self.write_sum_and_norm(x, addend, f"{layer_name}.ffn_norm.weight")
        gate = self.write_linear(normed, f"{layer_name}.ffn.gate")
        up = self.write_linear(normed, f"{layer_name}.ffn.up")
        active = self.graph.op("Mul", self.write_activation(gate), up)
        return x, self.write_post_norm(
            self.write_linear(active, f"{layer_name}.ffn.down"), f"{layer_name}.ffn_post_norm.weight"
        )

    def write_activation(self, x: str) -> str:
        graph = self.graph
        inner = x
        if self.architecture.activation == "gelu-tanh":
            # (1 + tanh(y / 2)) / 2 is the sigmoid of y, so this GELU is x sigmoid(x (a + b x x)).
            a, b = (2 * math.sqrt(2 / math.pi) * factor for factor in (1, 0.044715))
            cube = graph.op("Mul", graph.op("Mul", x, x), self.add_scalar_constant(b))
            inner = graph.op("Mul", x, graph.op("Add", cube, self.add_scalar_constant(a)))
        return graph.op("Mul", x, graph.op("Sigmoid", inner))

    def write_attention_block(self, x: str, layer_name: str) -> str:
        query, key, value = self.split_and_rotate_qkv(self.write_linear(x, f"{layer_name}.attention.qkv"), layer_name)
        return self.write_linear(self.write_attention(query, key, value, layer_name), f"{layer_name}.attention.out")

    def write_output_head(self, hidden: str, hidden_for_cell_below: str | None = None) -> None:
        """Write the output heads, which compute `logits` in float32 from the hidden states of each head."""
        unlimited = "unlimited_logits" if "code_limits" in self.weights else "logits"
        name = "narrow_logits" if self.half else unlimited
        if hidden_for_cell_below is not None:
            head_logits = (
                self.write_linear(hidden, "head.right"),
                self.write_linear(hidden_for_cell_below, "head.below"),
            )
            self.graph.op("Concat", *head_logits, name=name, axis=-1)
        elif self.architecture.head_hidden:
            self.write_linear(self.write_gelu(self.write_linear(hidden, "head.first")), "head.second", name)
        else:
            self.write_linear(hidden, "head", name)
        if self.half:
            self.graph.cast(name, "float32", unlimited)
        if unlimited != "logits":
            self.write_code_limits(unlimited)

    def write_code_limits(self, logits: str) -> None:
        """Write `logits` that are limited by position; the last row of `code_limits` holds for all later positions."""
        graph = self.graph
        last = graph.int_vector(self.weights["code_limits"].shape[0] - 1)
        limits = graph.op("Gather", self.write_weight("code_limits"), graph.op("Min", "position_ids", last))
        graph.op("Min", logits, self.to_float32(limits), name="logits")

    def write_linear(self, x: str, name: str, output: str | None = None) -> str:
        """Write a linear layer. It has a bias if the weight `{name}.bias` exists."""
        has_bias = f"{name}.bias" in self.weights
        y = self.write_matmul(x, f"{name}.weight", None if has_bias else output)
        if not has_bias:
            return y
        bias = self.write_weight(f"{name}.bias")
        bias = self.to_dtype(bias) if self.dtype == "bfloat16" else bias  # bfloat16 models store a bias as float32
        return self.graph.op("Add", y, bias, name=output)

    def write_sum_and_norm(
        self, x: str, addend: str | None, weight: str | None, name: str | None = None
    ) -> tuple[str, str]:
        """Write the sum of the residual stream `x` and an output, and the sum's RMS norm; return the names of both.

        Without an `addend`, the sum is `x`. Without a `weight`, the normed sum, which gets the `name`, is the sum.
        """
        if weight is not None:
            return self.write_norm(x, addend, weight, name)
        # The sum itself gets the name. An Identity node would be a copy, which WebGPU cannot record.
        total = x if addend is None else self.graph.op("Add", x, addend, name=name)
        return total, total

    def write_post_norm(self, x: str, weight: str) -> str:
        """Write the norm of the attention or feed-forward output `x`, if the architecture has such norms."""
        return self.write_norm(x, None, weight, None)[1] if self.architecture.post_norms else x

    def write_tiled_mask(self, mask: str) -> str:
        """Tile a mask `[rows, 1, nodes, columns]` along the nodes, once for each query head that shares keys."""
        return (
            self.graph.op("Tile", mask, self.graph.int_vector(1, 1, self.kv_group_size, 1))
            if self.kv_group_size > 1
            else mask
        )

    @abstractmethod
    def split_and_rotate_qkv(self, qkv: str, layer_name: str) -> tuple[str, str, str]:
        """Split the joint projection, and write head norm and rotary embedding of queries and keys."""

    @abstractmethod
    def write_attention(self, query: str, key: str, value: str, layer_name: str) -> str:
        """Write the storing of keys and values, and attention, `[rows, nodes, num_heads * head_dim]`."""

    @abstractmethod
    def write_matmul(self, x: str, weight: str, output: str | None) -> str: ...

    @abstractmethod
    def write_weight(self, name: str) -> str:
        """Add a weight, and return the name of a floating-point tensor that nodes can read."""

    @abstractmethod
    def write_norm(self, x: str, addend: str | None, weight: str, name: str | None) -> tuple[str, str]:
        """Write a residual sum and its RMS norm, as `write_sum_and_norm` does."""

    @abstractmethod
    def write_layer_norm(self, x: str) -> str:
        """Write the layer norm of `x`, without weight and bias."""

    @abstractmethod
    def write_gelu(self, x: str) -> str:
        """Write the exact GELU of `x`, not its tanh approximation."""

    def add_scalar_constant(self, value: float) -> str:
        return self.to_dtype(self.graph.add_constant(np.array(value, np.float32)))

    def to_float32(self, x: str) -> str:
        return self.graph.cast(x, "float32") if self.half else x

    def to_dtype(self, x: str) -> str:
        return self.graph.cast(x, self.dtype) if self.half else x


class AdaptiveLayers:
    """Writer of layers with adaptive norms (RAR): class and position give scales and shifts of norms, and gates.

    The position id c * n + p means position p of n positions, and class c. A learned vector of the position is added to
    inputs, so queries and keys are not rotated. The weights that give scales and shifts include the weights and biases
    of the norms (`export/models/adaptive.py`). `writer` writes the other parts of the decoder.
    """

    def __init__(self, writer: DecoderGraphWriter) -> None:
        graph = writer.graph
        self.writer = writer
        num_positions = graph.int_vector(writer.weights["position_vectors"].shape[0])
        classes = graph.op("Div", writer.position_ids, num_positions)
        self.positions = graph.op("Sub", writer.position_ids, graph.op("Mul", classes, num_positions))
        condition = graph.op(
            "Add", self.look_up("class_vectors", classes), self.look_up("step_vectors", self.positions)
        )
        self.active = graph.op("Mul", condition, graph.op("Sigmoid", condition))

    def look_up(self, table: str, indices: str) -> str:
        rows = self.writer.graph.op("Gather", self.writer.write_weight(table), indices)
        return self.writer.to_dtype(rows)

    def write_layers(self, x: str) -> tuple[str, str]:
        """Write all layers and the last norm, and return two tensors whose sum is its output."""
        graph = self.writer.graph
        x = graph.op("Add", x, self.look_up("position_vectors", self.positions))
        for i in range(self.writer.spec.num_layers):
            x = self.write_layer(x, f"layers.{i}")
        shift, scale = self.write_modulation(f"norm{MODULATION}", 2)
        return graph.op("Mul", self.writer.write_layer_norm(x), scale), shift

    def write_layer(self, x: str, name: str) -> str:
        writer = self.writer
        vectors = self.write_modulation(f"{name}{MODULATION}", 6)
        shift, scale, gate = vectors[:3]
        x = self.add_gated(x, writer.write_attention_block(self.write_norm(x, shift, scale), name), gate)
        shift, scale, gate = vectors[3:]
        up = writer.write_linear(self.write_norm(x, shift, scale), f"{name}.ffn.up")
        return self.add_gated(x, writer.write_linear(writer.write_gelu(up), f"{name}.ffn.down"), gate)

    def write_modulation(self, name: str, count: int) -> Sequence[str]:
        """Write the vectors of the nodes: a shift, a scale and, in layers, a gate for each block."""
        graph = self.writer.graph
        joint = self.writer.write_linear(self.active, name)
        sizes = graph.int_vector(*[self.writer.spec.hidden_size] * count)
        return graph.add_node("Split", [joint, sizes], [f"{name}.{i}" for i in range(count)], axis=-1)

    def write_norm(self, x: str, shift: str, scale: str) -> str:
        graph = self.writer.graph
        return graph.op("Add", graph.op("Mul", self.writer.write_layer_norm(x), scale), shift)

    def add_gated(self, x: str, output: str, gate: str) -> str:
        return self.writer.graph.op("Add", x, self.writer.graph.op("Mul", output, gate))


def choose_column_part_shape(column_width: int) -> tuple[int, int]:
    """Divide a column of numbers into parts that a graph writes separately; return the number and the width of parts.

    Parts make writing faster, because ScatterND on CUDA runs one thread per index. A thread that copied a whole column
    of 1,280 numbers took 47 us on an H200.
    """
    part = math.gcd(column_width, _MAX_PART)
    return column_width // part, part


def _encode_attribute(name: str, value: Attribute) -> bytes:
    if isinstance(value, float):
        return (
            _encode_field(1, name) + _encode_varint(2 << 3 | 5) + struct.pack("<f", value) + _encode_field(20, _FLOAT)
        )
    if isinstance(value, int):
        return _encode_field(1, name) + _encode_field(3, value) + _encode_field(20, _INT)
    if isinstance(value, str):
        return _encode_field(1, name) + _encode_field(4, value) + _encode_field(20, _STRING)
    if isinstance(value, np.ndarray):
        return _encode_field(1, name) + _encode_field(5, _encode_tensor(value, "")) + _encode_field(20, _TENSOR)
    return _encode_field(1, name) + b"".join(_encode_field(8, each) for each in value) + _encode_field(20, _INTS)


def _encode_tensor(array: NDArray[Any], name: str) -> bytes:
    dims = b"".join(_encode_field(1, size) for size in array.shape)
    return (
        dims
        + _encode_field(2, TYPES[array.dtype.name])
        + _encode_field(8, name)
        + _encode_field(9, np.ascontiguousarray(array).tobytes())
    )


def _encode_value_info(tensor: TensorSpec) -> bytes:
    axes = [axis or f"{tensor.name}.{i}" for i, axis in enumerate(tensor.shape)]
    shape = b"".join(_encode_field(1, _encode_field(1 if isinstance(axis, int) else 2, axis)) for axis in axes)
    element_type = _encode_field(1, TYPES[tensor.dtypes[0]])
    return _encode_field(1, tensor.name) + _encode_field(2, _encode_field(1, element_type + _encode_field(2, shape)))


def _encode_field(field_number: int, field_value: int | str | bytes) -> bytes:
    """Encode a field of a protobuf message: an integer, text, or the bytes of another message."""
    if isinstance(field_value, int):
        # Negative numbers are encoded as two's complement.
        return _encode_varint(field_number << 3) + _encode_varint(field_value % (1 << 64))
    data = field_value.encode() if isinstance(field_value, str) else field_value
    return _encode_varint(field_number << 3 | 2) + _encode_varint(len(data)) + data


def _encode_varint(value: int) -> bytes:
    # 7 bits per byte, the lowest bits first; the highest bit of a byte says that another byte follows.
    return bytes([value]) if value < 0x80 else bytes([value & 0x7F | 0x80]) + _encode_varint(value >> 7)
