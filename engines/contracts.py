"""Types that engines and backends share: tensors of graphs, and calls."""

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
Progress = Callable[[str, int, int], None]  # description, steps done, total steps
Function = Callable[[Mapping[str, Array]], list[Array]]  # returns the outputs in the declared order


@dataclass(frozen=True)
class TensorSpec:
    """Declaration of an input or output of a graph.

    Attributes:
        name: name in the graph.
        dtypes: allowed types; a graph that is written has the first.
        shape: sizes; a name or None for a size that may differ from pass to pass.
    """

    name: str
    dtypes: tuple[str, ...]
    shape: tuple[int | str | None, ...]

    def matches_shape(self, shape: Sequence[int]) -> bool:
        """Return whether an array of this shape conforms."""
        return len(shape) == len(self.shape) and all(
            expected == size or not isinstance(expected, int) for size, expected in zip(shape, self.shape, strict=True)
        )

    def __str__(self) -> str:
        return f"{' or '.join(self.dtypes)} [{', '.join(str(n) if isinstance(n, int) else 'any' for n in self.shape)}]"


def check_graph_tensors(
    actual: Mapping[str, tuple[str, Sequence[object]]],
    expected: Sequence[TensorSpec],
    make_error: Callable[[str, str, str], LanternError],
    reject_undeclared: bool,
) -> DTypes:
    """Return the NumPy types of a graph's tensors after comparing them with their declarations.

    Args:
        actual: type and sizes of the graph's tensors by name; free sizes are not integers.
        make_error: function that makes an error of a tensor's name, its actual form and its expected form.
        reject_undeclared: whether the graph must have no other tensors.

    Raises:
        LanternError: error made by `make_error` for the first tensor that differs.
    """
    declared = {tensor.name: tensor for tensor in expected}
    for name in [*declared, *(sorted(actual.keys() - declared.keys()) if reject_undeclared else ())]:
        tensor = declared.get(name)
        dtype, sizes = actual.get(name, ("", ()))
        # A declared free size must be free in the graph; a declared number must be equal or free there.
        if (
            tensor is None
            or dtype not in tensor.dtypes
            or len(sizes) != len(tensor.shape)
            or any(isinstance(size, int) and size != axis for size, axis in zip(sizes, tensor.shape, strict=True))
        ):
            form = f"{dtype} [{', '.join(map(str, sizes))}]" if name in actual else "none"
            raise make_error(name, form, str(tensor or "none"))
    return {name: np.dtype(STORAGE_DTYPES.get(actual[name][0], actual[name][0])).type for name in declared}


class TensorView(NamedTuple):
    """Tensor in the device buffer `buffer`, from byte `byte_offset` on, with the methods of an OrtValue."""

    buffer: Any
    byte_offset: int
    dims: list[int]
    dtype: str

    def shape(self) -> list[int]:
        """Return the shape."""
        return self.dims

    def data_ptr(self) -> int:
        """Return the address."""
        return int(self.buffer.data_ptr()) + self.byte_offset


class ExecutableGraph(Protocol):
    """A graph that a library loaded to run on device memory."""

    def bind_tensors(self, values: Mapping[str, Any], capture_graph: bool = False) -> Callable[[], None]:
        """Return a function that runs the graph on inputs and outputs, and keeps their memory.

        The function may return before the device is done.

        Args:
            values: inputs and outputs by name: values on the device, or views into values.
            capture_graph: whether the function will be called often enough to record the pass as a graph.
        """
