"""Precisions that the user may choose, and the stored type of each weight.

Only weights are rounded, and with `int8` activations, too. Matrices of the layers may be integers with a scale for each
block along the input axis; other weights (embeddings, head) are float16 or float32. With `int8`, all matrices, the head
included, have a scale for each output and are multiplied as integers.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from ...bundle.manifest import DECODERS, Precision
from ...engines.host import describe_processor
from ...errors import CheckpointError, RequestError
from ..checkpoints.deferred import compute_deferred_tensor
from .onnx_ops import MAX_INT8_ACTIVATION

# `int8` and `int4` have a scale for each block along the input axis and are dequantized before the product. `columns`
# is int8 with a scale for each output and is multiplied as integers.
StorageType = Literal["float32", "float16", "bfloat16", "int8", "int4", "columns"]
ComputeType = Literal["float32", "float16", "bfloat16"]
VQPrecision = Literal["fp32", "fp16", "int8"]
# `lossless` stores float16 if this changes no number. The manifest records fp32, because the results are the same.
StorageRule = Precision | Literal["lossless"]

# Default precision by compute type.
_DEFAULTS: dict[str, Precision] = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_INTEGER_STORAGE: dict[StorageRule, StorageType] = {"int8-weights": "int8", "int4-weights": "int4", "int8": "columns"}
# Maximum integer of each stored type. The lowest integer of a type is not used, so that one scale suits both signs.
# Processors without VNNI add two products of an int8 matmul in 16 bits, which hold 2 x 255 x 64. With 127 instead of
# 64, the KL divergence of the target of `scenes` was 2e-2 on these processors; on others it was 3e-3 instead of 4e-3.
MAX_INTEGER = {"int8": 127, "int4": 7, "columns": 64}
# Possible block sizes, the preferred size first. ONNX Runtime fuses block sizes that are powers of two from 16 on.
# Smaller blocks give smaller errors and larger files. With float32 scales, int8 takes 1.0625 bytes per weight and int4
# 0.625. With float16 scales, in graphs that compute in float16, they take 1.03 and 0.5625.
_BLOCKS: dict[StorageType, tuple[int, ...]] = {"int8": (64, 32, 16), "int4": (32, 16)}
# Maximum error of float16, relative to a weight's norm. Float16 has 11 bits of precision, so the error is larger only
# if numbers are out of its range.
_MAX_HALF_ERROR = 2.0**-10
_INT8_INSTRUCTIONS = {"avx_vnni", "avx512_vnni", "amx_int8", "asimddp"}  # processor features for products of int8
CHUNK_NUMBERS = 1 << 23  # maximum count of numbers that are converted to float32 at a time


@dataclass(frozen=True)
class Precisions:
    """Precisions that the user chose."""

    target: Precision = "fp32"
    # Type in which target and drafter compute, and in which they store weights that are not integers.
    compute_type: ComputeType = "float32"
    lossless: bool = False  # whether graphs without rounding store a weight as float16 if this changes no number
    vq: VQPrecision = "fp32"

    def get_precision(self, role: str) -> Precision:
        """Image tokenizers have fp32, as `vq` is applied separately."""
        if role == "condition" and self.target != "fp32":
            return "bf16-safe"
        return self.target if role in DECODERS else "fp32"

    def choose_storage_rule(self, role: str) -> StorageRule:
        precision = self.get_precision(role)
        return "lossless" if self.lossless and precision == "fp32" else precision


def parse_precisions(target: str | None = None, compute: str = "float32", vq: str = "fp32") -> Precisions:
    """Check the precisions of target and drafter, of their computation, and of the image decoder, given by name.

    Without a `target` precision, weights are stored in the type `compute`. `auto` is `int8` if this processor has
    instructions for it, otherwise `fp32`. With these instructions, `int8` was the fastest in all measurements
    (docs/exporting.md).

    Raises:
        RequestError: a name is unknown, or a precision does not go with `compute`.
    """
    if compute not in get_args(ComputeType):
        raise RequestError(field="compute", found=repr(compute), expected="float32, float16 or bfloat16")
    if vq not in get_args(VQPrecision):
        raise RequestError(field="vq_precision", found=repr(vq), expected="fp32, fp16 or int8")
    default = _DEFAULTS[compute]
    if target == "auto":
        fastest = "int8" if _INT8_INSTRUCTIONS & set(describe_processor().split()) else "fp32"
        target = fastest if compute == "float32" else None
    if target is None:
        target = default
    if target not in get_args(Precision):
        known = ", ".join((*get_args(Precision), "auto"))
        raise RequestError(field="precision", found=repr(target), expected=f"one of {known}")
    allowed = (default, "int8-weights", "int4-weights")
    if target == "bf16" != default or (compute != "float32" and target not in allowed):
        expected = "compute bfloat16" if target == "bf16" else ", ".join(allowed)
        raise RequestError(field="precision", found=f"{target} with compute {compute}", expected=expected)
    return Precisions(cast(Precision, target), cast(ComputeType, compute), vq=cast(VQPrecision, vq))


def choose_storage_types(
    weights: dict[str, Tensor],
    names_in_checkpoint: Set[str],
    matrix_names: Set[str],
    storage_rule: StorageRule,
    compute_type: ComputeType = "float32",
) -> dict[str, StorageType]:
    """Choose the stored type of each floating-point weight of a graph, without reading the numbers.

    Weights that are not in the checkpoint, such as rotary tables, are computed. They are stored in a smaller type only
    if this loses nothing.
    """
    return {
        name: choose_storage_type(
            weight,
            name in matrix_names,
            storage_rule if name in names_in_checkpoint or storage_rule == "lossless" else "fp32",
            compute_type,
        )
        for name, weight in weights.items()
        if weight.is_floating_point()
    }


def choose_storage_type(
    weight: Tensor, is_matrix: bool, storage_rule: StorageRule, compute_type: ComputeType = "float32"
) -> StorageType:
    """Choose the stored type of one weight by its shape. `resolve_storage_type` also checks the numbers."""
    if storage_rule == "fp32" or weight.ndim < 2:
        return "float32"
    integer = _INTEGER_STORAGE.get(storage_rule)
    half: StorageType = "bfloat16" if compute_type == "bfloat16" else "float16"
    return integer if integer and is_matrix and find_block_size(integer, weight.shape[0]) else half


def resolve_storage_type(
    name: str, weight: Tensor, planned_type: StorageType, storage_rule: StorageRule
) -> StorageType:
    """Return the planned type, or float32 (with rule `fp16` CheckpointError) if float16 cannot hold the numbers."""
    if planned_type != "float16":
        return planned_type
    if storage_rule == "lossless":
        return "float16" if all(torch.equal(p.half().float(), p) for p in iter_float32_chunks(weight)) else "float32"
    largest = error = norm = 0.0
    for chunk in iter_float32_chunks(weight):
        largest = max(largest, float(chunk.abs().max()))
        error += float(torch.linalg.vector_norm(chunk.half().float() - chunk)) ** 2
        norm += float(torch.linalg.vector_norm(chunk)) ** 2
    if error <= _MAX_HALF_ERROR**2 * norm:  # false if the error is infinite, because numbers exceed float16
        return "float16"
    if storage_rule == "fp16":
        raise CheckpointError(
            field=name,
            found=f"numbers up to {largest:.3g}",
            expected="numbers that float16 holds",
            remedy="export with precision bf16-safe, or vq-precision fp32",
        )
    return "float32"


def iter_float32_chunks(weight: Tensor, row_multiple: int = 1) -> Iterator[Tensor]:
    """Yield a weight as float32 chunks, so that it is never in memory as a whole.

    `row_multiple`, such as a block size, divides the number of rows of every chunk but the last.
    """
    weight = compute_deferred_tensor(weight)
    if weight.ndim == 0:
        yield weight.float()
        return
    step = max(row_multiple, CHUNK_NUMBERS // max(1, weight[:1].numel()) // row_multiple * row_multiple)
    for start in range(0, len(weight), step):
        yield weight[start : start + step].float().contiguous()


def find_block_size(storage_type: StorageType, num_inputs: int) -> int | None:
    """Find how many numbers along the input axis share a scale; None if no block size divides `num_inputs`."""
    return (
        num_inputs
        if storage_type == "columns"
        else next((size for size in _BLOCKS[storage_type] if num_inputs % size == 0), None)
    )


def quantize(
    weight: Tensor, storage_type: StorageType, scales: Tensor | None = None, compute_type: ComputeType = "float32"
) -> tuple[Tensor, Tensor]:
    """Quantize a weight `[in, out]` to int8 integers `[in, out]` with float32 scales `[in / block, out]`.

    `scales [1, out]` are those of the whole weight, if `weight` is a chunk of its inputs. Computed scales are rounded
    to the precision of `compute_type`.
    """
    size = len(weight) if scales is not None else find_block_size(storage_type, len(weight)) or len(weight)
    largest = MAX_INTEGER[storage_type]
    blocks = weight.reshape(-1, size, weight.shape[1])
    if scales is None:
        scales = blocks.abs().amax(1) / largest  # [blocks, out]
        scales = scales.to(getattr(torch, compute_type)).float()
    steps = blocks / torch.where(scales > 0, scales, 1.0)[:, None]
    return steps.round_().clamp_(-largest, largest).to(torch.int8).view(weight.shape), scales


def fake_quantize(
    weight: Tensor, storage_type: StorageType, is_matrix: bool, compute_type: ComputeType = "float32"
) -> Tensor:
    """Return a module's weight, `[out, in]` if it is a matrix, as the float32 numbers that a runtime decodes.

    Only matrices are integers. Scales are rounded to the precision of `compute_type`.
    """
    weight = compute_deferred_tensor(weight)
    if storage_type == "float32" or (storage_type in MAX_INTEGER and not is_matrix):
        return weight.float()
    result = weight.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    if storage_type in ("float16", "bfloat16"):
        for numbers in torch.split(result.view(-1), CHUNK_NUMBERS):
            numbers.copy_(numbers.to(getattr(torch, storage_type)))
        return result
    step = max(1, CHUNK_NUMBERS // weight.shape[1])  # rows of the module's matrix are columns of the stored one
    for rows in torch.split(result, step):
        integers, scales = quantize(rows.t(), storage_type, compute_type=compute_type)
        rows[:] = (integers.view(len(scales), -1, len(rows)) * scales[:, None]).view(integers.shape).t()
    return result


def round_activations(x: Tensor) -> Tensor:
    """Round activations `[..., inputs]` as int8 matmul does: each node to integers -127 .. 127 times a scale."""
    scale = x.abs().amax(-1, keepdim=True) / MAX_INT8_ACTIVATION
    return (x / torch.where(scale > 0, scale, 1.0)).round_() * scale
