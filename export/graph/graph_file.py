"""Graph files, which are written with little memory: weights are rounded and written one at a time, in chunks.

If a weight is stored in another type than the graph computes in, a node decodes it directly before its first use:
`Cast` for float16 and bfloat16, `DequantizeLinear` for integers. Runtimes fold or fuse these nodes. Large weights are
in one file beside the graph, aligned so that they can be memory-mapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper
from torch import Tensor

from ...engines.graph_writer import TYPES
from ..checkpoints.deferred import compute_deferred_tensor
from .onnx_ops import BLOCK_OPSET
from .precision import (
    MAX_INTEGER,
    ComputeType,
    StorageRule,
    StorageType,
    find_block_size,
    iter_float32_chunks,
    quantize,
    resolve_storage_type,
)

_MIN_EXTERNAL = 1 << 20  # total bytes of weights above which the weights are written to a separate file
_MAX_INLINE = 1024  # bytes: smaller weights stay in the graph, where shape inference can read them
_ALIGNMENT = 4096


class Initializer(NamedTuple):
    """Initializer of an ONNX graph: a weight, or the integers or scales of a weight."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        numbers = int(np.prod(self.shape, dtype=np.int64))
        return (numbers + 1) // 2 if self.dtype == "int4" else numbers * int(getattr(torch, self.dtype).itemsize)


