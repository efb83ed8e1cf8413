"""The types that engines and backends share: a graph's tensors and calls, and the threads that run it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import EngineError
from .host import usable_cores

Array = NDArray[Any]
DTypes = Mapping[str, type[np.generic]]  # of a graph's tensors, by name
# What is being done, and how far it has come: steps done, steps in all.
Progress = Callable[[str, int, int], None]
# A graph that is one call: inputs by name to the outputs, in the order in which they were declared.
Function = Callable[[Mapping[str, Array]], list[Array]]


@dataclass(frozen=True)
class Tensor:
    """What a graph's input or output must be. `None` is a size that differs from pass to pass."""

    name: str
    dtypes: tuple[str, ...]
    shape: tuple[int | None, ...]

    def __str__(self) -> str:
        return f"{' or '.join(self.dtypes)} [{', '.join('any' if n is None else str(n) for n in self.shape)}]"


@dataclass(frozen=True)
class ThreadOptions:
    """Threads of one graph.

    `intra_op`: threads that share one operator, by default the physical cores this process may use.
    `spinning`: whether idle threads wait busily; faster on a quiet machine, ruinous on a shared one.
    """

    intra_op: int = field(default_factory=usable_cores)
    spinning: bool = False

    def __post_init__(self) -> None:
        if type(self.intra_op) is not int or not 1 <= self.intra_op <= 1024:
            raise EngineError(f"threads: found {self.intra_op!r}, expected 1 .. 1024")
