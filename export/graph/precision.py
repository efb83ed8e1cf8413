"""How weights are rounded for storage: which types there are, what fits them, and what a runtime computes with.

Only weights are rounded, never activations, logits or caches: a graph turns every stored weight back into
float32 where it is used. Matrices of the layers may be stored as integers, in blocks along their input axis that
share a scale; everything else (embeddings, head) has float16 at the least.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from ...bundle.manifest import Precision
from ...errors import CheckpointError, RequestError
from ..checkpoints.deferred import computed

Storage = Literal["float32", "float16", "int8", "int4"]
Compute = Literal["float32", "float16"]
# `lossless`: float16 where that holds the weight exactly. Recorded as fp32, since it computes the same.
Rule = Precision | Literal["lossless"]

_INTEGERS: dict[Rule, Storage] = {"int8-weights": "int8", "int4-weights": "int4"}
_LARGEST = {"int8": 127, "int4": 7}  # the lowest of each type stays unused, so that scales serve both signs
# Numbers that share a scale. ONNX Runtime fuses powers of two from 16 on; the smaller a block, the better the
# fit and the larger the file. With float32 scales: 1.0625 bytes a weight for int8, 0.625 for int4.
_BLOCKS: dict[Storage, tuple[int, ...]] = {"int8": (64, 32, 16), "int4": (32, 16)}
_HALF_ERROR = 2.0**-10  # of the norm; float16 has 11 bits, so only what falls out of its range errs so much
_CHUNK = 1 << 23  # numbers held as float32 at a time


@dataclass(frozen=True)
class Precisions:
    """What the user chose. The drafter follows the target unless it has a precision of its own.

    compute: what target and drafter compute in; in float16 they also store it. lossless: store what float16 holds
    exactly in it, and round nothing else.
    """

    target: Precision = "fp32"
    drafter: Precision | None = None
    compute: Compute = "float32"
    lossless: bool = False

    def of(self, role: str) -> Precision:
        """The precision of a graph; image tokenizers are small and sensitive, and stay float32."""
        if role == "drafter":
            return self.drafter or self.target
        if role == "condition" and self.target != "fp32":
            return "bf16-safe"
        return self.target if role == "target" else "fp32"

    def rule(self, role: str) -> Rule:
        """How the weights of a graph are stored."""
        return "lossless" if self.lossless else self.of(role)


def read_precisions(target: str | None = None, drafter: str | None = None, compute: str = "float32") -> Precisions:
    """Precisions by the names that users give them; by default what is computed with is stored."""
    if compute not in get_args(Compute):
        raise RequestError(f"--compute: found {compute!r}, expected float32 or float16")
    for option, value in (("precision", target), ("drafter-precision", drafter)):
        if value is not None and value not in get_args(Precision):
            raise RequestError(f"--{option}: found {value!r}, expected one of {', '.join(get_args(Precision))}")
        if compute == "float16" and value not in (None, "fp16"):
            raise RequestError(f"--{option}: found {value}, but --compute float16 stores fp16; leave it out")
    usual: Precision = "fp16" if compute == "float16" else "fp32"
    return Precisions(cast(Precision, target or usual), cast(Precision | None, drafter), cast(Compute, compute))


def storage(weight: Tensor, matrix: bool, rule: Rule) -> Storage:
    """How to store a weight that is float32 in the graph; `matrix`: it is `[in, out]` of a layer's product.

    Looks at shapes only: `resolve_dtype` looks at the numbers.
    """
    if rule == "fp32" or weight.ndim < 2:
        return "float32"
    integer = _INTEGERS.get(rule)
    return integer if integer and matrix and block_size(integer, weight.shape[0]) else "float16"


def resolve_dtype(name: str, weight: Tensor, planned: Storage, rule: Rule) -> Storage:
    """The planned storage, or float32 for numbers that float16 does not hold; an error where `rule` is fp16."""
    if planned != "float16":
        return planned
    if rule == "lossless":
        return "float16" if all(torch.equal(p.half().float(), p) for p in iter_chunks(weight)) else "float32"
    largest = error = norm = 0.0
    for chunk in iter_chunks(weight):
        half = chunk.half().float()
        largest = max(largest, float(chunk.abs().max()))
        error += float(torch.linalg.vector_norm(half - chunk)) ** 2
        norm += float(torch.linalg.vector_norm(chunk)) ** 2
    if error <= _HALF_ERROR**2 * norm:  # false for the infinity that too large a number becomes
        return "float16"
    if rule == "fp16":
        raise CheckpointError(
            f"weight {name}: its numbers (largest {largest:.3g}) do not fit float16; export with precision bf16-safe"
        )
    return "float32"


def iter_chunks(weight: Tensor, rows: int = 1) -> Iterator[Tensor]:
    """A weight in float32, some rows at a time (a multiple of `rows`), so that it is never there as a whole."""
    made = computed(weight)
    if made.ndim == 0:
        yield made.float()
        return
    width = max(1, made[:1].numel())
    step = max(rows, _CHUNK // width // rows * rows)
    for start in range(0, len(made), step):
        yield made[start : start + step].float().contiguous()


def block_size(kind: Storage, inputs: int) -> int | None:
    """Numbers along the input axis that share a scale; None where no block size divides it."""
    return next((size for size in _BLOCKS[kind] if inputs % size == 0), None)


def quantise(weight: Tensor, kind: Storage) -> tuple[Tensor, Tensor]:
    """`weight [in, out]` to integers `[in, out]` int8 and scales `[in / block, out]` float32, round to nearest."""
    inputs, outputs = weight.shape
    size = block_size(kind, inputs) or inputs
    blocks = weight.reshape(inputs // size, size, outputs)
    largest = _LARGEST[kind]
    scales = blocks.abs().amax(1) / largest  # [blocks, out]
    steps = blocks / torch.where(scales > 0, scales, 1.0)[:, None]
    return steps.round_().clamp_(-largest, largest).to(torch.int8).view(inputs, outputs), scales


def fake_quantize(weight: Tensor, kind: Storage, matrix: bool) -> Tensor:
    """The float32 numbers a runtime computes with; a module's matrix is `[out, in]`."""
    made = computed(weight)
    if kind == "float32" or (kind in _LARGEST and not matrix):
        return made.float()
    if kind == "float16":
        return made.half().float()
    result = torch.empty(made.shape)
    step = max(1, _CHUNK // made.shape[1])  # rows of the module's matrix: columns of the stored one
    for start in range(0, len(made), step):
        integers, scales = quantise(made[start : start + step].float().t(), kind)
        blocks = integers.view(len(scales), -1, integers.shape[1]) * scales[:, None]
        result[start : start + step] = blocks.view(integers.shape).t()
    return result
