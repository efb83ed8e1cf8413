"""ONNX graphs written as bytes, without the onnx package: graphs that are made when a bundle is loaded.

Values are names. Weights are taken over from another file as they stand there, wherever their numbers are kept.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

_IR_VERSION = 11
_TYPES: dict[str, int] = {"float32": 1, "int32": 6, "int64": 7, "bool": 9, "float16": 10}
_FLOAT, _INT, _INTS = 1, 2, 7  # AttributeProto.AttributeType
Attribute = int | float | Sequence[int]


@dataclass(frozen=True)
class Value:
    """A graph's input or output; axes are sizes, or names of sizes that vary from call to call."""

    name: str
    dtype: str
    axes: Sequence[int | str]


@dataclass
class GraphWriter:
    """A graph in the making; nodes come in an order in which they can be run."""

    domains: dict[str, int] = field(default_factory=lambda: {"": 23})  # versions of sets of ops
    nodes: list[bytes] = field(default_factory=list)
    weights: dict[str, bytes] = field(default_factory=dict)

    def many(self, op: str, inputs: Iterable[str], outputs: Sequence[str], **attributes: Attribute) -> Sequence[str]:
        """A node with named outputs; empty names leave optional ones out. Ops of another domain come with its name."""
        domain, _, op = op.rpartition(".")
        parts = [_field(1, name) for name in inputs] + [_field(2, name) for name in outputs]
        parts += [_field(3, outputs[0]), _field(4, op), _field(7, domain)]
        parts += [_field(5, _attribute(name, value)) for name, value in attributes.items()]
        self.nodes.append(b"".join(parts))
        return outputs

    def op(self, op: str, *inputs: str, name: str | None = None, **attributes: Attribute) -> str:
        """A node with one output, named after the op unless told otherwise."""
        return self.many(op, inputs, [name or f"{op.lower()}_{len(self.nodes)}"], **attributes)[0]

    def constant(self, array: NDArray[np.generic], name: str | None = None) -> str:
        """A constant of the graph."""
        own = name or f"constant_{len(self.weights)}"
        dims = b"".join(_field(1, size) for size in array.shape)
        kind = _field(2, _TYPES[array.dtype.name])
        self.weights[own] = dims + kind + _field(8, own) + _field(9, np.ascontiguousarray(array).tobytes())
        return own

    def ints(self, *values: int) -> str:
        """A constant int64 vector, for axes and shapes; the same one for the same values."""
        name = "ints_" + "_".join(map(str, values)).replace("-", "m")
        return name if name in self.weights else self.constant(np.array(values, np.int64), name)

    def cast(self, x: str, dtype: str) -> str:
        """`x` in another type."""
        return self.op("Cast", x, to=_TYPES[dtype])

    def model(self, inputs: Iterable[Value], outputs: Iterable[Value]) -> bytes:
        """The model, as a file would have it."""
        parts = [_field(1, node) for node in self.nodes] + [_field(2, "graph")]
        parts += [_field(5, weight) for weight in self.weights.values()]
        parts += [_field(number, _value(one)) for number, values in ((11, inputs), (12, outputs)) for one in values]
        opsets = [_field(8, _field(1, domain) + _field(2, number)) for domain, number in self.domains.items()]
        return _field(1, _IR_VERSION) + _field(7, b"".join(parts)) + b"".join(opsets)


def convolution_graph() -> bytes:
    """`result`: one pixel's kernel over an image of four."""
    graph = GraphWriter()
    graph.op("Conv", "image", "kernel", name="result")
    image = Value("image", "float32", [1, 1, 2, 2])
    return graph.model([image, Value("kernel", "float32", [1, 1, 1, 1])], [Value("result", "float32", image.axes)])


def _attribute(name: str, value: Attribute) -> bytes:
    if isinstance(value, float):
        return _field(1, name) + _varint(2 << 3 | 5) + struct.pack("<f", value) + _field(20, _FLOAT)
    if isinstance(value, int):
        return _field(1, name) + _field(3, value) + _field(20, _INT)
    return _field(1, name) + b"".join(_field(8, each) for each in value) + _field(20, _INTS)


def _value(value: Value) -> bytes:
    shape = b"".join(_field(1, _field(1 if isinstance(axis, int) else 2, axis)) for axis in value.axes)
    return _field(1, value.name) + _field(2, _field(1, _field(1, _TYPES[value.dtype]) + _field(2, shape)))


def _field(number: int, content: int | str | bytes) -> bytes:
    """One field of a protobuf message: a whole number, or text or another message by its length."""
    if isinstance(content, int):
        return _varint(number << 3) + _varint(content % (1 << 64))  # negative numbers as two's complement
    data = content.encode() if isinstance(content, str) else content
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    return bytes([value]) if value < 0x80 else bytes([value & 0x7F | 0x80]) + _varint(value >> 7)
