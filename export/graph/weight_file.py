"""Writing a graph and its weights to files, one weight at a time and each a chunk at a time.

Large weights go to one file beside the graph (`<role>.onnx.data`), aligned so that a runtime can map them. A
weight that is stored in another type than the graph computes with is turned back by a node right before its
first use: `Cast` for float16, `DequantizeLinear` for integers. Runtimes fold or fuse these when they load. Of
a float16 table that rows are looked up in, only the rows found are turned back, so that it stays as small when loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper
from torch import Tensor

from ..checkpoints.deferred import computed
from .onnx_ops import TYPES
from .precision import Rule, Storage, block_size, iter_chunks, quantise, resolve_dtype, storage

BLOCK_OPSET = 21  # the first with scales for blocks, and with 4-bit integers
_EXTERNAL_ABOVE = 1024  # bytes: smaller weights stay in the graph, where shape inference can read them
_ALIGNMENT = 4096


class Part(NamedTuple):
    """One initialiser: a weight, or the integers or the scales of one."""

    name: str
    kind: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size in the file."""
        numbers = int(np.prod(self.shape, dtype=np.int64))
        return (numbers + 1) // 2 if self.kind == "int4" else numbers * np.dtype(self.kind).itemsize


@dataclass
class GraphFile:
    """A graph that is described but not written. `storages` may still change to float32 while it is written."""

    model: onnx.ModelProto
    weights: dict[str, Tensor]
    storages: dict[str, Storage]
    matrices: set[str]
    rule: Rule
    half: bool = False  # the graph computes in float16, so that float16 weights are used as they are stored

    @property
    def size(self) -> int:
        """Bytes that the weights will take, as far as their shapes tell."""
        return sum(part.bytes for name in self.weights for part in self.parts(name))

    def parts(self, name: str) -> list[Part]:
        """The initialisers that a weight is stored as."""
        weight, kind = self.weights[name], self.storages.get(name)
        shape = tuple(weight.shape)
        if kind is None or kind == "float32":
            return [Part(name, str(weight.dtype).removeprefix("torch.") if kind is None else kind, shape)]
        if kind == "float16":
            return [Part(name if self.half else f"{name}.half", kind, shape)]
        size = block_size(kind, shape[0]) or 1
        return [Part(f"{name}.{kind}", kind, shape), Part(f"{name}.scales", "float32", (shape[0] // size, shape[1]))]

    def write(self, path: Path, written: Callable[[int], None] = lambda count: None) -> list[Path]:
        """Write `path`, and `path.data` if the weights are larger than a megabyte; returns the files written.

        `written` is told of every so many bytes of weights.
        """
        external = path.with_name(path.name + ".data") if self.size > 1 << 20 else None
        with external.open("wb") if external else nullcontext() as file:
            for name in self.weights:
                if name in self.storages:
                    self.storages[name] = resolve_dtype(name, self.weights[name], self.storages[name], self.rule)
                self._write_weight(name, file, written)
        self._insert_decoders()
        path.write_bytes(self.model.SerializeToString())
        return [path, external] if external else [path]

    def _write_weight(self, name: str, file: BinaryIO | None, written: Callable[[int], None]) -> None:
        scales: list[bytes] = []  # of integers, filled in while those are written
        for part, chunks in zip(self.parts(name), (self._chunks(name, scales), scales), strict=False):
            proto = self.model.graph.initializer.add(name=part.name, dims=part.shape, data_type=TYPES[part.kind])
            if file is None or part.bytes <= _EXTERNAL_ABOVE:
                proto.raw_data = b"".join(chunks)
                written(part.bytes)
                continue
            file.write(b"\0" * (-file.tell() % _ALIGNMENT))
            proto.data_location = TensorProto.EXTERNAL
            where = {"location": Path(file.name).name, "offset": file.tell(), "length": part.bytes}
            for key, value in where.items():
                proto.external_data.add(key=key, value=str(value))
            for data in chunks:
                file.write(data)
                written(len(data))

    def _chunks(self, name: str, scales: list[bytes]) -> Iterator[bytes]:
        """The bytes of a weight's first part; fills in the scales of integers."""
        weight, kind = self.weights[name], self.storages.get(name)
        if kind is None:
            yield np.ascontiguousarray(computed(weight).numpy()).tobytes()
        elif kind in ("float32", "float16"):
            for chunk in iter_chunks(weight):
                yield np.ascontiguousarray(chunk.numpy(), kind).tobytes()
        else:
            for chunk in iter_chunks(weight, block_size(kind, weight.shape[0]) or 1):
                integers, own = quantise(chunk, kind)
                scales.append(own.numpy().tobytes())
                yield integers.numpy().tobytes() if kind == "int8" else _pack(integers.numpy())

    def _insert_decoders(self) -> None:
        """Right before its first use: runtimes that fold nothing then hold one decoded weight at a time."""
        if self.half:
            return
        nodes = list(self.model.graph.node)
        tables = {name for name, kind in self.storages.items() if kind == "float16"} - {
            name for node in nodes for i, name in enumerate(node.input) if not (i == 0 and _looks_up(node))
        }
        waiting = {name: kind for name, kind in self.storages.items() if kind != "float32"}
        read: set[str] = set()
        del self.model.graph.node[:]
        for node in nodes:
            read.update(node.input)
            if node.input and node.input[0] in tables:
                self.model.graph.node.extend(self._looked_up(node))
                continue
            for name in node.input:
                if kind := waiting.pop(name, None):
                    self.model.graph.node.append(self._decoder(name, kind))
            self.model.graph.node.append(node)
        assert set(self.storages) <= read, "weights that no node reads"
        if any(kind in ("int8", "int4") for kind in self.storages.values()):
            self.model.opset_import[0].version = BLOCK_OPSET

    def _looked_up(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """A look-up in a float16 table, and the node that turns the rows found back."""
        (part,), (output,) = self.parts(node.input[0]), node.output
        node.input[0], node.output[0] = part.name, f"{output}.half"
        return [node, helper.make_node("Cast", [f"{output}.half"], [output], f"{output}.cast", to=TensorProto.FLOAT)]

    def _decoder(self, name: str, kind: Storage) -> onnx.NodeProto:
        inputs = [part.name for part in self.parts(name)]
        if kind == "float16":
            return helper.make_node("Cast", inputs, [name], name=f"{name}.cast", to=TensorProto.FLOAT)
        size = block_size(kind, self.weights[name].shape[0])
        return helper.make_node("DequantizeLinear", inputs, [name], name=f"{name}.decode", axis=0, block_size=size)


def plan_storage(weights: dict[str, Tensor], own: Set[str], matrices: Set[str], rule: Rule) -> dict[str, Storage]:
    """How to store the weights of a graph, as far as their shapes tell; matrices: the layers' products, `[in, out]`.

    own: the checkpoint's; others (rotary tables and the like) are computed, and rounded only where nothing is lost.
    """
    return {
        name: storage(weight, name in matrices, rule if name in own or rule == "lossless" else "fp32")
        for name, weight in weights.items()
        if weight.is_floating_point()
    }


def _looks_up(node: onnx.NodeProto) -> bool:
    """Whether a node takes whole rows of its first input."""
    return node.op_type == "Gather" and all(helper.get_attribute_value(each) == 0 for each in node.attribute)


def _pack(integers: NDArray[np.int8]) -> bytes:
    """Two 4-bit numbers a byte, the first in the low half."""
    flat = integers.reshape(-1).view(np.uint8) & 15
    flat = np.pad(flat, (0, flat.size % 2))
    return (flat[0::2] | (flat[1::2] << 4)).tobytes()
