"""Writer of ONNX graphs for export, op by op; its weights are tensors, which may be deferred or memory-mapped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...engines.contracts import TensorSpec
from ...engines.graph_writer import GraphWriter
from ..checkpoints.deferred import defer_transpose

OPSET = 20
IR_VERSION = 10
BLOCK_OPSET = 21  # the first opset with 4-bit integers and block scales
MAX_INT8_ACTIVATION = 127  # activations are rounded to integers in -127 .. 127
_ZERO_POINT = 128  # added to these integers, which are stored as uint8
# The inputs of these matrices have outliers. So each activation is the sum of two integers; the second one represents
# the rounding error of the first. With weights rounded to nearest, the target of `scenes` lost 0.05 nats per token with
# one integer and 0.02 with two.
TWO_INTEGERS = (".qkv.weight", ".down.weight", ".modulation.weight")
_SECOND_STEPS = 128  # a step of the first integer has this many steps of the second


class ExportGraphWriter(GraphWriter):
    """Writer of an ONNX graph for export.

    Args:
        is_float16: whether the graph computes in float16; weights in `float32_names` stay float32.
        int8_matmul: whether `write_linear` multiplies 8-bit integers. Weights have a scale per output, and activations
            have a scale per node.
    """

    def __init__(self, is_float16: bool = False, int8_matmul: bool = False) -> None:
        super().__init__({"": BLOCK_OPSET if int8_matmul else OPSET})
        self.is_float16 = is_float16
        self.int8_matmul = int8_matmul
        self.matrix_names: set[str] = set()  # names of the weights that `write_linear` added
        self.float32_names: set[str] = set()  # names of weights that stay float32 in a float16 graph
        self.quantized: dict[str, tuple[str, str | None, str]] = {}  # results of `_write_quantize` by activation name
        # Fixed steps of activations by name. Only activations with a known maximum have a fixed step.
        self.steps: dict[str, Tensor] = {}

    def add_weight(self, name: str, tensor: Tensor, keep_float32: bool = False) -> str:
        """Add a weight and return its name. If the name was added before, the first tensor is kept.

        With `keep_float32`, the weight stays float32 in a float16 graph.
        """
        self.weights.setdefault(name, tensor.detach())
        if keep_float32:
            self.float32_names.add(name)
        return name

    def add_number(self, name: str, value: float) -> str:
        return self.add_weight(name, torch.tensor(value))

    def add_norm_weight(self, name: str, tensor: Tensor) -> str:
        """Add a weight of a norm, and return its name in the type in which norms compute."""
        stored = self.add_weight(name, tensor, keep_float32=True)
        return self.cast(stored, "float64") if self.int8_matmul else stored

    def cast_for_norm(self, x: str) -> str:
        """Write a cast of `x` to the type that norms compute in: float32, but float64 with int8 matmul.

        With int8 matmul, the last bit of a norm can change an image, and ONNX Runtime 1.25 and 1.31 differ in that bit.
        """
        if not self.is_float16 and not self.int8_matmul:
            return x
        return self.cast(x, "float64" if self.int8_matmul else "float32")

    def add_constant(self, array: NDArray[Any], name: str | None = None) -> str:
        return self.add_weight(name or f"constant_{len(self.weights)}", torch.from_numpy(array))

    def write_linear(self, x: str, name: str, weight: Tensor, output_name: str | None = None) -> str:
        """Write `x @ weight.T`, with a PyTorch weight `[out, in]` that is stored transposed."""
        self.matrix_names.add(name)
        stored = self.add_weight(name, defer_transpose(weight.detach()))
        if self.int8_matmul:
            return self._write_int8_matmul(x, stored, name.endswith(TWO_INTEGERS), output_name)
        return self.op("MatMul", x, stored, name=output_name)

    def _write_int8_matmul(self, x: str, weight: str, with_residual: bool, output_name: str | None) -> str:
        """Write a matrix product of 8-bit integers, multiplied by the scales of activations and weight.

        The nodes dequantize both factors and multiply floats. ONNX Runtime fuses them to a product of integers, whose
        sums have no rounding errors.
        """
        if x not in self.quantized:
            self.quantized[x] = self._write_quantize(x, with_residual)
        integers, scale, step = self.quantized[x]
        kernel = self.op("DequantizeLinear", f"{weight}.int8", f"{weight}.scales", name=weight, axis=1)
        sums = self.op(
            "MatMul",
            self._write_dequantize(integers, step),
            kernel,
            name=None if scale or with_residual else output_name,
        )
        if with_residual:  # one matrix product for both integers, so that the weight is read only once
            first, second = self.add_node("Split", [sums], [f"{sums}.first", f"{sums}.second"], axis=0, num_outputs=2)
            second = self.op("Mul", second, self.add_number("second_step", 1 / _SECOND_STEPS))
            sums = self.op("Add", first, second, name=None if scale else output_name)
        return self.op("Mul", sums, scale, name=output_name) if scale else sums

    def _write_quantize(self, x: str, with_residual: bool) -> tuple[str, str | None, str]:
        """Write the conversion of activations `[nodes, rows, width]` to 8-bit integers.

        With a residual, second integers hold the rounding errors of the first. They follow along the first axis, as if
        there were twice as many nodes. Each node has a scale of its own or, with a residual, a fixed step of
        `self.steps`. If all activations of a node are 0, its integers come from a division by 0; the scale 0 cancels
        them.

        Returns the integers, the scale `[nodes, rows, 1]` by which results must be multiplied (None with a fixed step),
        and the step of the first integers.
        """
        scale = None
        step = self.steps.get(x) if with_residual else None
        if step is None:
            largest = self.op("ReduceMax", self.op("Abs", x), self.int_vector(-1), keepdims=1)
            scale = self.op(
                "Mul", largest, self.add_number("integer_step", 1 / MAX_INT8_ACTIVATION)
            )  # [nodes, rows, 1]
            x = self.op("Div", x, scale)
            step = torch.tensor(1.0)
        first_step = self.add_weight(f"{x}.step", step)
        integers = self.op("QuantizeLinear", x, first_step, self._add_zero_point())
        if with_residual:
            rest = self.op("Sub", x, self._write_dequantize(integers, first_step))
            second_step = self.add_weight(f"{rest}.step", step / _SECOND_STEPS)
            integers = self.op(
                "Concat", integers, self.op("QuantizeLinear", rest, second_step, self._add_zero_point()), axis=0
            )
        return integers, scale, first_step

    def _write_dequantize(self, integers: str, step: str) -> str:
        return self.op("DequantizeLinear", integers, step, self._add_zero_point())

    def _add_zero_point(self) -> str:
        return self.add_weight("integer_zero", torch.tensor(_ZERO_POINT, dtype=torch.uint8))

    def make_model(self, name: str, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> onnx.ModelProto:
        model = onnx.load_from_string(self.to_bytes(inputs, outputs, name))
        model.ir_version = IR_VERSION
        model.producer_name = "lantern-rt"
        return model
