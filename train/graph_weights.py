"""Weights of a bundle's graph as float32, from any storage precision."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..bundle.onnx_scan import STORAGES, graph_weights, stored_name
from ..errors import BundleError
from ..inputs import reading

_REMEDY = "export the bundle again"
_INTEGERS = (".int8", ".int4")


class GraphWeights:
    """Weights of a graph, each read on demand.

    Raises:
        BundleError: the file is damaged, or a weight does not exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with reading(path, "an ONNX graph", BundleError, _REMEDY):
            self._weights = graph_weights(path)

    def __contains__(self, name: str) -> bool:
        """Return whether the graph has a weight."""
        return any(name + storage in self._weights for storage in STORAGES)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a weight as the graph stores it."""
        return self._weights[self._stored_name(name)].shape

    def read(self, name: str) -> Tensor:
        """Read a weight as float32. Integers `[in, out]` are multiplied by scales `[out]` or `[in / block, out]`."""
        stored = self._stored_name(name)
        numbers = self._numbers(stored)
        if stored.endswith(_INTEGERS):
            scales = self._numbers(self._stored_name(f"{name}.scales"))
            if numbers.ndim > 2:  # a kernel [out, in, height, width]
                numbers *= scales.reshape(-1, *[1] * (numbers.ndim - 1))
            else:
                numbers *= scales if scales.ndim == 1 else np.repeat(scales, len(numbers) // len(scales), 0)
        return torch.from_numpy(numbers)

    def floats(self) -> dict[str, Tensor]:
        """Return all floating-point weights by name."""
        stored = [name for name, weight in self._weights.items() if weight.dtype and not name.endswith(".scales")]
        for storage in STORAGES:
            stored = [name.removesuffix(storage) for name in stored]
        return {name: self.read(name) for name in sorted(stored)}

    def _stored_name(self, name: str) -> str:
        try:
            return stored_name(self._weights, name)
        except KeyError as error:
            raise BundleError(field=str(self._path), found=f"no {name} in the graph", remedy=_REMEDY) from error

    def _numbers(self, stored: str) -> NDArray[np.float32]:
        with reading(self._path, "an ONNX graph", BundleError, _REMEDY):
            return self._weights[stored].array(self._path.parent).astype(np.float32)
