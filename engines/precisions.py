"""Quantized precisions of decoders, and a check that a backend supports the precisions of a bundle."""

from __future__ import annotations

from ..bundle.files import Bundle
from ..errors import RequestError

INTEGER_WEIGHTS = ("int8-weights", "int4-weights")  # integer weights, dequantized before they are multiplied
INT8 = "int8"  # integer weights and activations, multiplied as integers


def check_matmul_support(bundle: Bundle, target: str, drafter: str | None = None) -> None:
    """Raise RequestError if a backend, such as `onnxruntime-cuda`, lacks the quantized matmul of a bundle's decoder."""
    for spec, where in ((bundle.manifest.target, target), (bundle.manifest.drafter, drafter or target)):
        if spec is not None and spec.precision == INT8 and where.startswith("onnxruntime-openvino"):
            raise RequestError(
                f"bundle {bundle.manifest.name} multiplies integers (int8), which OpenVINO cannot do",
                found=where,
                remedy="export it with --precision fp32, or use provider cpu",
            )
        mixed = spec is not None and spec.precision in INTEGER_WEIGHTS and bundle.manifest.target.dtype == "bfloat16"
        if mixed and where == "onnxruntime-cuda":
            raise RequestError(
                f"bundle {bundle.manifest.name} multiplies bfloat16 with integers, which ONNX Runtime cannot do",
                found=where,
                remedy="export it with --compute float16, or build TensorRT engines",
            )
