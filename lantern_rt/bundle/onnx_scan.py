"""Which other files an ONNX file reads, and how many weights it has: a walk over its bytes, without onnx.

A tensor may keep its numbers in another file, named by the `location` entry of its `external_data`. A
runtime opens whatever that names, so a bundle is only safe when every such file is one of its own;
`bundle.py` compares. Only messages that can hold a tensor are entered; big tensors are skipped unread.

Does not know operators, shapes or runtimes, and does not judge the locations it finds.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

# Messages of onnx.proto that lead to a tensor: field number -> message kind.
_CHILDREN: dict[str, dict[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {13: "entry"},
    "entry": {},
}
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class NotOnnx(ValueError):  # noqa: N818
    """The bytes are not an ONNX model."""


def external_locations(path: Path) -> set[str]:
    """The `location` of every tensor that an ONNX file keeps elsewhere."""
    with path.open("rb") as file:
        if not path.stat().st_size:
            raise NotOnnx("the file is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _walk(data)


def float_weights(path: Path) -> int:
    """How many numbers the float weights of an ONNX file's graph hold, wherever they are stored."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        graphs = [extent for number, *extent in fields(data, 0, len(data)) if number == 7]
        return sum(
            _float_elements(data, low, high)
            for start, end in graphs
            for number, low, high in fields(data, start, end)
            if number == 5
        )


def _float_elements(data: mmap.mmap, at: int, end: int) -> int:
    """Elements of the tensor in `data[at:end]`, 0 if its type is not one of float, float16, bfloat16."""
    elements, kind = 1, 0
    while at < end:
        tag, at = _varint(data, at, end)
        number, wire = tag >> 3, tag & 7
        if wire == _VARINT:
            value, at = _varint(data, at, end)
            elements, kind = (elements * value, kind) if number == 1 else (elements, value if number == 2 else kind)
        elif wire == _BYTES:
            size, at = _varint(data, at, end)
            if number == 1:  # dimensions in one packed field
                stop, place = at + size, at
                while place < stop:
                    value, place = _varint(data, place, stop)
                    elements *= value
            at += size
        else:
            at += 8 if wire == _FIXED64 else 4
    return elements if kind in (1, 10, 16) else 0


def _walk(data: mmap.mmap) -> set[str]:
    found: set[str] = set()
    has_graph = False
    todo = [("model", 0, len(data))]
    while todo:
        kind, start, end = todo.pop()
        key = value = b""
        for number, low, high in fields(data, start, end):
            if child := _CHILDREN[kind].get(number):
                todo.append((child, low, high))
                has_graph |= child == "graph"
            elif kind == "entry" and number == 1:
                key = data[low:high]
            elif kind == "entry" and number == 2:
                value = data[low:high]
        if key == b"location":
            found.add(value.decode("utf-8", "backslashreplace"))
    if not has_graph:
        raise NotOnnx("no graph in it")
    return found


def fields(data: mmap.mmap, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Field number and extent of every length-delimited field of the message in `data[at:end]`."""
    while at < end:
        tag, at = _varint(data, at, end)
        wire = tag & 7
        if wire == _VARINT:
            _, at = _varint(data, at, end)
        elif wire == _FIXED64:
            at += 8
        elif wire == _FIXED32:
            at += 4
        elif wire == _BYTES:
            size, at = _varint(data, at, end)
            if at + size > end:
                raise NotOnnx("a field runs past the end: cut short, or no ONNX file")
            yield tag >> 3, at, at + size
            at += size
        else:
            raise NotOnnx(f"wire type {wire} at byte {at}: no ONNX file")
    if at > end:
        raise NotOnnx("a field runs past the end: cut short, or no ONNX file")


def _varint(data: mmap.mmap, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise NotOnnx("a number runs past the end: cut short, or no ONNX file")
