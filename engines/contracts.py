"""The types that engines and backends share: a graph's tensors and calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import LanternError

Array = NDArray[Any]
DTypes = Mapping[str, type[np.generic]]  # of a graph's tensors, by name
# NumPy has no bfloat16: its bits are stored and copied as float16.
STORAGE_DTYPES = {"bfloat16": "float16"}
Progress = Callable[[str, int, int], None]  # what is being done, steps done, steps in all
Function = Callable[[Mapping[str, Array]], list[Array]]  # inputs by name to the outputs, in the order of declaration


@dataclass(frozen=True)
class Tensor:
    """What a graph's input or output must be; where a graph is written, it has the first of the `dtypes`.

    shape: sizes; a name or `None` for one that differs from pass to pass.
    """

    name: str
    dtypes: tuple[str, ...]
    shape: tuple[int | str | None, ...]

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether an array of this shape is one."""
        return len(shape) == len(self.shape) and all(
            want == have or not isinstance(want, int) for have, want in zip(shape, self.shape, strict=True)
        )

    def __str__(self) -> str:
        return f"{' or '.join(self.dtypes)} [{', '.join(str(n) if isinstance(n, int) else 'any' for n in self.shape)}]"


def numpy_types(
    found: Mapping[str, tuple[str, Sequence[object]]],
    expected: Sequence[Tensor],
    refuse: Callable[[str, str, str], LanternError],
    only: bool,
) -> DTypes:
    """NumPy types of a graph's tensors, of which the type and the sizes, those that are free no numbers, are `found`.

    only: there must be no others.
    Raises: what `refuse` makes of the name of one that is not as expected, what it is, and what it should be.
    """
    wanted = {tensor.name: tensor for tensor in expected}
    for name in [*wanted, *(sorted(found.keys() - wanted.keys()) if only else ())]:
        tensor, (dtype, sizes) = wanted.get(name), found.get(name, ("", ()))
        # a free size is only given by a free one; a fixed size by itself, or by one the graph leaves open
        if (
            tensor is None
            or dtype not in tensor.dtypes
            or len(sizes) != len(tensor.shape)
            or any(isinstance(size, int) and size != want for size, want in zip(sizes, tensor.shape, strict=True))
        ):
            is_now = f"{dtype} [{', '.join(map(str, sizes))}]" if name in found else "none"
            raise refuse(name, is_now, str(tensor or "none"))
    return {name: np.dtype(STORAGE_DTYPES.get(found[name][0], found[name][0])).type for name in wanted}


class TensorView(NamedTuple):
    """A tensor that lies in another value, so many bytes behind its beginning."""

    whole: Any
    start: int
    size: list[int]
    dtype: str

    def shape(self) -> list[int]:
        """As that of a value."""
        return self.size

    def data_ptr(self) -> int:
        """As that of a value."""
        return int(self.whole.data_ptr()) + self.start


class Executable(Protocol):
    """A loaded graph that runs on values on a device, whichever library loaded it."""

    def bind(self, values: Mapping[str, Any], record: bool = False) -> Callable[[], None]:
        """What runs the graph on these inputs and outputs, by name: values on the device, or parts; it holds them.

        It need not wait until the device is done. record: whether it will run often enough to be recorded.
        """
