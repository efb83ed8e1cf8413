"""Readers of the external files, the weights and the nodes of an ONNX graph, without ONNX libraries.

A tensor may store its data in another file, which the entry `location` of its `external_data` names. ONNX Runtime
opens any file that is named there. So a bundle is safe only if its manifest lists all these files.

This module parses the protobuf messages itself, because the base install has no `onnx`. It raises ValueError if a file
is not an ONNX graph. Only messages that can contain tensors are visited.
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

# Fields of messages in onnx.proto that can contain tensors: field number -> message kind.
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
_DTYPES = {  # Data types of weights in bundles, by number in TensorProto.
    1: "float32",
    3: "int8",
    10: "float16",
    16: "bfloat16",
    22: "int4",
}


def list_external_files(path: Path) -> set[str]:
    """Return the names of the external data files of an ONNX graph, as they are written in the graph.

    Precompiled parts, which cannot be checked, are a ValueError.
    """
    locations: set[str] = set()
    with _open_memory_mapped(path) as (data, model):
        messages = [("model", model)]
        graphs = 0
        while messages:
            kind, message = messages.pop()
            graphs += kind == "graph"
            texts: dict[int, bytes] = {}
            for number, value in _iter_fields(data, message):
                if child := _CHILDREN[kind].get(number):
                    messages.append((child, value))
                elif kind == "entry":
                    texts[number] = data[value]
                elif kind == "node" and number == 4 and data[value] == b"EPContext":
                    raise ValueError("contains a precompiled node (EPContext), which is not allowed")
            if texts.get(1, b"").startswith(b"prepacked"):
                raise ValueError("contains prepacked weights, which are not allowed")
            if texts.get(1) == b"location":
                locations.add(texts.get(2, b"").decode("utf-8", "backslashreplace"))
    if not graphs:
        raise ValueError("contains no graph")
    return locations


class StoredTensor(NamedTuple):
    """Initialiser of an ONNX graph, whose name may end in the stored type, such as `.int8`.

    Attributes:
        tensor_message: bytes of the protobuf message `TensorProto`.
        dtype: name of the NumPy type, `bfloat16` or `int4`; empty for other types.
        external_data: name of the file beside the graph, offset and length in bytes. None: the data are in
            `tensor_message`.
    """

    name: str
    tensor_message: bytes
    shape: tuple[int, ...]
    dtype: str
    external_data: tuple[str, int, int] | None

    def read_array(self, folder: Path) -> NDArray[Any]:
        """Read the values; int4 values are returned as int8, bfloat16 values as float32."""
        if self.external_data is None:
            fields = _iter_fields(self.tensor_message, slice(0, len(self.tensor_message)))
            data = next((self.tensor_message[value] for number, value in fields if number == 9), b"")
        else:
            location, offset, length = self.external_data
            with (folder / location).open("rb") as file:
                file.seek(offset)
                data = file.read(length)
        if self.dtype == "int4":  # Two values per byte, the low half first.
            packed = np.frombuffer(data, np.int8)
            numbers = np.stack([packed << 4 >> 4, packed >> 4], -1).ravel()[: 2 * len(data) - math.prod(self.shape) % 2]
        elif self.dtype == "bfloat16":  # The upper half of a float32.
            numbers = (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
        elif self.dtype:
            numbers = np.frombuffer(data, self.dtype)
        else:
            raise ValueError("contains a weight of an unsupported data type")
        return numbers.reshape(self.shape)


def read_graph_weights(path: Path) -> dict[str, StoredTensor]:
    weights: dict[str, StoredTensor] = {}
    with _open_memory_mapped(path) as (data, model):
        for tensor in _iter_nested_fields(data, model, 7, 5):  # graph, initializer
            shape = tuple(_read_varints(data, _iter_nested_fields(data, tensor, 1)))
            dtype = _DTYPES.get(sum(_read_varints(data, _iter_nested_fields(data, tensor, 2))), "")
            (name,) = (data[value].decode() for value in _iter_nested_fields(data, tensor, 8))
            entries: dict[str, str] = {}
            for message in _iter_nested_fields(data, tensor, 13):  # external_data
                entry = {number: data[value].decode() for number, value in _iter_fields(data, message)}
                entries[entry.get(1, "")] = entry.get(2, "")
            external_data = None
            if "location" in entries:
                external_data = (entries["location"], int(entries.get("offset", 0)), int(entries.get("length", 0)))
            weights[name] = StoredTensor(name, data[tensor], shape, dtype, external_data)
    return weights


def read_graph_nodes(path: Path) -> tuple[int, list[tuple[bytes, list[str], list[str]]]]:
    """Return the version of the operator set, and of each node the protobuf message and names of inputs and outputs."""
    with _open_memory_mapped(path) as (data, model):
        (version,) = _read_varints(data, _iter_nested_fields(data, model, 8, 2))  # opset_import, version
        nodes = []
        for node in _iter_nested_fields(data, model, 7, 1):  # graph, node
            inputs, outputs = ([data[v].decode() for v in _iter_nested_fields(data, node, i)] for i in (1, 2))
            nodes.append((data[node], inputs, outputs))
    return version, nodes


@contextmanager
def _open_memory_mapped(path: Path) -> Iterator[tuple[mmap.mmap, slice]]:
    if not path.stat().st_size:
        raise ValueError("the file is empty")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        yield data, slice(0, len(data))


def _iter_nested_fields(
    data: mmap.mmap | bytes, message: slice, first_number: int, *nested_numbers: int
) -> Iterator[slice]:
    """Yield the byte ranges of fields in a message. `nested_numbers`: field numbers, one per level below the first."""
    for number, value in _iter_fields(data, message):
        if number == first_number:
            yield from _iter_nested_fields(data, value, *nested_numbers) if nested_numbers else (value,)


def _iter_fields(data: mmap.mmap | bytes, message: slice) -> Iterator[tuple[int, slice]]:
    """Yield the number and the byte range of each field of a protobuf message; fields of fixed size are skipped."""
    offset = message.start
    end = message.stop
    while offset < end:
        tag, start = _read_varint(data, offset, end)
        wire = tag & 7
        if wire == 0:
            offset = _read_varint(data, start, end)[1]
        elif wire == 2:
            size, start = _read_varint(data, start, end)
            offset = start + size
        elif wire in (1, 5):
            offset = start + (8 if wire == 1 else 4)
        else:
            raise ValueError(f"not an ONNX file: wire type {wire} at byte {offset}")
        if offset > end:
            raise ValueError("truncated, or not an ONNX file: a field extends past the end")
        if wire in (0, 2):
            yield tag >> 3, slice(start, offset)


def _read_varints(data: mmap.mmap | bytes, fields: Iterator[slice]) -> Iterator[int]:
    """Yield the integers in fields, each of which has one integer or several packed integers."""
    for field in fields:
        offset = field.start
        while offset < field.stop:
            value, offset = _read_varint(data, offset, field.stop)
            yield value


def _read_varint(data: mmap.mmap | bytes, offset: int, end: int) -> tuple[int, int]:
    """Return the integer at an offset, and the offset after the integer."""
    value = shift = 0
    while offset < end and shift < 70:
        value |= (data[offset] & 0x7F) << shift
        shift += 7
        offset += 1
        if data[offset - 1] < 0x80:
            return value, offset
    raise ValueError("truncated, or not an ONNX file: an integer extends past the end")
