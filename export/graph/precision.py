"""How the weights of a graph are rounded and written: one at a time, and each a chunk at a time.

But for `int8`, only weights are rounded, never activations, logits or caches: a weight that is stored in another type
than the graph computes with is turned back by a node right before its first use, `Cast` for float16, `DequantizeLinear`
for integers, which runtimes fold or fuse when they load. Of a float16 table that rows are looked up in, only the rows
found are turned back. Matrices of the layers may be integers, in blocks along their input axis that share a scale;
everything else (embeddings, head) has float16 at the least. With `int8` all matrices, the head's too, have a scale for
each output, and are multiplied as integers. Large weights go to one file beside the graph, aligned for mapping.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple, cast, get_args

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper
from torch import Tensor

from ...bundle.manifest import Precision
from ...engines.graph_writer import TYPES
from ...engines.host import processor
from ...errors import CheckpointError, RequestError
from ..checkpoints.deferred import computed
from .onnx_ops import BLOCK_OPSET, MAX_INT8_ACTIVATION

_EXTERNAL_ABOVE = 1024  # bytes: smaller weights stay in the graph, where shape inference can read them
_ALIGNMENT = 4096
# `columns`: int8 with one scale for each output, multiplied as integers; `int8` and `int4` have one for each block
# along the inputs, and are turned back.
Storage = Literal["float32", "float16", "bfloat16", "int8", "int4", "columns"]
Compute = Literal["float32", "float16", "bfloat16"]
VQPrecision = Literal["fp32", "fp16", "int8"]
# `lossless`: float16 where that holds the weight exactly. Recorded as fp32, since it computes the same.
Rule = Precision | Literal["lossless"]

_USUAL: dict[str, Precision] = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}  # by what is computed in
_INTEGERS: dict[Rule, Storage] = {"int8-weights": "int8", "int4-weights": "int4", "int8": "columns"}
# The lowest of each type stays unused, so that scales serve both signs. Products of integers add pairs of neighbours in
# 16 bits on processors without VNNI, which holds 2 x 255 x 64: with 127 the scenes target's KL was 2e-2 there, and 3e-3
# instead of 4e-3 elsewhere.
_LARGEST = {"int8": 127, "int4": 7, "columns": 64}
# Numbers that share a scale. ONNX Runtime fuses powers of two from 16 on; the smaller a block, the better the
# fit and the larger the file. With float32 scales: 1.0625 bytes a weight for int8, 0.625 for int4; with those of graphs
# that compute in float16, 1.03 and 0.5625.
_BLOCKS: dict[Storage, tuple[int, ...]] = {"int8": (64, 32, 16), "int4": (32, 16)}
_HALF_ERROR = 2.0**-10  # of the norm; float16 has 11 bits, so only what falls out of its range errs so much
_INTEGER_PRODUCTS = {"avx_vnni", "avx512_vnni", "amx_int8", "asimddp"}  # instructions for sums of products of int8
_CHUNK = 1 << 23  # numbers held as float32 at a time


@dataclass(frozen=True)
class Precisions:
    """What the user chose. The drafter follows the target unless it has a precision of its own.

    compute: what target and drafter compute in; what they do not store as integers they store in it. lossless: graphs
    that are not rounded store in float16 what it holds exactly. vq: what the image decoder stores and multiplies.
    """

    target: Precision = "fp32"
    drafter: Precision | None = None
    compute: Compute = "float32"
    lossless: bool = False
    vq: VQPrecision = "fp32"

    def of(self, role: str) -> Precision:
        """The precision of a graph; image tokenizers are small and sensitive, and stay float32."""
        if role == "drafter":
            return self.drafter or self.target
        if role == "condition" and self.target != "fp32":
            return "bf16-safe"
        return self.target if role == "target" else "fp32"

    def rule(self, role: str) -> Rule:
        """How the weights of a graph are stored."""
        precision = self.of(role)
        return "lossless" if self.lossless and precision == "fp32" else precision


def read_precisions(
    target: str | None = None, drafter: str | None = None, compute: str = "float32", vq: str = "fp32"
) -> Precisions:
    """Precisions by the names that users give them; by default what is computed with is stored.

    `auto` is `int8` where this processor multiplies integers, with which it was the fastest at every size and number
    of nodes that was measured (docs/exporting.md), and `fp32` elsewhere.
    """
    if compute not in get_args(Compute):
        raise RequestError(f"--compute: found {compute!r}, expected float32, float16 or bfloat16")
    if vq not in get_args(VQPrecision):
        raise RequestError(f"--vq-precision: found {vq!r}, expected fp32, fp16 or int8")
    usual = _USUAL[compute]
    if target == "auto":
        best = "int8" if _INTEGER_PRODUCTS & set(processor().split()) else "fp32"
        target = best if compute == "float32" else None
    for option, value in (("precision", target), ("drafter-precision", drafter)):
        if value is not None and value not in get_args(Precision):
            known = ", ".join((*get_args(Precision), *(["auto"] if option == "precision" else [])))
            raise RequestError(f"--{option}: found {value!r}, expected one of {known}")
        takes = (None, usual, "int8-weights", "int4-weights")
        if value == "bf16" != usual or (compute != "float32" and value not in takes):
            expected = "--compute bfloat16" if value == "bf16" else f"{', '.join(takes[1:])} with --compute {compute}"
            raise RequestError(f"--{option}: found {value}, expected {expected}")
    stored = (cast(Precision, target or usual), cast(Precision | None, drafter))
    return Precisions(*stored, cast(Compute, compute), vq=cast(VQPrecision, vq))


def storage(weight: Tensor, matrix: bool, rule: Rule, compute: Compute = "float32") -> Storage:
    """How to store a weight that is float32 in the graph; `matrix`: it is `[in, out]` of a layer's product.

    Looks at shapes only: `resolve_dtype` looks at the numbers.
    """
    if rule == "fp32" or weight.ndim < 2:
        return "float32"
    integer = _INTEGERS.get(rule)
    half: Storage = "bfloat16" if compute == "bfloat16" else "float16"
    return integer if integer and matrix and block_size(integer, weight.shape[0]) else half


def resolve_dtype(name: str, weight: Tensor, planned: Storage, rule: Rule) -> Storage:
    """The planned storage, or float32 for numbers that float16 does not hold; an error where `rule` is fp16."""
    if planned != "float16":
        return planned
    if rule == "lossless":
        return "float16" if all(torch.equal(p.half().float(), p) for p in iter_chunks(weight)) else "float32"
    largest = error = norm = 0.0
    for chunk in iter_chunks(weight):
        largest = max(largest, float(chunk.abs().max()))
        error += float(torch.linalg.vector_norm(chunk.half().float() - chunk)) ** 2
        norm += float(torch.linalg.vector_norm(chunk)) ** 2
    if error <= _HALF_ERROR**2 * norm:  # false for the infinity that too large a number becomes
        return "float16"
    if rule == "fp16":
        found, remedy = f"numbers up to {largest:.3g}", "export with precision bf16-safe, or vq-precision fp32"
        raise CheckpointError(field=name, found=found, expected="numbers that float16 holds", remedy=remedy)
    return "float32"


def iter_chunks(weight: Tensor, rows: int = 1) -> Iterator[Tensor]:
    """A weight in float32, some rows at a time (a multiple of `rows`), so that it is never there as a whole."""
    made = computed(weight)
    if made.ndim == 0:
        yield made.float()
        return
    step = max(rows, _CHUNK // max(1, made[:1].numel()) // rows * rows)
    for start in range(0, len(made), step):
        yield made[start : start + step].float().contiguous()


def block_size(kind: Storage, inputs: int) -> int | None:
    """Numbers along the input axis that share a scale; None where no block size divides it."""
    return inputs if kind == "columns" else next((size for size in _BLOCKS[kind] if inputs % size == 0), None)


def quantise(
    weight: Tensor, kind: Storage, scales: Tensor | None = None, compute: Compute = "float32"
) -> tuple[Tensor, Tensor]:
    """`weight [in, out]` to integers `[in, out]` int8 and scales `[in / block, out]` float32, round to nearest.

    scales: `[1, out]`, where `weight` holds some inputs of those that share them. compute: scales that this type holds.
    """
    size = len(weight) if scales is not None else block_size(kind, len(weight)) or len(weight)
    largest, blocks = _LARGEST[kind], weight.reshape(-1, size, weight.shape[1])
    if scales is None:
        scales = blocks.abs().amax(1) / largest  # [blocks, out]
        scales = scales.to(getattr(torch, compute)).float()
    steps = blocks / torch.where(scales > 0, scales, 1.0)[:, None]
    return steps.round_().clamp_(-largest, largest).to(torch.int8).view(weight.shape), scales


def fake_quantize(weight: Tensor, kind: Storage, matrix: bool, compute: Compute = "float32") -> Tensor:
    """The float32 numbers a runtime computes with, rounded a chunk at a time; a module's matrix is `[out, in]`.

    compute: as for `quantise`.
    """
    made = computed(weight)
    if kind == "float32" or (kind in _LARGEST and not matrix):
        return made.float()
    result = made.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    if kind in ("float16", "bfloat16"):
        for numbers in torch.split(result.view(-1), _CHUNK):
            numbers.copy_(numbers.to(getattr(torch, kind)))
        return result
    step = max(1, _CHUNK // made.shape[1])  # rows of the module's matrix: columns of the stored one
    for rows in torch.split(result, step):
        integers, scales = quantise(rows.t(), kind, compute=compute)
        rows[:] = (integers.view(len(scales), -1, len(rows)) * scales[:, None]).view(integers.shape).t()
    return result


def round_nodes(x: Tensor) -> Tensor:
    """`x [..., inputs]` as products of integers see it: each node in 127 steps to either side of 0."""
    scale = x.abs().amax(-1, keepdim=True) / MAX_INT8_ACTIVATION
    return (x / torch.where(scale > 0, scale, 1.0)).round_() * scale


class Part(NamedTuple):
    """One initialiser: a weight, or the integers or the scales of one."""

    name: str
    kind: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size in the file."""
        numbers = int(np.prod(self.shape, dtype=np.int64))
        return (numbers + 1) // 2 if self.kind == "int4" else numbers * int(getattr(torch, self.kind).itemsize)


