"""The types that engines and backends share: a graph's tensors and calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
DTypes = Mapping[str, type[np.generic]]  # of a graph's tensors, by name
HOLDS = {"bfloat16": "float16"}  # what memory of a type that NumPy does not have is taken as: only its bits are moved
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


class Part(NamedTuple):
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
