"""Describing an ONNX graph op by op for export: weights are tensors, often deferred or mapped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
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
        self.rounded: dict[str, tuple[str, str]] = {}  # values as integers, with their scales

    def weight(self, name: str, tensor: Tensor, wide: bool = False) -> str:
        """A constant of the graph; the same name may be given twice."""
        self.weights.setdefault(name, tensor.detach())
        if wide:
            self.wide.add(name)
        return name

    def number(self, name: str, value: float, wide: bool = False) -> str:
        """A constant number."""
        return self.weight(name, torch.tensor(value), wide)

    def constant(self, array: NDArray[Any], name: str | None = None) -> str:
        return self.weight(name or f"constant_{len(self.weights)}", torch.from_numpy(array))

    def linear(self, x: str, name: str, weight: Tensor, output: str | None = None) -> str:
        """`x @ weight.T` of a torch `weight [out, in]`, stored transposed; output: name of the result."""
        self.matrices.add(name)
        stored = self.weight(name, transposed(weight.detach()))
        if self.integers:
            return self._integer_product(x, stored, weight.shape[1], output)
        return self.op("MatMul", x, stored, name=output)

    def _integer_product(self, x: str, weight: str, inputs: int, output: str | None) -> str:
        """A product of integers, whose sums are exact in any order, times both scales.

        Every node has a scale of its own, so that its result is the same whatever shares the pass. A node of zeros has
        scale 0, and whatever integers its division gives count nothing.
        """
        if x not in self.rounded:
            largest = self.op("ReduceMax", self.op("Abs", x), self.ints(-1), keepdims=1)
            scale = self.op("Mul", largest, self.number("integer_step", 1 / LARGEST_NODE))  # [rows, nodes, 1]
            if not self.rounded:  # as many zero points as scales, the same for all
                shape = self.op("Concat", self.op("Shape", x, end=2), self.ints(1), axis=0)
                self.op("ConstantOfShape", shape, name="integer_zeros", value=np.array([_ZERO], np.uint8))
            integers = self.op("QuantizeLinear", x, scale, "integer_zeros", axis=-1, block_size=inputs)
            self.rounded[x] = integers, scale
        integers, scale = self.rounded[x]
        zero = self.weight("integer_zero", torch.tensor(_ZERO, dtype=torch.uint8))
        sums = self.cast(self.op("MatMulInteger", integers, f"{weight}.int8", zero), "float32")
        return self.op("Mul", self.op("Mul", sums, f"{weight}.scales"), scale, name=output)

    def model(self, name: str, inputs: Sequence[Value], outputs: Sequence[Value]) -> onnx.ModelProto:
        """The graph without its weights."""
        model = onnx.load_from_string(self.to_bytes((), (), name))
        model.ir_version, model.producer_name = IR_VERSION, "lantern-rt"
        model.graph.input.extend(value.proto() for value in inputs)
        model.graph.output.extend(value.proto() for value in outputs)
        return model
