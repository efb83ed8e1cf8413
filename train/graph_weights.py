"""Weights of a bundle's graph as float32, however they are stored."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper
from onnx.external_data_helper import load_external_data_for_tensor, uses_external_data
from torch import Tensor

from ..errors import BundleError
from ..inputs import reading

_REMEDY = "export the bundle again"
_INTEGERS = (".int8", ".int4")


class GraphWeights:
    """Weights of a graph, each read when it is needed.

    Raises:
        BundleError: the file is damaged, or lacks a weight.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with reading(path, "an ONNX graph", BundleError, _REMEDY):
            graph = onnx.load(path, load_external_data=False).graph
        self._tensors: dict[str, TensorProto] = {one.name: one for one in graph.initializer}

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a weight, as the graph stores it."""
        return tuple(self._find(name).dims)

    def read(self, name: str) -> Tensor:
        """Read a weight as float32: integers `[in, out]` times scales, `[out]` or, of blocks, `[in / block, out]`."""
        tensor = self._find(name)
        numbers = self._numbers(tensor)
        if tensor.name.endswith(_INTEGERS):
            scales = self._numbers(self._find(f"{name}.scales"))
            numbers *= scales if scales.ndim == 1 else np.repeat(scales, len(numbers) // len(scales), 0)
        return torch.from_numpy(numbers)

    def floats(self) -> dict[str, Tensor]:
        """All weights but indices and sizes, by name."""
        names = {name.removesuffix(".half").removesuffix(".int8").removesuffix(".int4") for name in self._tensors}
        floats = (TensorProto.FLOAT, TensorProto.FLOAT16)
        own = (name for name in sorted(names) if not name.endswith(".scales"))
        stored = ((name, self._find(name)) for name in own)
        return {n: self.read(n) for n, t in stored if t.data_type in floats or t.name.endswith(_INTEGERS)}

    def _find(self, name: str) -> TensorProto:
        for stored_name in (name, f"{name}.half", *(f"{name}{kind}" for kind in _INTEGERS)):
            if stored_name in self._tensors:
                return self._tensors[stored_name]
        raise BundleError(field=str(self._path), found=f"no {name} in the graph", remedy=_REMEDY)

    def _numbers(self, tensor: TensorProto) -> NDArray[np.float32]:
        with reading(self._path, "an ONNX graph", BundleError, _REMEDY):
            if uses_external_data(tensor):
                load_external_data_for_tensor(tensor, str(self._path.parent))
            return numpy_helper.to_array(tensor).astype(np.float32)
