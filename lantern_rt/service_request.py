"""What a service remembers of a request."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from .requests import Request
from .results import StreamState, StreamStep
from .runtime import state
from .runtime.raster import Raster
from .runtime.statistics import Clock

Listener = Callable[[StreamStep | BaseException], None]


@dataclass(eq=False)
class ServiceRequest:
    """One request in a service. All of it belongs to the service's thread but `checked` and `cancel`."""

    forget: Callable[[ServiceRequest], None]  # has the service forget it
    checked: Request
    listener: Listener
    steps: bool  # whether the listener hears of every step
    caller: str
    deadline: float  # seconds in which it has to be done
    raster: Raster  # of its images' codes
    came: float = field(default_factory=time.perf_counter)
    waited: float | None = None  # seconds before its first pass began
    places: int = 0  # images that count for the room there is, none once it has ended or was cancelled
    samples: list[state.ImageSequence] = field(default_factory=list)
    clocks: tuple[Clock, Clock] = field(default_factory=lambda: (Clock(), Clock()))  # as they stood when it began
    ended: bool = False

    def __post_init__(self) -> None:
        self.stream_state = StreamState(len(self.checked.images), self.raster.codes)

    @property
    def waits(self) -> bool:
        """Whether it has places, and none of its images was begun."""
        return bool(self.places) and not any(sample.codes for sample in self.samples)

    def cancel(self) -> None:
        """Have the service forget it within a pass, its places at once; its listener hears nothing more."""
        self.forget(self)
