"""ONNX graphs written as bytes, without the onnx package, and the part of a decoder that is the same in all layouts.

Bundles are exported with it, and graphs that are made when a bundle is loaded. Values are names.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .contracts import Tensor

_IR_VERSION = 11
HEAD_EPSILON = 1e-5  # of norms of single heads: Chameleon's; no configuration names it
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
_FLOAT, _INT, _STRING, _TENSOR, _INTS = 1, 2, 3, 4, 7  # AttributeProto.AttributeType
Attribute = int | float | str | Sequence[int] | NDArray[Any]


@dataclass
class GraphWriter:
    """A graph in the making; nodes come in an order in which they can be run.

    Args:
        domains: versions of sets of ops, by domain.
        nodes: as protobuf messages.
        weights: initialisers by name, as messages or what a subclass makes of constants.
    """

    domains: dict[str, int] = field(default_factory=lambda: {"": 23})
    nodes: list[bytes] = field(default_factory=list)
    weights: dict[str, Any] = field(default_factory=dict)

    def add_node(
        self, op: str, inputs: Iterable[str], outputs: Sequence[str], **attributes: Attribute
    ) -> Sequence[str]:
        """A node with named outputs; empty names leave optional ones out. Ops of another domain come with its name."""
        domain, _, op = op.rpartition(".")
        parts = [_field(1, name) for name in inputs] + [_field(2, name) for name in outputs]
        parts += [_field(3, outputs[0]), _field(4, op), _field(7, domain)]
        parts += [_field(5, _attribute(name, value)) for name, value in attributes.items()]
        self.nodes.append(b"".join(parts))
        return outputs

    def op(self, op: str, *inputs: str, name: str | None = None, **attributes: Attribute) -> str:
        """A node with one output, named after the op unless told otherwise."""
        return self.add_node(op, inputs, [name or f"{op.lower()}_{len(self.nodes)}"], **attributes)[0]

    def constant(self, array: NDArray[Any], name: str | None = None) -> str:
        """A constant of the graph."""
        own = name or f"constant_{len(self.weights)}"
        self.weights[own] = _tensor(array, own)
        return own

    def ints(self, *values: int) -> str:
        """A constant int64 vector, for axes and shapes; the same one for the same values."""
        name = "ints_" + "_".join(map(str, values)).replace("-", "m")
        return name if name in self.weights else self.constant(np.array(values, np.int64), name)

    def cast(self, x: str, dtype: str, name: str | None = None) -> str:
        """`x` in another type."""
        return self.op("Cast", x, name=name, to=TYPES[dtype])

    def reshape(self, x: str, *shape: int) -> str:
        """`x` in another shape; 0 keeps the size of that axis, -1 takes what is left."""
        return self.op("Reshape", x, self.ints(*shape))

    def transpose(self, x: str, *axes: int, name: str | None = None) -> str:
        """`x` with its axes in another order."""
        return self.op("Transpose", x, name=name, perm=axes)

    def to_bytes(self, inputs: Iterable[Tensor], outputs: Iterable[Tensor], name: str = "graph") -> bytes:
        """The model, as a file would have it."""
        parts = [_field(1, node) for node in self.nodes] + [_field(2, name)]
        parts += [_field(5, weight) for weight in self.weights.values() if isinstance(weight, bytes)]
        parts += [_field(number, _value(one)) for number, values in ((11, inputs), (12, outputs)) for one in values]
        opsets = [_field(8, _field(1, domain) + _field(2, number)) for domain, number in self.domains.items()]
        return _field(1, _IR_VERSION) + _field(7, b"".join(parts)) + b"".join(opsets)


class DecoderWriter(ABC):
    """A decoder as a graph: what every layout has in common. `x` are values `[rows, nodes, width]`.

    A layout says in which ops it multiplies, norms and rotates, and where keys and values are. What a decoder has
    besides (norms of single heads, biases, a head with a hidden layer), the names of its weights tell.

    Args:
        graph: what is written to.
        weights: by name, as the layout keeps them until they are written.
        dtype: what it computes in, but for norms and logits: float32, float16 or bfloat16.
        heads: of queries.
        group: of them share a head of keys and values.
    """

    def __init__(self, graph: GraphWriter, weights: Mapping[str, Any], dtype: str, heads: int, group: int) -> None:
        self.graph, self.weights, self.dtype, self.heads, self.group = graph, weights, dtype, heads, group
        self.half = dtype != "float32"

    def decoder(self, x: str, layers: int) -> None:
        """All layers on what goes into the first, with the outputs `hidden_states` and `logits`."""
        graph, added = self.graph, None
        for at in (f"layers.{i}" for i in range(layers)):
            x, normed = self.add_and_norm(x, added, f"{at}.attention_norm.weight")
            x, normed = self.add_and_norm(x, self.attention(normed, at), f"{at}.ffn_norm.weight")
            gate = self.linear(normed, f"{at}.ffn.gate")
            up = self.linear(normed, f"{at}.ffn.up")
            active = graph.op("Mul", graph.op("Mul", gate, graph.op("Sigmoid", gate)), up)
            added = self.linear(active, f"{at}.ffn.down")
        own = "narrow_states" if self.dtype == "bfloat16" else "hidden_states"
        hidden = self.add_and_norm(x, added, "norm.weight", own)[1]
        if self.dtype == "bfloat16":
            graph.cast(hidden, "float32", "hidden_states")
        self.head(hidden)

    def attention(self, x: str, at: str) -> str:
        """What attention of the layer `at` adds."""
        query, key, value = self.rotate(self.linear(x, f"{at}.attention.qkv"), at)
        return self.linear(self.attend(query, key, value, at), f"{at}.attention.out")

    def head(self, hidden: str) -> None:
        """Hidden states to `logits`, always float32."""
        own = "narrow_logits" if self.half else "logits"
        if "head.first.bias" in self.weights:
            self.linear(self.gelu(self.linear(hidden, "head.first")), "head.second", own)
        else:
            self.linear(hidden, "head", own)
        if self.half:
            self.graph.cast(own, "float32", "logits")

    def linear(self, x: str, name: str, output: str | None = None) -> str:
        """A product with a weight, and its bias if it has one; output: name of the result."""
        bias = f"{name}.bias" in self.weights
        y = self.matmul(x, f"{name}.weight", None if bias else output)
        if not bias:
            return y
        own = self.weight(f"{name}.bias")
        own = self.to_dtype(own) if self.dtype == "bfloat16" else own  # where vectors are stored as float32
        return self.graph.op("Add", y, own, name=output)

    def add_and_norm(self, x: str, added: str | None, weight: str, name: str | None = None) -> tuple[str, str]:
        """`x` with what is added to it, and that over its root mean square, scaled, where there is such a weight.

        name: of the latter. No Identity makes an output of a sum: a copy, which WebGPU does not record.
        """
        if weight in self.weights:
            return self.norm(x, added, weight, name)
        total = x if added is None else self.graph.op("Add", x, added, name=name)
        return total, total

    def tile_mask(self, mask: str) -> str:
        """A mask `[rows, 1, nodes, columns]` for queries that share a key, one after the other along the nodes."""
        return self.graph.op("Tile", mask, self.graph.ints(1, 1, self.group, 1)) if self.group > 1 else mask

    @abstractmethod
    def rotate(self, joint: str, at: str) -> tuple[str, str, str]:
        """Queries and keys, normed head by head and rotated, and values, of their joint projection."""

    @abstractmethod
    def attend(self, query: str, key: str, value: str, at: str) -> str:
        """Attention `[rows, nodes, hidden_size]`; new keys and values go where the layout keeps them."""

    @abstractmethod
    def matmul(self, x: str, weight: str, output: str | None) -> str:
        """A product with a weight, whose result is called `output`."""

    @abstractmethod
    def weight(self, name: str) -> str:
        """A weight in what the graph computes with."""

    @abstractmethod
    def norm(self, x: str, added: str | None, weight: str, name: str | None) -> tuple[str, str]:
        """As `add_and_norm`, where there is a weight."""

    @abstractmethod
    def gelu(self, x: str) -> str:
        """GELU, exact."""

    def to_float32(self, x: str) -> str:
        """`x` in float32."""
        return self.graph.cast(x, "float32") if self.half else x

    def to_dtype(self, x: str, name: str | None = None) -> str:
        """`x` in what the graph computes in."""
        return self.graph.cast(x, self.dtype, name) if self.half else x


def convolution_graph() -> bytes:
    """`result`: one pixel's kernel over an image of four."""
    graph = GraphWriter()
    graph.op("Conv", "image", "kernel", name="result")
    image, kernel = (Tensor(name, ("float32",), (1, 1, n, n)) for name, n in (("image", 2), ("kernel", 1)))
    return graph.to_bytes([image, kernel], [Tensor("result", image.dtypes, image.shape)])


