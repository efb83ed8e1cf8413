"""Small ONNX graphs as bytes, for helper operations on a device: a few nodes, no weights, no onnx package.

Does not know what they are for, and checks nothing: ONNX Runtime does when it loads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_OPSET, _IR_VERSION = 18, 10
_TYPES = {"float32": 1, "int64": 7, "float16": 10}
Value = tuple[str, str, Sequence[int | str]]  # name, type, axes


def node_bytes(op: str, inputs: Iterable[str], output: str) -> bytes:
    """A node with one output and no attributes."""
    return b"".join([*(_text(1, name) for name in inputs), _text(2, output), _text(3, output), _text(4, op)])


def model_bytes(nodes: Iterable[bytes], inputs: Iterable[Value], outputs: Iterable[Value]) -> bytes:
    """A model of these nodes, in an order in which they can be run."""
    graph = b"".join(
        [
            *(_message(1, node) for node in nodes),
            _text(2, "helper"),
            *(_message(11, _value(*value)) for value in inputs),
            *(_message(12, _value(*value)) for value in outputs),
        ]
    )
    opset = _text(1, "") + _number(2, _OPSET)
    return _number(1, _IR_VERSION) + _message(7, graph) + _message(8, opset)


def _value(name: str, dtype: str, axes: Sequence[int | str]) -> bytes:
    sizes = (_number(1, axis) if isinstance(axis, int) else _text(2, axis) for axis in axes)
    shape = b"".join(_message(1, size) for size in sizes)
    tensor = _number(1, _TYPES[dtype]) + _message(2, shape)
    return _text(1, name) + _message(2, _message(1, tensor))


def _text(field: int, text: str) -> bytes:
    return _message(field, text.encode())


def _message(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])
