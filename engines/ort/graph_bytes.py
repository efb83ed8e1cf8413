"""Small ONNX graphs as bytes, for helper operations on a device: a few nodes, no weights, no onnx package.

Nothing is checked: ONNX Runtime does that when it loads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_OPSET, _IR_VERSION = 18, 10
_TYPES = {"float32": 1, "int64": 7, "float16": 10}
Value = tuple[str, str, Sequence[int | str]]  # name, type, axes


def node_bytes(op: str, inputs: Iterable[str], output: str) -> bytes:
    """A node with one output and no attributes."""
    return b"".join(_field(1, name) for name in inputs) + _field(2, output) + _field(3, output) + _field(4, op)


def model_bytes(nodes: Iterable[bytes], inputs: Iterable[Value], outputs: Iterable[Value]) -> bytes:
    """A model of these nodes, in an order in which they can be run."""
    parts = [_field(1, node) for node in nodes] + [_field(2, "helper")]
    parts += [_field(number, _value(*one)) for number, values in ((11, inputs), (12, outputs)) for one in values]
    return _field(1, _IR_VERSION) + _field(7, b"".join(parts)) + _field(8, _field(1, "") + _field(2, _OPSET))


def _value(name: str, dtype: str, axes: Sequence[int | str]) -> bytes:
    shape = b"".join(_field(1, _field(1 if isinstance(axis, int) else 2, axis)) for axis in axes)
    tensor = _field(1, _TYPES[dtype]) + _field(2, shape)
    return _field(1, name) + _field(2, _field(1, tensor))


def _field(number: int, content: int | str | bytes) -> bytes:
    """One field of a protobuf message: a whole number, or text or another message by its length."""
    if isinstance(content, int):
        return _varint(number << 3) + _varint(content)
    data = content.encode() if isinstance(content, str) else content
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])
