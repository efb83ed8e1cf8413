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
TYPES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "int8": TensorProto.INT8,
    "int4": TensorProto.INT4,
    "int64": TensorProto.INT64,
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
    """

    half: bool = False
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    matrices: set[str] = field(default_factory=set)  # names of weights that `linear` multiplies with
    wide: set[str] = field(default_factory=set)  # names of weights that stay float32 in a graph of float16

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

    def linear(self, x: str, name: str, weight: Tensor, bias: Tensor | None = None) -> str:
        """`x @ weight.T + bias` of a torch `weight [out, in]`, stored transposed."""
        self.matrices.add(name + ".weight")
        y = self.op("MatMul", x, self.weight(name + ".weight", transposed(weight.detach())))
        return y if bias is None else self.op("Add", y, self.weight(name + ".bias", bias))

    def reshape(self, x: str, *shape: int) -> str:
        """`x` in another shape; 0 keeps the size of that axis, -1 takes what is left."""
        return self.op("Reshape", x, self.ints(*shape))

    def transpose(self, x: str, *axes: int, name: str | None = None) -> str:
        """`x` with its axes in another order."""
        return self.op("Transpose", x, name=name, perm=axes)

    def model(self, name: str, inputs: Sequence[Value], outputs: Sequence[Value]) -> onnx.ModelProto:
        """The graph without its weights."""
        graph = helper.make_graph(self.nodes, name, [v.proto() for v in inputs], [v.proto() for v in outputs])
        return helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION, producer_name="lantern-rt"
        )
