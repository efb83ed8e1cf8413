"""What an ONNX file says without running it: files it reads, how many weights it has.

A tensor may keep its numbers in another file, named by the `location` entry of its `external_data`. A runtime opens
whatever that names, so a bundle is only safe when every such file is one of its own. This is a walk over the file's
bytes (protobuf), since the base install has no onnx. Only messages that can hold a tensor are entered; big tensors
are skipped unread.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

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
_FLOATS = {1, 10, 16}  # TensorProto.FLOAT, FLOAT16, BFLOAT16
_NUMPY = {1: "float32", 10: "float16"}


class NotOnnx(ValueError):  # noqa: N818
    """The bytes are not an ONNX model."""


def external_locations(path: Path) -> set[str]:
    """The `location` of every tensor that an ONNX file keeps elsewhere. Raises: NotOnnx, OSError."""
    found: set[str] = set()
    with _mapped(path) as (data, model):
        todo, graphs = [("model", model)], 0
        while todo:
            kind, message = todo.pop()
            graphs += kind == "graph"
            texts: dict[int, bytes] = {}
            for number, value in _fields(data, message):
                if child := _CHILDREN[kind].get(number):
                    todo.append((child, value))
                elif kind == "entry":
                    texts[number] = data[value]
            if texts.get(1, b"").startswith(b"prepacked"):
                raise NotOnnx("weights in a form made for one processor, which a runtime takes unchecked")
            if texts.get(1) == b"location":
                found.add(texts.get(2, b"").decode("utf-8", "backslashreplace"))
    if not graphs:
        raise NotOnnx("no graph in it")
    return found


def float_weights(path: Path) -> int:
    """How many numbers the float weights of a graph hold, wherever they are stored. Raises: NotOnnx, OSError."""
    total = 0
    with _mapped(path) as (data, model):
        for tensor in _inside(data, model, 7, 5):  # graph, initializer
            kind, sizes = (list(_varints(data, _inside(data, tensor, number))) for number in (2, 1))
            total += math.prod(sizes) if set(kind) & _FLOATS else 0
    return total


class Weight(NamedTuple):
    """An initialiser of a graph: its message as it stands in the file, shape, NumPy type ("" for others), and file.

    place: offset and length in the file `location` beside the graph; None: `message` holds the numbers.
    """

    message: bytes
    shape: tuple[int, ...]
    dtype: str
    place: tuple[str, int, int] | None

    def array(self, folder: Path) -> NDArray[np.floating[Any]]:
        """The numbers; `folder` holds the graph. Raises: NotOnnx, OSError."""
        if self.place is None:
            fields = _fields(self.message, slice(0, len(self.message)))
            data = next((self.message[value] for number, value in fields if number == 9), b"")
        else:
            location, offset, length = self.place
            with (folder / location).open("rb") as file:
                file.seek(offset)
                data = file.read(length)
        if not self.dtype or len(data) != math.prod(self.shape) * np.dtype(self.dtype).itemsize:
            raise NotOnnx("a weight of another size than its shape says")
        return np.frombuffer(data, self.dtype).reshape(self.shape)


def graph_weights(path: Path) -> dict[str, Weight]:
    """The initialisers of a graph by name. Raises: NotOnnx, OSError."""
    found: dict[str, Weight] = {}
    with _mapped(path) as (data, model):
        for tensor in _inside(data, model, 7, 5):  # graph, initializer
            shape, kinds = (tuple(_varints(data, _inside(data, tensor, number))) for number in (1, 2))
            (name,) = (data[value].decode() for value in _inside(data, tensor, 8))
            entries = [{n: data[value].decode() for n, value in _fields(data, e)} for e in _inside(data, tensor, 13)]
            own = {entry.get(1, ""): entry.get(2, "") for entry in entries}
            place = (own["location"], int(own.get("offset", 0)), int(own["length"])) if "location" in own else None
            found[name] = Weight(data[tensor], shape, _NUMPY.get(kinds[0], ""), place)
    return found


@contextmanager
def _mapped(path: Path) -> Iterator[tuple[mmap.mmap, slice]]:
    """The bytes of a file, and where its outermost message lies."""
    if not path.stat().st_size:
        raise NotOnnx("the file is empty")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        yield data, slice(0, len(data))


def _inside(data: mmap.mmap | bytes, message: slice, first: int, *numbers: int) -> Iterator[slice]:
    """The fields of one number of a message, or those further inside, down `numbers`."""
    for number, value in _fields(data, message):
        if number == first:
            yield from _inside(data, value, *numbers) if numbers else (value,)


def _fields(data: mmap.mmap | bytes, message: slice) -> Iterator[tuple[int, slice]]:
    """Number and bytes of the fields of a message; those of fixed size are left out."""
    at, end = message.start, message.stop
    while at < end:
        tag, start = _varint(data, at, end)
        wire = tag & 7
        if wire == 0:
            at = _varint(data, start, end)[1]
        elif wire == 2:
            size, start = _varint(data, start, end)
            at = start + size
        elif wire in (1, 5):
            at = start + (8 if wire == 1 else 4)
        else:
            raise NotOnnx(f"wire type {wire} at byte {at}: no ONNX file")
        if at > end:
            raise NotOnnx("a field runs past the end: cut short, or no ONNX file")
        if wire in (0, 2):
            yield tag >> 3, slice(start, at)


def _varints(data: mmap.mmap | bytes, fields: Iterator[slice]) -> Iterator[int]:
    """The numbers in fields that hold one each, or many packed."""
    for field in fields:
        at = field.start
        while at < field.stop:
            value, at = _varint(data, at, field.stop)
            yield value


def _varint(data: mmap.mmap | bytes, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 70:
        value |= (data[at] & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if data[at - 1] < 0x80:
            return value, at
    raise NotOnnx("a number runs past the end: cut short, or no ONNX file")
