"""Weights that are computed when they are used, and modules that exist before their weights do.

A checkpoint's tensors lie in a memory map. What is made from them (projections joined, a matrix transposed) would be a
copy; a deferred tensor keeps the recipe and computes it each time. So a model larger than memory can be described,
and written a chunk at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


class _Deferred(Tensor):
    """A tensor of known shape and type whose numbers come from a function; any operation on it calls that."""

    make: Callable[[], Tensor]

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
    """A tensor that is computed by `make()` each time it is used; `make` must give this shape and type."""
    return _Deferred(make, shape, dtype)


def computed(tensor: Tensor) -> Tensor:
    """An ordinary tensor: the same one, or what a deferred one computes."""
    made: Tensor = _made(tensor).detach()
    return made


def permuted(tensor: Tensor, axes: Sequence[int]) -> Tensor:
    """A tensor with its axes in another order, deferred."""
    return deferred(lambda: computed(tensor).permute(*axes), [tensor.shape[axis] for axis in axes], tensor.dtype)


def transposed(matrix: Tensor) -> Tensor:
    """`matrix [a, b]` as `[b, a]`, deferred."""
    return permuted(matrix, (1, 0))


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Tensors of one type, one below the other (`torch.cat` along axis 0), deferred."""
    shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
    return deferred(lambda: torch.cat([computed(part) for part in parts]), shape, parts[0].dtype)


def without_weights() -> torch.device:
    """Inside `with without_weights():` modules are built without memory for their weights, to be loaded later."""
    return torch.device("meta")


def _made(value: Any) -> Any:
    while isinstance(value, _Deferred):
        value = value.make()
    return value
