"""Deferred tensors, whose values are computed on each use, and modules that are built without memory for weights.

A checkpoint's tensors are memory-mapped. If projections were joined or matrices transposed when a model is loaded, the
copies would fill the memory. So a model that is larger than memory can be loaded, and exported weight by weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


class _DeferredTensor(Tensor):
    """Tensor with a known shape and dtype, whose values a function computes for each operation on the tensor.

    `source_tensors` are the tensors whose concatenation it is; empty for other tensors.
    """

    compute_values: Callable[[], Tensor]
    source_tensors: Sequence[Tensor] = ()

    @staticmethod
    def __new__(cls, compute_values: Callable[[], Tensor], shape: Sequence[int], dtype: torch.dtype) -> _DeferredTensor:
        tensor = Tensor._make_wrapper_subclass(cls, list(shape), dtype=dtype)
        tensor.compute_values = compute_values
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # `nn.Parameter` and `load_state_dict` detach tensors; this must not compute the values.
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return _DeferredTensor(args[0].compute_values, args[0].shape, args[0].dtype)
        return func(*tree_map(_resolve_deferred_value, args), **tree_map(_resolve_deferred_value, kwargs or {}))


def defer_tensor(compute_values: Callable[[], Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor whose values are computed on each use."""
    return _DeferredTensor(compute_values, shape, dtype)


def compute_deferred_tensor(tensor: Tensor) -> Tensor:
    made: Tensor = _resolve_deferred_value(tensor).detach()
    return made


def defer_permutation(tensor: Tensor, axes: Sequence[int]) -> Tensor:
    return defer_tensor(
        lambda: compute_deferred_tensor(tensor).permute(*axes), [tensor.shape[axis] for axis in axes], tensor.dtype
    )


def defer_transpose(matrix: Tensor) -> Tensor:
    return defer_permutation(matrix, (1, 0))


def defer_concatenation(source_tensors: Sequence[Tensor]) -> Tensor:
    """Defer a concatenation along axis 0 of tensors of one dtype."""
    shape = (sum(len(part) for part in source_tensors), *source_tensors[0].shape[1:])
    tensor = _DeferredTensor(
        lambda: torch.cat([compute_deferred_tensor(part) for part in source_tensors]), shape, source_tensors[0].dtype
    )
    tensor.source_tensors = source_tensors
    return tensor


def list_concatenated_tensors(tensor: Tensor) -> Sequence[Tensor]:
    """Return the tensors of which `tensor` is the deferred concatenation, or `[tensor]` for any other tensor."""
    return (tensor.source_tensors if isinstance(tensor, _DeferredTensor) else ()) or [tensor]


def skip_weight_allocation() -> torch.device:
    """Return a context in which PyTorch modules are created without memory for their weights."""
    return torch.device("meta")


def _resolve_deferred_value(value: Any) -> Any:
    while isinstance(value, _DeferredTensor):  # the function may return another deferred tensor
        value = value.compute_values()
    return value
