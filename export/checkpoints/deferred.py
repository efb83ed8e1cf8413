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

    compute_values: Callable[[], Tensor]
    source_tensors: Sequence[Tensor] = ()

    @staticmethod
    def __new__(cls, compute_values: Callable[[], Tensor], shape: Sequence[int], dtype: torch.dtype) -> _DeferredTensor:
        tensor = Tensor._make_wrapper_subclass(cls, list(shape), dtype=dtype)
        tensor.compute_values = compute_values
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return _DeferredTensor(args[0].compute_values, args[0].shape, args[0].dtype)
        return func(*tree_map(_resolve_deferred_value, args), **tree_map(_resolve_deferred_value, kwargs or {}))


def defer_tensor(compute_values: Callable[[], Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a deferred tensor.

    Args:
        compute_values: function that computes the tensor on each use.
        shape: shape of the computed tensor.
        dtype: dtype of the computed tensor.
    """
    return _DeferredTensor(compute_values, shape, dtype)


def compute_tensor(tensor: Tensor) -> Tensor:
    """Compute a deferred tensor; return any other tensor unchanged."""
    made: Tensor = _resolve_deferred_value(tensor).detach()
    return made


def defer_permutation(tensor: Tensor, axes: Sequence[int]) -> Tensor:
    """Return a deferred permutation of a tensor's axes."""
    return defer_tensor(
        lambda: compute_tensor(tensor).permute(*axes), [tensor.shape[axis] for axis in axes], tensor.dtype
    )


def defer_transpose(matrix: Tensor) -> Tensor:
    """Return a deferred transpose of a matrix."""
    return defer_permutation(matrix, (1, 0))


def defer_concatenation(source_tensors: Sequence[Tensor]) -> Tensor:
    """Return a deferred concatenation along axis 0 of tensors of one dtype."""
    shape = (sum(len(part) for part in source_tensors), *source_tensors[0].shape[1:])
    tensor = _DeferredTensor(
        lambda: torch.cat([compute_tensor(part) for part in source_tensors]), shape, source_tensors[0].dtype
    )
    tensor.source_tensors = source_tensors
    return tensor


def list_concatenated_parts(tensor: Tensor) -> Sequence[Tensor]:
    """Return the tensors of which a tensor is the concatenation by `defer_concatenation`; any other tensor alone."""
    return (tensor.source_tensors if isinstance(tensor, _DeferredTensor) else ()) or [tensor]


def skip_weight_allocation() -> torch.device:
    """Return a context in which modules are created without memory for their weights."""
    return torch.device("meta")


def _resolve_deferred_value(value: Any) -> Any:
    while isinstance(value, _DeferredTensor):
        value = value.compute_values()
    return value
