"""Deferred tensors, which are computed on use, and modules without memory for weights.

A checkpoint's tensors are memory-mapped. Joining projections or transposing a matrix would copy them into memory; a
deferred tensor stores the function and computes the copy on each use. A model larger than memory can thus be loaded and
exported weight by weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


class _DeferredTensor(Tensor):
    """Tensor of known shape and dtype; every operation on it computes its values with a function."""

    make: Callable[[], Tensor]
    parts: Sequence[Tensor] = ()

    @staticmethod
    def __new__(cls, make: Callable[[], Tensor], shape: Sequence[int], dtype: torch.dtype) -> _DeferredTensor:
        tensor = Tensor._make_wrapper_subclass(cls, list(shape), dtype=dtype)
        tensor.make = make
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return _DeferredTensor(args[0].make, args[0].shape, args[0].dtype)
        return func(*tree_map(_compute_value, args), **tree_map(_compute_value, kwargs or {}))


def defer_tensor(make: Callable[[], Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a deferred tensor.

    Args:
        make: function that computes the tensor on each use.
        shape: shape of the computed tensor.
        dtype: dtype of the computed tensor.
    """
    return _DeferredTensor(make, shape, dtype)


def compute_tensor(tensor: Tensor) -> Tensor:
    """Compute a deferred tensor; return any other tensor unchanged."""
    made: Tensor = _compute_value(tensor).detach()
    return made


def defer_permutation(tensor: Tensor, axes: Sequence[int]) -> Tensor:
    """Return a deferred permutation of a tensor's axes."""
    return defer_tensor(
        lambda: compute_tensor(tensor).permute(*axes), [tensor.shape[axis] for axis in axes], tensor.dtype
    )


def defer_transpose(matrix: Tensor) -> Tensor:
    """Return a deferred transpose of a matrix."""
    return defer_permutation(matrix, (1, 0))


def defer_concatenation(parts: Sequence[Tensor]) -> Tensor:
    """Return a deferred concatenation along axis 0 of tensors of one dtype."""
    shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
    tensor = _DeferredTensor(lambda: torch.cat([compute_tensor(part) for part in parts]), shape, parts[0].dtype)
    tensor.parts = parts
    return tensor


def list_concatenated_parts(tensor: Tensor) -> Sequence[Tensor]:
    """Return the tensors of which a tensor is the concatenation by `defer_concatenation`; any other tensor alone."""
    return (tensor.parts if isinstance(tensor, _DeferredTensor) else ()) or [tensor]


def without_weights() -> torch.device:
    """Return a context in which modules are created without memory for their weights."""
    return torch.device("meta")


def _compute_value(value: Any) -> Any:
    while isinstance(value, _DeferredTensor):
        value = value.make()
    return value
