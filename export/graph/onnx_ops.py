"""Describing an ONNX graph op by op for export: weights are tensors, often deferred or mapped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import torch
from numpy.typing import NDArray
from onnx import helper
from torch import Tensor

from ...engines.graph_writer import TYPES, GraphWriter
from ..checkpoints.deferred import transposed

OPSET, IR_VERSION = 20, 10
BLOCK_OPSET = 21  # the first with scales for blocks, and with 4-bit integers
LARGEST_NODE, _ZERO = 127, 128  # of activations as integers: uint8, with the sign in an offset
# What these read has numbers far larger than the others: each is two integers, the second what the first misses. With
# one, and weights rounded to nearest, the target of `scenes` lost 0.05 nats a token, with two 0.02.
FINE = (".qkv.weight", ".down.weight")
_FINER = 128  # steps of the second in one of the first, half of which rounding misses at most


@dataclass(frozen=True)
class Value:
    """A graph input or output: `axes` are sizes, or names of sizes that vary from call to call."""

    name: str
    axes: tuple[int | str, ...]
    dtype: str = "float32"

    def proto(self) -> onnx.ValueInfoProto:
        """The same in ONNX."""
        return helper.make_tensor_value_info(self.name, TYPES[self.dtype], list(self.axes))


class Ops(GraphWriter):
    """A graph being written for export.

    Args:
        half: it computes in float16, but for what is `wide`: weights of that name stay float32.
        integers: `linear` multiplies integers of 8 bits: weights with a scale per output, activations with one per
            node.
    """

    def __init__(self, half: bool = False, integers: bool = False) -> None:
        super().__init__({"": BLOCK_OPSET if integers else OPSET})
        self.half, self.integers = half, integers
        self.matrices: set[str] = set()  # names of weights that `linear` multiplies with
        self.wide: set[str] = set()  # names of weights that stay float32 in a graph of float16
        self.rounded: dict[str, tuple[list[str], str | None]] = {}  # values as integers, with scales of nodes
        self.steps: dict[str, Tensor] = {}  # of values that have one for all nodes, which no number exceeds 127 times

    def weight(self, name: str, tensor: Tensor, wide: bool = False) -> str:
        """A constant of the graph; the same name may be given twice."""
        self.weights.setdefault(name, tensor.detach())
        if wide:
            self.wide.add(name)
        return name

    def number(self, name: str, value: float) -> str:
        """A constant number."""
        return self.weight(name, torch.tensor(value))

    def wide_weight(self, name: str, tensor: Tensor) -> str:
        """A constant of norms, in the type of `wide_value`."""
        stored = self.weight(name, tensor, wide=True)
        return self.cast(stored, "float64") if self.integers else stored

    def wide_value(self, x: str) -> str:
        """`x` as norms compute: in float32, but in float64 beside products of integers, where last bits move images.

        In float32 releases of ONNX Runtime differ in them: 1.25 and 1.31 drew other images.
        """
        return self.cast(x, "float64" if self.integers else "float32") if self.half or self.integers else x

    def constant(self, array: NDArray[Any], name: str | None = None) -> str:
        return self.weight(name or f"constant_{len(self.weights)}", torch.from_numpy(array))

    def linear(self, x: str, name: str, weight: Tensor, output: str | None = None) -> str:
        """`x @ weight.T` of a torch `weight [out, in]`, stored transposed; output: name of the result."""
        self.matrices.add(name)
        stored = self.weight(name, transposed(weight.detach()))
        if self.integers:
            return self._integer_product(x, stored, name.endswith(FINE), output)
        return self.op("MatMul", x, stored, name=output)

    def _integer_product(self, x: str, weight: str, fine: bool, output: str | None) -> str:
        """A product of integers, whose sums are exact in any order, times the scales of both.

        It is written as one of floats that integers are turned back to, which ONNX Runtime fuses.
        """
        if x not in self.rounded:
            self.rounded[x] = self._digits(x, fine)
        parts, scale = self.rounded[x]
        kernel = self.op("DequantizeLinear", f"{weight}.int8", f"{weight}.scales", name=weight, axis=1)
        sums = self.op("MatMul", parts[0], kernel, name=None if scale or fine else output)
        if fine:
            sums = self.op("Add", sums, self.op("MatMul", parts[1], kernel), name=None if scale else output)
        return self.op("Mul", sums, scale, name=output) if scale else sums

    def _digits(self, x: str, fine: bool) -> tuple[list[str], str | None]:
        """A value as a sum of integers of 8 bits, turned back, and the scale of each node that it lacks.

        No scale follows from what else shares the pass: a node has its own, unless its parts are fine and `steps` has
        one for all. A node of zeros has scale 0, and whatever integers its division gives count nothing.
        """
        scale, step = None, self.steps.get(x) if fine else None
        if step is None:
            largest = self.op("ReduceMax", self.op("Abs", x), self.ints(-1), keepdims=1)
            scale = self.op("Mul", largest, self.number("integer_step", 1 / LARGEST_NODE))  # [rows, nodes, 1]
            x, step = self.op("Div", x, scale), torch.tensor(1.0)
        parts = [self._rounded(x, step)]
        if fine:
            parts.append(self._rounded(self.op("Sub", x, parts[0]), step / _FINER))
        return parts, scale

    def _rounded(self, x: str, step: Tensor) -> str:
        scale = self.weight(f"{x}.step", step)
        parameters = scale, self.weight("integer_zero", torch.tensor(_ZERO, dtype=torch.uint8))
        return self.op("DequantizeLinear", self.op("QuantizeLinear", x, *parameters), *parameters)

    def model(self, name: str, inputs: Sequence[Value], outputs: Sequence[Value]) -> onnx.ModelProto:
        """The graph without its weights."""
        model = onnx.load_from_string(self.to_bytes((), (), name))
        model.ir_version, model.producer_name = IR_VERSION, "lantern-rt"
        model.graph.input.extend(value.proto() for value in inputs)
        model.graph.output.extend(value.proto() for value in outputs)
        return model
