"""What decoding keeps in memory, in bytes, worked out from sizes alone: before anything is allocated."""

from __future__ import annotations

from ..bundle.files import Bundle
from ..bundle.manifest import DecoderSpec, DrafterSpec
from ..bundle.onnx_scan import float_weights
from ..errors import BundleError, RequestError
from ..inputs import brief

FFN_RATIO = 3  # intermediate_size over hidden_size: 8/3 in Llama-style models, rounded up
MOST_WEIGHTS = 1 << 50
INTEGERS = ("int8-weights", "int4-weights")  # of weights alone, turned back to be multiplied
PRODUCTS = "int8"  # of weights and what they are multiplied with


def cache_bytes(spec: DecoderSpec | DrafterSpec, rows: int, columns: int, size: int) -> int:
    """Keys and values of so many columns. size: bytes of a number."""
    return 2 * spec.num_layers * columns * rows * spec.num_kv_heads * spec.head_dim * size


def pass_bytes(spec: DecoderSpec | DrafterSpec, rows: int, nodes: int, past: int, size: int) -> int:
    """A pass over `nodes` nodes of every row, at least: logits, and what one layer computes."""
    logits = nodes * spec.vocab_size * 4  # float32
    heads = spec.hidden_size // spec.head_dim
    scores = nodes * (past + nodes) * (2 * heads + 1) * size  # the mask, two copies of one layer's scores
    states = nodes * spec.hidden_size * (4 + 2 * FFN_RATIO) * size  # of one layer: states, gates and projections
    return rows * (logits + scores + states)


def weight_bytes(bundle: Bundle, role: str) -> int:
    """A graph's weights as ONNX Runtime keeps them on a CPU, where every pass reads them once.

    Floats are loaded as float32, however they are stored; integers stay what they are.
    Raises: BundleError: the graph cannot be read, or claims what no file holds.
    """
    manifest = bundle.manifest
    decoder = {"target": manifest.target, "drafter": manifest.drafter}.get(role)
    precision = decoder.precision if decoder else manifest.vq_precision if role == "vq_decoder" else None
    if precision in (*INTEGERS, PRODUCTS):
        return sum(entry.bytes for name, entry in manifest.files.items() if name in (role, f"{role}.data"))
    path = bundle.path(role)
    try:
        weights = float_weights(path)
        if weights >= MOST_WEIGHTS:
            raise ValueError("more weights than any file holds")
    except (ValueError, OSError) as error:
        raise BundleError(
            field=str(path), found=brief(error), expected="an ONNX graph", remedy="export the bundle again"
        ) from error
    return 4 * weights


def check_products(bundle: Bundle, target: str, drafter: str | None = None) -> None:
    """Raises: RequestError: where a decoder runs, such as `onnxruntime-cuda`, there are no products as it has them."""
    for spec, where in ((bundle.manifest.target, target), (bundle.manifest.drafter, drafter or target)):
        if spec is not None and spec.precision == PRODUCTS and where.startswith("onnxruntime-openvino"):
            raise RequestError(
                f"bundle {bundle.manifest.name} multiplies integers (int8), which OpenVINO does not",
                found=where,
                remedy="export it with --precision fp32, or use provider cpu",
            )
        mixed = spec is not None and spec.precision in INTEGERS and bundle.manifest.target.dtype == "bfloat16"
        if mixed and where == "onnxruntime-cuda":
            raise RequestError(
                f"bundle {bundle.manifest.name} multiplies bfloat16 with integers, which ONNX Runtime does not",
                found=where,
                remedy="export it with --compute float16, or build plans of TensorRT",
            )