@dataclass
class GraphFile:
    """A graph that is described but not written. `storages` may still change to float32 while it is written."""

    model: onnx.ModelProto
    weights: dict[str, Tensor]
    storages: dict[str, Storage]
    matrices: set[str]
    rule: Rule
    compute: Compute = "float32"  # scales are of this type, and float16 weights of float16 are used as they are stored

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
            return [Part(name if self.compute == kind else f"{name}.half", kind, shape)]
        if kind == "bfloat16":
            return [Part(f"{name}.bfloat16", kind, shape)]
        if kind == "columns":
            return [Part(f"{name}.int8", "int8", shape), Part(f"{name}.scales", "float32", shape[1:])]
        size = block_size(kind, shape[0]) or 1
        scales = Part(f"{name}.scales", self.compute, (shape[0] // size, shape[1]))
        return [Part(f"{name}.{kind}", kind, shape), scales]

    def write(self, path: Path, progress: Callable[[int], None] = lambda count: None) -> list[Path]:
        """Write `path`, and `path.data` if the weights are larger than a megabyte; returns the files written.

        `progress` is told of every so many bytes of weights.
        """
        external = path.with_name(path.name + ".data") if self.size > 1 << 20 else None
        with external.open("wb") if external else nullcontext() as file:
            for name in self.weights:
                if name in self.storages:
                    weight, kind = self.weights[name], self.storages[name]
                    self.storages[name] = resolve_dtype(name, weight, kind, self.rule)
                    if self.compute == "float16" and kind in _LARGEST:  # what integers times scales give must fit, too
                        resolve_dtype(name, weight, "float16", "fp16")
                self._write_weight(name, file, progress)
        self._insert_decoders()
        path.write_bytes(self.model.SerializeToString())
        return [path, external] if external else [path]

    def _write_weight(self, name: str, file: BinaryIO | None, progress: Callable[[int], None]) -> None:
        scales: list[bytes] = []  # of integers, filled in while those are written
        for part, chunks in zip(self.parts(name), (self._chunks(name, scales), scales), strict=False):
            proto = self.model.graph.initializer.add(name=part.name, dims=part.shape, data_type=TYPES[part.kind])
            if file is None or part.bytes <= _EXTERNAL_ABOVE:
                proto.raw_data = b"".join(chunks)
                progress(part.bytes)
                continue
            file.write(b"\0" * (-file.tell() % _ALIGNMENT))
            proto.data_location = TensorProto.EXTERNAL
            where = {"location": Path(file.name).name, "offset": file.tell(), "length": part.bytes}
            for key, value in where.items():
                proto.external_data.add(key=key, value=str(value))
            for data in chunks:
                file.write(data)
                progress(len(data))

    def _chunks(self, name: str, scales: list[bytes]) -> Iterator[bytes]:
        """The bytes of a weight's first part; fills in the scales of integers."""
        weight, kind = self.weights[name], self.storages.get(name)
        if kind is None:
            yield np.ascontiguousarray(computed(weight).numpy()).tobytes()
        elif kind in ("float32", "float16", "bfloat16"):
            for chunk in iter_chunks(weight):
                yield _as_bytes(chunk, kind)
        elif kind == "columns":
            largest = torch.stack([chunk.abs().amax(0) for chunk in iter_chunks(weight)]).amax(0, keepdim=True)
            scales.append((largest[0] / _LARGEST[kind]).numpy().tobytes())
            for chunk in iter_chunks(weight):
                yield quantise(chunk, kind, largest / _LARGEST[kind])[0].numpy().tobytes()
        else:
            for chunk in iter_chunks(weight, block_size(kind, weight.shape[0]) or 1):
                integers, own = quantise(chunk, kind, compute=self.compute)
                scales.append(_as_bytes(own, self.compute))
                yield integers.numpy().tobytes() if kind == "int8" else _pack(integers.numpy())

    def _insert_decoders(self) -> None:
        """Right before its first use: runtimes that fold nothing then hold one decoded weight at a time."""
        nodes = list(self.model.graph.node)
        used = {"float32", "columns"} | ({"float16"} if self.compute == "float16" else set())  # as they are stored
        decoded = {name: kind for name, kind in self.storages.items() if kind not in used}
        tables = {name for name, kind in decoded.items() if kind in ("float16", "bfloat16")} - {
            name for node in nodes for i, name in enumerate(node.input) if not (i == 0 and _looks_up(node))
        }
        read: set[str] = set()
        del self.model.graph.node[:]
        for node in nodes:
            read.update(node.input)
            if node.input and node.input[0] in tables:
                self.model.graph.node.extend(self._looked_up(node))
                continue
            for name in node.input:
                if kind := decoded.pop(name, None):
                    self.model.graph.node.extend(self._decoder(name, kind))
            self.model.graph.node.append(node)
        products = {f"{name}.int8" if kind == "columns" else name for name, kind in self.storages.items()}
        assert products <= read, "weights that no node reads"
        if any(kind in ("int8", "int4") for kind in self.storages.values()):
            self.model.opset_import[0].version = BLOCK_OPSET

    def _looked_up(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """A look-up in a float16 table, and the node that turns the rows found back."""
        (part,), (output,) = self.parts(node.input[0]), node.output
        node.input[0], node.output[0] = part.name, f"{output}.half"
        return [node, helper.make_node("Cast", [f"{output}.half"], [output], f"{output}.cast", to=TensorProto.FLOAT)]

    def _decoder(self, name: str, kind: Storage) -> list[onnx.NodeProto]:
        inputs, nodes = [part.name for part in self.parts(name)], list[onnx.NodeProto]()
        if kind in ("float16", "bfloat16"):
            return [helper.make_node("Cast", inputs, [name], name=f"{name}.cast", to=TensorProto.FLOAT)]
        if self.compute == "bfloat16":  # graphs for CPUs compute in float32
            wide = f"{name}.wide_scales"
            nodes.append(helper.make_node("Cast", inputs[1:], [wide], name=wide, to=TensorProto.FLOAT))
            inputs[1] = wide
        size = block_size(kind, self.weights[name].shape[0])
        node = helper.make_node("DequantizeLinear", inputs, [name], name=f"{name}.decode", axis=0, block_size=size)
        return [*nodes, node]


def plan_storage(
    weights: dict[str, Tensor], own: Set[str], matrices: Set[str], rule: Rule, compute: Compute = "float32"
) -> dict[str, Storage]:
    """How to store the weights of a graph, as far as their shapes tell; matrices: the layers' products, `[in, out]`.

    own: the checkpoint's; others (rotary tables and the like) are computed, and rounded only where nothing is lost.
    """
    return {
        name: storage(weight, name in matrices, rule if name in own or rule == "lossless" else "fp32", compute)
        for name, weight in weights.items()
        if weight.is_floating_point()
    }


def _looks_up(node: onnx.NodeProto) -> bool:
    return node.op_type == "Gather" and all(helper.get_attribute_value(each) == 0 for each in node.attribute)


def _as_bytes(numbers: Tensor, kind: str) -> bytes:
    return numbers.to(getattr(torch, kind)).reshape(-1).view(torch.uint8).numpy().tobytes()


def _pack(integers: NDArray[np.int8]) -> bytes:
    """Two 4-bit numbers a byte, the first in the low half."""
    flat = integers.reshape(-1).view(np.uint8) & 15
    flat = np.pad(flat, (0, flat.size % 2))
    return (flat[0::2] | (flat[1::2] << 4)).tobytes()
