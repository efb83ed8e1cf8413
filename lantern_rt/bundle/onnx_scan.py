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
_DTYPES = {
    1: "float32",
    3: "int8",
    10: "float16",
    16: "bfloat16",
    22: "int4",
}  # of weights that bundles have, by TensorProto's numbers


def external_locations(path: Path) -> set[str]:
    """The files that an ONNX graph keeps tensors in, as it names them.

    Raises:
        ValueError: it is no ONNX graph, or has weights in a form that a runtime takes unchecked.
        OSError: it cannot be read.
    """
    locations: set[str] = set()
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
                elif kind == "node" and number == 4 and data[value] == b"EPContext":
                    raise ValueError("a part compiled for one processor, which a runtime takes unchecked")
            if texts.get(1, b"").startswith(b"prepacked"):
                raise ValueError("weights in a form made for one processor, which a runtime takes unchecked")
            if texts.get(1) == b"location":
                locations.add(texts.get(2, b"").decode("utf-8", "backslashreplace"))
    if not graphs:
        raise ValueError("no graph in it")
    return locations


class Weight(NamedTuple):
    """An initialiser of a graph: its message as it stands in the file, shape, NumPy type ("" for others), and file.

    place: offset and length in the file `location` beside the graph; None: `message` holds the numbers.
    """

    message: bytes
    shape: tuple[int, ...]
    dtype: str
    place: tuple[str, int, int] | None

    def array(self, folder: Path) -> NDArray[Any]:
        """Read the numbers; those of four bits as int8.

        Args:
            folder: that of the graph.

        Raises:
            ValueError: there are more or fewer than the shape says.
            OSError: the file of the weights cannot be read.
        """
        if self.place is None:
            fields = _fields(self.message, slice(0, len(self.message)))
            data = next((self.message[value] for number, value in fields if number == 9), b"")
        else:
            location, offset, length = self.place
            with (folder / location).open("rb") as file:
                file.seek(offset)
                data = file.read(length)
        if self.dtype == "int4":  # two in a byte, the low half first
            packed = np.frombuffer(data, np.int8)
            numbers = np.stack([packed << 4 >> 4, packed >> 4], -1).ravel()[: 2 * len(data) - math.prod(self.shape) % 2]
        elif self.dtype:
            numbers = np.frombuffer(data, self.dtype)
        else:
            raise ValueError("a weight of a type that bundles do not have")
        return numbers.reshape(self.shape)


def graph_weights(path: Path) -> dict[str, Weight]:
    """The initialisers of a graph by name. Raises: ValueError: it is no ONNX graph. OSError."""
    weights: dict[str, Weight] = {}
    with _mapped(path) as (data, model):
        for tensor in _inside(data, model, 7, 5):  # graph, initializer
            shape, kinds = (tuple(_varints(data, _inside(data, tensor, number))) for number in (1, 2))
            (name,) = (data[value].decode() for value in _inside(data, tensor, 8))
            entries = [{n: data[value].decode() for n, value in _fields(data, e)} for e in _inside(data, tensor, 13)]
            own = {entry.get(1, ""): entry.get(2, "") for entry in entries}
            numbers = int(own.get("offset", 0)), int(own.get("length", 0))
            place = (own["location"], *numbers) if "location" in own else None
            weights[name] = Weight(data[tensor], shape, _DTYPES.get(sum(kinds), ""), place)
    return weights


def count_float_weights(path: Path) -> int:
    """How many numbers the float weights of a graph hold. Raises: ValueError: it is no ONNX graph. OSError."""
    return sum(math.prod(one.shape) for one in graph_weights(path).values() if "float" in one.dtype)


@contextmanager
def _mapped(path: Path) -> Iterator[tuple[mmap.mmap, slice]]:
    if not path.stat().st_size:
        raise ValueError("the file is empty")
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
            raise ValueError(f"wire type {wire} at byte {at}: no ONNX file")
        if at > end:
            raise ValueError("a field runs past the end: cut short, or no ONNX file")
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
    raise ValueError("a number runs past the end: cut short, or no ONNX file")