@dataclass
class GraphFile:
    """Graph file that has not been written yet: nodes, weights, and the stored type of each weight."""

    model: onnx.ModelProto  # the graph without its weights
    weights: dict[str, Tensor]  # weights by name; they may be deferred
    # Stored type of each floating-point weight, by name. Writing changes a type to float32 if the planned type cannot
    # hold the numbers.
    storage_types: dict[str, StorageType]
    matrix_names: set[str]  # names of the weights of linear layers, `[in, out]`
    storage_rule: StorageRule
    # Type in which the graph computes. Scales of blocks of integers are stored in this type, too.
    compute_type: ComputeType = "float32"
    # File that is written before this one, and names of the weights that this graph reads from it.
    source: GraphFile | None = None
    shared_weights: Set[str] = frozenset()
    initializers: dict[str, list[TensorProto]] = field(default_factory=dict)  # written initializers by weight

    @property
    def weight_bytes(self) -> int:
        own = self.weights.keys() - (self.shared_weights if self.source else set())
        return sum(part.num_bytes for name in own for part in self.list_initializers(name))

    def list_initializers(self, name: str) -> list[Initializer]:
        weight = self.weights[name]
        kind = self.storage_types.get(name)
        shape = tuple(weight.shape)
        if kind is None or kind == "float32":
            return [Initializer(name, str(weight.dtype).removeprefix("torch.") if kind is None else kind, shape)]
        if kind == "float16":
            return [Initializer(name if self.compute_type == kind else f"{name}.half", kind, shape)]
        if kind == "bfloat16":
            return [Initializer(f"{name}.bfloat16", kind, shape)]
        if kind == "columns":
            return [Initializer(f"{name}.int8", "int8", shape), Initializer(f"{name}.scales", "float32", shape[1:])]
        size = find_block_size(kind, shape[0]) or 1
        scales = Initializer(f"{name}.scales", self.compute_type, (shape[0] // size, shape[1]))
        return [Initializer(f"{name}.{kind}", kind, shape), scales]

    def write(self, path: Path, progress: Callable[[int], None] = lambda count: None) -> list[Path]:
        """Write the graph, and its weights to `<path>.data` if they are larger than a megabyte; return the paths.

        `progress` gets the number of bytes of each chunk of weights.
        """
        external = path.with_name(path.name + ".data") if self.weight_bytes > _MIN_EXTERNAL else None
        with external.open("wb") if external else nullcontext() as file:
            for name in self.weights:
                if self.source and name in self.shared_weights:
                    self.storage_types[name] = self.source.storage_types[name]
                    self.model.graph.initializer.extend(self.source.initializers[name])
                    continue
                if name in self.storage_types:
                    weight = self.weights[name]
                    kind = self.storage_types[name]
                    self.storage_types[name] = resolve_storage_type(name, weight, kind, self.storage_rule)
                    if self.compute_type == "float16" and kind in MAX_INTEGER:
                        # This raises an error if the numbers, which the graph dequantizes to float16, exceed its range.
                        resolve_storage_type(name, weight, "float16", "fp16")
                self._write_weight(name, file, progress)
        self._insert_decode_nodes()
        path.write_bytes(self.model.SerializeToString())
        return [path, external] if external else [path]

    def _write_weight(self, name: str, file: BinaryIO | None, progress: Callable[[int], None]) -> None:
        scales: list[bytes] = []  # filled in while the integers are written
        for part, chunks in zip(
            self.list_initializers(name), (self._iter_weight_chunks(name, scales), scales), strict=False
        ):
            proto = self.model.graph.initializer.add(name=part.name, dims=part.shape, data_type=TYPES[part.dtype])
            self.initializers.setdefault(name, []).append(proto)
            if file is None or part.num_bytes <= _MAX_INLINE:
                proto.raw_data = b"".join(chunks)
                progress(part.num_bytes)
                continue
            file.write(b"\0" * (-file.tell() % _ALIGNMENT))
            proto.data_location = TensorProto.EXTERNAL
            location = {"location": Path(file.name).name, "offset": file.tell(), "length": part.num_bytes}
            for key, value in location.items():
                proto.external_data.add(key=key, value=str(value))
            for data in chunks:
                file.write(data)
                progress(len(data))

    def _iter_weight_chunks(self, name: str, scales: list[bytes]) -> Iterator[bytes]:
        """Yield the bytes of a weight's first initializer; append the bytes of its scales to `scales`."""
        weight = self.weights[name]
        kind = self.storage_types.get(name)
        if kind is None:
            yield np.ascontiguousarray(compute_deferred_tensor(weight).numpy()).tobytes()
        elif kind in ("float32", "float16", "bfloat16"):
            for chunk in iter_float32_chunks(weight):
                yield _to_bytes(chunk, kind)
        elif kind == "columns":
            largest = torch.stack([chunk.abs().amax(0) for chunk in iter_float32_chunks(weight)]).amax(0, keepdim=True)
            scales.append((largest[0] / MAX_INTEGER[kind]).numpy().tobytes())
            for chunk in iter_float32_chunks(weight):
                yield quantize(chunk, kind, largest / MAX_INTEGER[kind])[0].numpy().tobytes()
        else:
            for chunk in iter_float32_chunks(weight, find_block_size(kind, weight.shape[0]) or 1):
                integers, chunk_scales = quantize(chunk, kind, compute_type=self.compute_type)
                scales.append(_to_bytes(chunk_scales, self.compute_type))
                yield integers.numpy().tobytes() if kind == "int8" else _pack_int4(integers.numpy())

    def _insert_decode_nodes(self) -> None:
        """Insert a node that decodes a weight directly before its first use, so that few of them are in memory."""
        nodes = list(self.model.graph.node)
        undecoded = {"float32", "columns"} | ({"float16"} if self.compute_type == "float16" else set())
        decoded = {name: kind for name, kind in self.storage_types.items() if kind not in undecoded}
        tables = {name for name, kind in decoded.items() if kind in ("float16", "bfloat16")} - {
            name for node in nodes for i, name in enumerate(node.input) if not (i == 0 and _is_embedding_lookup(node))
        }
        read: set[str] = set()
        del self.model.graph.node[:]
        for node in nodes:
            read.update(node.input)
            if node.input and node.input[0] in tables:
                self.model.graph.node.extend(self._make_lookup_decode_nodes(node))
                continue
            for name in node.input:
                if kind := decoded.pop(name, None):
                    self.model.graph.node.extend(self._make_weight_decode_nodes(name, kind))
            self.model.graph.node.append(node)
        weights = {f"{name}.int8" if kind == "columns" else name for name, kind in self.storage_types.items()}
        assert weights <= read, "weights that no node reads"
        if any(kind in ("int8", "int4") for kind in self.storage_types.values()):
            self.model.opset_import[0].version = BLOCK_OPSET

    def _make_lookup_decode_nodes(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """Decode only the rows of a table that are looked up."""
        (table,) = self.list_initializers(node.input[0])
        (output,) = node.output
        node.input[0] = table.name
        node.output[0] = f"{output}.half"
        return [node, helper.make_node("Cast", [f"{output}.half"], [output], f"{output}.cast", to=TensorProto.FLOAT)]

    def _make_weight_decode_nodes(self, name: str, storage_type: StorageType) -> list[onnx.NodeProto]:
        inputs = [part.name for part in self.list_initializers(name)]
        nodes: list[onnx.NodeProto] = []
        if storage_type in ("float16", "bfloat16"):
            return [helper.make_node("Cast", inputs, [name], name=f"{name}.cast", to=TensorProto.FLOAT)]
        if self.compute_type == "bfloat16":  # graphs for CPUs compute in float32
            wide = f"{name}.wide_scales"
            nodes.append(helper.make_node("Cast", inputs[1:], [wide], name=wide, to=TensorProto.FLOAT))
            inputs[1] = wide
        size = find_block_size(storage_type, self.weights[name].shape[0])
        node = helper.make_node("DequantizeLinear", inputs, [name], name=f"{name}.decode", axis=0, block_size=size)
        return [*nodes, node]


def _is_embedding_lookup(node: onnx.NodeProto) -> bool:
    return node.op_type == "Gather" and all(helper.get_attribute_value(each) == 0 for each in node.attribute)


def _to_bytes(numbers: Tensor, dtype: str) -> bytes:
    return numbers.to(getattr(torch, dtype)).reshape(-1).view(torch.uint8).numpy().tobytes()


def _pack_int4(integers: NDArray[np.int8]) -> bytes:
    """The first of two integers is in the low half of a byte, as ONNX requires."""
    flat = integers.reshape(-1).view(np.uint8) & 15
    flat = np.pad(flat, (0, flat.size % 2))
    return (flat[0::2] | (flat[1::2] << 4)).tobytes()
