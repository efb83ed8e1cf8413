"""The types that engines and backends share: a graph's tensors and calls, and what users may say about running it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..checks import whole
from ..errors import EngineError, RequestError
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
        if not 1 <= self.intra_op <= 1024:
            raise EngineError(f"threads: found {self.intra_op}, expected 1 .. 1024")


@dataclass(frozen=True)
class PlanOptions:
    """What a user may say about running TensorRT's plans.

    cuda_graphs: record passes that recur, and launch each as a whole. weight_budget: bytes of the target's weights that
    stay on the device, if the plan was built with weight streaming; None is all.
    """

    cuda_graphs: bool = False
    weight_budget: int | None = None

    def __post_init__(self) -> None:
        if self.weight_budget is None:
            return
        whole("weight-budget", self.weight_budget, 0, 0, 1 << 50)
        if self.cuda_graphs:
            raise RequestError(
                "weight-budget: found with cuda-graphs, but a pass that streams weights is no CUDA graph; leave one out"
            )
