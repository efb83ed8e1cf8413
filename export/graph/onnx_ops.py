"""Describing an ONNX graph op by op: values are names, weights are tensors, often deferred or mapped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx
import torch
from onnx import TensorProto, helper
from torch import Tensor

from ..checkpoints.deferred import transposed

OPSET, IR_VERSION = 20, 10
BLOCK_OPSET = 21  # the first with scales for blocks, and with 4-bit integers
LARGEST_NODE, _ZERO = 127, 128  # of activations as integers: uint8, with the sign in an offset
TYPES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "int8": TensorProto.INT8,
    "int4": TensorProto.INT4,
    "int64": TensorProto.INT64,
    "uint8": TensorProto.UINT8,
    "bool": TensorProto.BOOL,
}


@dataclass(frozen=True)
class Value:
    """A graph input or output: `axes` are sizes, or names of sizes that vary from call to call."""

    name: str
    axes: tuple[int | str, ...]
    dtype: str = "float32"

    def proto(self) -> onnx.ValueInfoProto:
        """The same in ONNX."""
        return helper.make_tensor_value_info(self.name, TYPES[self.dtype], list(self.axes))


@dataclass
class Ops:
    """A graph being written. Every method returns names of values.

    half: it computes in float16, but for what lies between `widen` and `narrow`; weights there are `wide`, float32.
    integers: `linear` multiplies integers of 8 bits: weights with a scale per output, activations with one per node.
    """

    half: bool = False
    integers: bool = False
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    matrices: set[str] = field(default_factory=set)  # names of weights that `linear` multiplies with
    wide: set[str] = field(default_factory=set)  # names of weights that stay float32 in a graph of float16
    rounded: dict[str, tuple[str, str]] = field(default_factory=dict)  # values as integers, with their scales

    def weight(self, name: str, tensor: Tensor, wide: bool = False) -> str:
        """A constant of the graph; the same name may be given twice."""
        self.weights.setdefault(name, tensor.detach())
        if wide:
            self.wide.add(name)
        return name

    def number(self, name: str, value: float, wide: bool = False) -> str:
        """A constant number."""
        return self.weight(name, torch.tensor(value), wide)

    def widen(self, x: str, name: str | None = None) -> str:
        """`x` in float32."""
        return self.op("Cast", x, name=name, to=TensorProto.FLOAT) if self.half else x

    def narrow(self, x: str, name: str | None = None) -> str:
        """`x` in what the graph computes in."""
        return self.op("Cast", x, name=name, to=TensorProto.FLOAT16) if self.half else x

    def ints(self, *values: int) -> str:
        """A constant int64 vector, for axes and shapes."""
        return self.weight("ints_" + "_".join(map(str, values)).replace("-", "m"), torch.tensor(values))

    def many(self, op: str, *inputs: str, outputs: Sequence[str], **attributes: Any) -> list[str]:
        """An op with named outputs."""
        self.nodes.append(helper.make_node(op, list(inputs), list(outputs), name=outputs[0], **attributes))
        return list(outputs)

    def op(self, op: str, *inputs: str, name: str | None = None, **attributes: Any) -> str:
        """An op with one output, named after the op unless told otherwise."""
        return self.many(op, *inputs, outputs=[name or f"{op.lower()}_{len(self.nodes)}"], **attributes)[0]

    def linear(self, x: str, name: str, weight: Tensor, bias: Tensor | None = None, output: str | None = None) -> str:
        """`x @ weight.T + bias` of a torch `weight [out, in]`, stored transposed; output: name of the result."""
        self.matrices.add(name + ".weight")
        stored, own = self.weight(name + ".weight", transposed(weight.detach())), output if bias is None else None
        if self.integers:
            y = self._integer_product(x, stored, weight.shape[1], own)
        else:
            y = self.op("MatMul", x, stored, name=own)
        return y if bias is None else self.op("Add", y, self.weight(name + ".bias", bias), name=output)

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
                value = helper.make_tensor("", TensorProto.UINT8, [1], [_ZERO])
                self.op("ConstantOfShape", shape, name="integer_zeros", value=value)
            integers = self.op("QuantizeLinear", x, scale, "integer_zeros", axis=-1, block_size=inputs)
            self.rounded[x] = integers, scale
        integers, scale = self.rounded[x]
        zero = self.weight("integer_zero", torch.tensor(_ZERO, dtype=torch.uint8))
        sums = self.op("Cast", self.op("MatMulInteger", integers, f"{weight}.int8", zero), to=TensorProto.FLOAT)
        return self.op("Mul", self.op("Mul", sums, f"{weight}.scales"), scale, name=output)

    def reshape(self, x: str, *shape: int) -> str:
        """`x` in another shape; 0 keeps the size of that axis, -1 takes what is left."""
        return self.op("Reshape", x, self.ints(*shape))

    def transpose(self, x: str, *axes: int, name: str | None = None) -> str:
        """`x` with its axes in another order."""
        return self.op("Transpose", x, name=name, perm=axes)

    def model(self, name: str, inputs: Sequence[Value], outputs: Sequence[Value]) -> onnx.ModelProto:
        """The graph without its weights."""
        graph = helper.make_graph(self.nodes, name, [v.proto() for v in inputs], [v.proto() for v in outputs])
        opsets = [helper.make_opsetid("", BLOCK_OPSET if self.integers else OPSET)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="lantern-rt")
