"""Small ONNX graphs as bytes, for helper operations on a device: a few nodes, no weights, no onnx package."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

_OPSET, _IR_VERSION = 18, 10
_TYPES: dict[type[np.generic], int] = {np.float32: 1, np.int64: 7, np.float16: 10}
_Value = tuple[str, type[np.generic], Sequence[int | str]]  # name, type, axes


def gather_graph(width: int, dtype: type[np.generic]) -> bytes:
    """`chosen`: rows `places` of `data [all, width]`."""
    inputs: list[_Value] = [("data", dtype, ["all", width]), ("places", np.int64, ["some"])]
    return _model([_node("Gather", ["data", "places"], "chosen")], inputs, [("chosen", dtype, ["some", width])])


def convolution_graph() -> bytes:
    """`result`: one pixel's kernel over an image of four."""
    image: _Value = ("image", np.float32, [1, 1, 2, 2])
    inputs: list[_Value] = [image, ("kernel", np.float32, [1, 1, 1, 1])]
    return _model([_node("Conv", ["image", "kernel"], "result")], inputs, [("result", *image[1:])])


def append_graph(tensors: int, entry: tuple[int, int], dtype: type[np.generic]) -> bytes:
    """`joined.i`: for tensor i of a cache, entries `source` of `new.i` scattered to places `target` of `cache.i`."""
    nodes: list[bytes] = []
    inputs: list[_Value] = [("source", np.int64, ["count"]), ("target", np.int64, ["count", 1])]
    for i in range(tensors):
        nodes.append(_node("Gather", [f"new.{i}", "source"], f"chosen.{i}"))
        nodes.append(_node("ScatterND", [f"cache.{i}", "target", f"chosen.{i}"], f"joined.{i}"))
        inputs += [(f"new.{i}", dtype, ["new", *entry]), (f"cache.{i}", dtype, ["places", *entry])]
    return _model(nodes, inputs, [(f"joined.{i}", dtype, ["places", *entry]) for i in range(tensors)])


def _node(op: str, inputs: Iterable[str], output: str) -> bytes:
    """A node with one output and no attributes."""
    return b"".join(_field(1, name) for name in inputs) + _field(2, output) + _field(3, output) + _field(4, op)


def _model(nodes: Iterable[bytes], inputs: Iterable[_Value], outputs: Iterable[_Value]) -> bytes:
    """A model of these nodes, in an order in which they can be run."""
    parts = [_field(1, node) for node in nodes] + [_field(2, "helper")]
    parts += [_field(number, _value(*one)) for number, values in ((11, inputs), (12, outputs)) for one in values]
    return _field(1, _IR_VERSION) + _field(7, b"".join(parts)) + _field(8, _field(1, "") + _field(2, _OPSET))


def _value(name: str, dtype: type[np.generic], axes: Sequence[int | str]) -> bytes:
    shape = b"".join(_field(1, _field(1 if isinstance(axis, int) else 2, axis)) for axis in axes)
    return _field(1, name) + _field(2, _field(1, _field(1, _TYPES[dtype]) + _field(2, shape)))


def _field(number: int, content: int | str | bytes) -> bytes:
    """One field of a protobuf message: a whole number, or text or another message by its length."""
    if isinstance(content, int):
        return _varint(number << 3) + _varint(content)
    data = content.encode() if isinstance(content, str) else content
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    return bytes([value]) if value < 0x80 else bytes([value & 0x7F | 0x80]) + _varint(value >> 7)
