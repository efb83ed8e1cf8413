"""Whether a written graph computes what its torch module computes, in ONNX Runtime on the CPU.

Does not know what the graphs mean, and does not judge the module itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime  # type: ignore[import-untyped]
from numpy.typing import NDArray

from ..errors import ParityError
from .graphs import Arrays, Graph, run_module

TOLERANCE = 1e-4  # absolute up to values of 1, relative to a tensor's largest value above


def check_parity(graph: Graph, path: Path, tolerance: float = TOLERANCE) -> float:
    """Compare `path` with `graph.module` on all of the graph's cases; returns the largest difference.

    Raises `ParityError` that names every tensor that differs by more than the tolerance.
    """
    worst = 0.0
    wrong: dict[str, tuple[float, str]] = {}
    sessions = Sessions(path)
    for case in graph.cases:
        try:
            found = sessions.run(case.inputs)
        except Exception as error:  # ONNX Runtime's own exceptions share no base class
            reason = " ".join(str(error).split())[:200]
            raise ParityError(f"{path.name}: does not run in ONNX Runtime on {case.name}: {reason}") from error
        for value, expected in zip(graph.outputs, run_module(graph, case.inputs), strict=True):
            difference = _difference(found[value.name], expected)
            worst = max(worst, difference)
            if not difference <= tolerance and not wrong.get(value.name, (0.0, ""))[0] >= difference:
                wrong[value.name] = difference, case.name
    if wrong:
        listed = ", ".join(f"{name} by {d:.3g} ({case})" for name, (d, case) in wrong.items())
        raise ParityError(f"{path.name}: differs from the checkpoint by more than {tolerance:g}: {listed}")
    return worst


class Sessions:
    """ONNX Runtime on one graph file, for calls with and without an empty past.

    ONNX Runtime 1.31 divides by zero in a fused product over an empty tensor, so calls with one go to a
    session without that fusion.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._sessions: dict[bool, onnxruntime.InferenceSession] = {}

    def run(self, inputs: Arrays) -> Arrays:
        """All outputs by name."""
        empty = any(array.size == 0 for array in inputs.values())
        if empty not in self._sessions:
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = 1
            options.log_severity_level = 4
            self._sessions[empty] = onnxruntime.InferenceSession(
                self.path,
                options,
                providers=["CPUExecutionProvider"],
                disabled_optimizers=["MatmulTransposeFusion"] if empty else None,
            )
        session = self._sessions[empty]
        return dict(zip((o.name for o in session.get_outputs()), session.run(None, inputs), strict=True))


def _difference(found: NDArray[Any], expected: NDArray[Any]) -> float:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    if not expected.size:
        return 0.0
    if np.issubdtype(expected.dtype, np.integer):
        return float(np.abs(found - expected).max())
    difference = float(np.abs(found.astype(np.float64) - expected).max())
    return float("inf") if np.isnan(difference) else difference / max(1.0, float(np.abs(expected).max()))
