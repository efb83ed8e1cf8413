"""A timer of the parts of a decoding step on the host: ONNX Runtime, inputs, sampling, noise and the decode loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from threading import get_ident
from typing import Any, Self

from lantern_rt.engines.device_engine import DeviceEngine
from lantern_rt.engines.ort.session import GraphSession
from lantern_rt.runtime.batch import Batch
from lantern_rt.runtime.noise import Noise

PARTS = (
    (GraphSession, "_call_session", "engine"),
    (DeviceEngine, "run", "inputs"),
    (Batch, "_sample_tokens", "sampling"),
    (Noise, "gumbel", "noise"),
)


class StepPartTimer:
    """A timer that divides the time of decoding steps into parts, for use in a `with` block.

    A part is the time in one function of `PARTS`, without the time in functions of other parts that this function
    calls. The part `loop` is the remaining time. Only calls on the thread that made the timer are measured.

    Args:
        read_clock: function that returns the time in seconds.
    """

    def __init__(self, read_clock: Callable[[], float]) -> None:
        self._now = read_clock
        self._thread = get_ident()
        self._seconds: Counter[str] = Counter()
        self._parts = ["loop"]
        self._since = read_clock()
        self._functions = [getattr(owner, name) for owner, name, _ in PARTS]

    def __enter__(self) -> Self:
        for (owner, name, part), function in zip(PARTS, self._functions, strict=True):
            setattr(owner, name, self._wrap_function(function, part))
        self.read_and_reset()
        return self

    def __exit__(self, *_: object) -> None:
        for (owner, name, _), function in zip(PARTS, self._functions, strict=True):
            setattr(owner, name, function)

    def read_and_reset(self) -> Counter[str]:
        """Return the seconds by part since the last call of this method."""
        self._add_elapsed_time()
        seconds = self._seconds
        self._seconds = Counter()
        return seconds

    def _add_elapsed_time(self) -> None:
        now = self._now()
        self._seconds[self._parts[-1]] += now - self._since
        self._since = now

    def _wrap_function(self, function: Callable[..., Any], part_name: str) -> Callable[..., Any]:
        def timed_function(*arguments: Any, **options: Any) -> Any:
            if get_ident() != self._thread:
                return function(*arguments, **options)
            self._add_elapsed_time()
            self._parts.append(part_name)
            try:
                return function(*arguments, **options)
            finally:
                self._add_elapsed_time()
                self._parts.pop()

        return timed_function
