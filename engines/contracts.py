"""Types that all engines share: declarations of graph tensors, views of device memory, and callbacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import LanternError

Array = NDArray[Any]
DTypes = Mapping[str, type[np.generic]]  # types of a graph's tensors by name
# NumPy has no bfloat16: its bits are stored and copied as float16.
STORAGE_DTYPES = {"bfloat16": "float16"}
Progress = Callable[[str, int, int], None]  # gets a description, the number of steps done, and the number of all steps
Function = Callable[[Mapping[str, Array]], list[Array]]  # takes inputs by name, returns outputs in the declared order


@dataclass(frozen=True)
class TensorSpec:
    """Declaration of an input or output of a graph."""

    name: str
    dtypes: tuple[str, ...]  # allowed types. When this project writes a graph, the tensor gets the first type.
    # Size of each axis; a name or None for a size that may differ between passes (a free size).
    shape: tuple[int | str | None, ...]

    def __str__(self) -> str:
        return f"{' or '.join(self.dtypes)} [{', '.join(str(n) if isinstance(n, int) else 'any' for n in self.shape)}]"


def check_graph_tensors(
    actual: Mapping[str, tuple[str, Sequence[object]]],
    expected: Sequence[TensorSpec],
    make_error: Callable[[str, str, str], LanternError],
    reject_undeclared: bool,
) -> DTypes:
    """Compare the tensors of a graph with their declarations, and return their NumPy types by name.

    Args:
        actual: type and sizes of the tensors of the graph, by name; free sizes are not integers.
        make_error: returns an error from the name of a tensor, and its actual and expected form.
        reject_undeclared: whether a tensor without a declaration is an error.
    """
    declared = {tensor.name: tensor for tensor in expected}
    for name in [*declared, *(sorted(actual.keys() - declared.keys()) if reject_undeclared else ())]:
        tensor = declared.get(name)
        dtype, sizes = actual.get(name, ("", ()))
        # A size that is declared free must be free in the graph; a declared number must be equal or free in the graph.
        if (
            tensor is None
            or dtype not in tensor.dtypes
            or len(sizes) != len(tensor.shape)
            or any(isinstance(size, int) and size != axis for size, axis in zip(sizes, tensor.shape, strict=True))
        ):
            actual_form = f"{dtype} [{', '.join(map(str, sizes))}]" if name in actual else "none"
            raise make_error(name, actual_form, str(tensor or "none"))
    return {name: np.dtype(STORAGE_DTYPES.get(actual[name][0], actual[name][0])).type for name in declared}


class TensorView(NamedTuple):
    """Tensor that is a part of a larger device buffer. It has the methods `shape` and `data_ptr` of an OrtValue."""

    buffer: Any
    byte_offset: int  # offset of the first byte of the tensor in the buffer
    dims: list[int]
    dtype: str  # NumPy name of the type of the tensor

    def shape(self) -> list[int]:
        return self.dims

    def data_ptr(self) -> int:
        return int(self.buffer.data_ptr()) + self.byte_offset


class ExecutableGraph(Protocol):
    """Graph that ONNX Runtime or TensorRT has loaded and that runs on tensors in device memory."""

    def bind_tensors(self, values: Mapping[str, Any], capture_graph: bool = False) -> Callable[[], None]:
        """Bind inputs and outputs by name, OrtValues or `TensorView`s; return a function that runs the graph on them.

        The function keeps references to the tensors, and may return before the device is done. With `capture_graph`, it
        will be called often, so that recording the pass, such as in a CUDA graph, saves time.
        """