def _attribute(name: str, value: Attribute) -> bytes:
    if isinstance(value, float):
        return _field(1, name) + _varint(2 << 3 | 5) + struct.pack("<f", value) + _field(20, _FLOAT)
    if isinstance(value, int):
        return _field(1, name) + _field(3, value) + _field(20, _INT)
    if isinstance(value, str):
        return _field(1, name) + _field(4, value) + _field(20, _STRING)
    if isinstance(value, np.ndarray):
        return _field(1, name) + _field(5, _tensor(value, "")) + _field(20, _TENSOR)
    return _field(1, name) + b"".join(_field(8, each) for each in value) + _field(20, _INTS)


def _tensor(array: NDArray[Any], name: str) -> bytes:
    dims = b"".join(_field(1, size) for size in array.shape)
    return (
        dims + _field(2, TYPES[array.dtype.name]) + _field(8, name) + _field(9, np.ascontiguousarray(array).tobytes())
    )


def _value(tensor: Tensor) -> bytes:
    axes = [axis or f"{tensor.name}.{i}" for i, axis in enumerate(tensor.shape)]
    shape = b"".join(_field(1, _field(1 if isinstance(axis, int) else 2, axis)) for axis in axes)
    kind = _field(1, TYPES[tensor.dtypes[0]])
    return _field(1, tensor.name) + _field(2, _field(1, kind + _field(2, shape)))


def _field(number: int, content: int | str | bytes) -> bytes:
    """One field of a protobuf message: a whole number, or text or another message by its length."""
    if isinstance(content, int):
        return _varint(number << 3) + _varint(content % (1 << 64))  # negative numbers as two's complement
    data = content.encode() if isinstance(content, str) else content
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    return bytes([value]) if value < 0x80 else bytes([value & 0x7F | 0x80]) + _varint(value >> 7)
