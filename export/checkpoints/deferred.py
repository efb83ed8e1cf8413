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


class _Deferred(Tensor):
    """Tensor of known shape and dtype; every operation on it computes its values with a function."""

    make: Callable[[], Tensor]
    parts: Sequence[Tensor] = ()

    @staticmethod
    def __new__(cls, make: Callable[[], Tensor], shape: Sequence[int], dtype: torch.dtype) -> _Deferred:
        tensor = Tensor._make_wrapper_subclass(cls, list(shape), dtype=dtype)
        tensor.make = make
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return _Deferred(args[0].make, args[0].shape, args[0].dtype)
        return func(*tree_map(_made, args), **tree_map(_made, kwargs or {}))


def deferred(make: Callable[[], Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a deferred tensor.

    Args:
        make: function that computes the tensor on each use.
        shape: shape of the computed tensor.
        dtype: dtype of the computed tensor.
    """
    return _Deferred(make, shape, dtype)


def computed(tensor: Tensor) -> Tensor:
    """Compute a deferred tensor; return any other tensor unchanged."""
    made: Tensor = _made(tensor).detach()
    return made


def permuted(tensor: Tensor, axes: Sequence[int]) -> Tensor:
    """Return a deferred permutation of a tensor's axes."""
    return deferred(lambda: computed(tensor).permute(*axes), [tensor.shape[axis] for axis in axes], tensor.dtype)


def transposed(matrix: Tensor) -> Tensor:
    """Return a deferred transpose of a matrix."""
    return permuted(matrix, (1, 0))


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Return a deferred concatenation along axis 0 of tensors of one dtype."""
    shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
    tensor = _Deferred(lambda: torch.cat([computed(part) for part in parts]), shape, parts[0].dtype)
    tensor.parts = parts
    return tensor


def parts_of(tensor: Tensor) -> Sequence[Tensor]:
    """Return the tensors of which a tensor is the concatenation by `joined`; any other tensor alone."""
    return (tensor.parts if isinstance(tensor, _Deferred) else ()) or [tensor]


def without_weights() -> torch.device:
    """Return a context in which modules are created without memory for their weights."""
    return torch.device("meta")


def _made(value: Any) -> Any:
    while isinstance(value, _Deferred):
        value = value.make()
    return value
