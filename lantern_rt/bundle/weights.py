"""Weights that a graph file stores, converted from their stored types to float32."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import BundleError
from ..inputs import convert_read_errors
from .decoder import EXPORT_AGAIN
from .onnx_scan import StoredTensor, read_graph_weights

INTEGERS = ("int8", "int4")
_STORAGE = re.compile(r"\.(half|bfloat16|int8|int4)$")  # end of a stored weight's name, by the type of its storage


class StoredWeights(dict[str, StoredTensor]):
    """Weights of a graph file, by their names in the PyTorch module. Their values are read on demand.

    The scales of an integer weight are stored as another weight with the name `<name>.scales`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with convert_read_errors(path, "an ONNX graph", BundleError, EXPORT_AGAIN):
            super().__init__({_STORAGE.sub("", name): weight for name, weight in read_graph_weights(path).items()})
            for file, offset, size in filter(None, (weight.external_data for weight in self.values())):
                if offset + size > (path.parent / file).stat().st_size:
                    raise ValueError(f"{file} is shorter than its weights")

    def __missing__(self, name: str) -> StoredTensor:
        raise BundleError(f"has no weight {name}", field=str(self._path), remedy=EXPORT_AGAIN)

    def float32(self, name: str) -> NDArray[np.float32]:
        """Read a weight as float32.

        Integers `[in, out]` are multiplied by their scales: `[out]`, or `[in / block, out]` with a scale per block.
        """
        numbers = self._read_weight(self[name])
        if self[name].dtype in INTEGERS:
            scales = self._read_weight(self[f"{name}.scales"])
            if numbers.ndim > 2:  # a kernel [out, in, height, width]
                scales = scales.reshape(-1, *[1] * (numbers.ndim - 1))
            elif scales.ndim > 1:
                scales = np.repeat(scales, len(numbers) // len(scales), 0)
            numbers *= scales
        return numbers

    def count_float_elements(self) -> int:
        """Return the number of elements of all floating-point weights, scales included."""
        return sum(math.prod(weight.shape) for weight in self.values() if "float" in weight.dtype)

    def _read_weight(self, weight: StoredTensor) -> NDArray[np.float32]:
        with convert_read_errors(self._path, "an ONNX graph", BundleError, EXPORT_AGAIN):
            return weight.read_array(self._path.parent).astype(np.float32)
