"""What a service remembers of a request."""

from __future__ import annotations

import time
from collections.abc import Callable

from .methods import Auto, MethodConfig
from .requests import Request, Settings
from .results import Progress, StreamStep
from .runtime import state
from .runtime.grid import Raster
from .runtime.statistics import Clock

Listener = Callable[[StreamStep | BaseException], None]


class Ticket:
    """One request in a service. All of it belongs to the service's thread but `request` and `cancel`.

    Args:
        forget: has the service forget it.
        request: that was checked.
        listener: hears of it.
        steps: whether it hears of every step.
        caller: whose request it is.
        deadline: seconds from now in which it has to be done.
        raster: how the codes of its images stand in their sequence.
        raced: settings of a race whose methods draw the same pictures, None where there is none.

    Attributes:
        waited: seconds before its first pass began, None until then.
        places: images that count for the room there is, none once it has ended or was cancelled.
    """

    def __init__(
        self,
        forget: Callable[[Ticket], None],
        request: Request,
        listener: Listener,
        steps: bool,
        caller: str,
        deadline: float,
        raster: Raster,
        raced: Settings | None,
    ) -> None:
        self._forget = forget
        self.request = request
        self.listener = listener
        self.steps = steps
        self.caller = caller
        self.came = time.perf_counter()
        self.end = self.came + deadline
        self.waited: float | None = None
        self.places = 0
        self.automatic = isinstance(request.settings.method, Auto)  # drawn by what suits the load
        self.raced = raced
        self.choice: str | None = None  # what `auto` chose, in words
        self.samples: list[state.Request] = []
        self.raster = raster
        self.progress = Progress(len(request.images), raster.codes)
        self.clocks = Clock(), Clock()  # as they stood when it began
        self.ended = False

    @property
    def waits(self) -> bool:
        """Whether none of its images has been begun."""
        return not any(sample.codes for sample in self.samples)

    def use(self, method: MethodConfig, choice: str | None) -> None:
        """Have its images drawn by this method from now on. choice: why, None if that is what was asked for."""
        self.choice = choice
        for sample in self.samples:
            sample.use(method)

    def cancel(self) -> None:
        """Have the service forget the request within a pass, after which its listener hears nothing more.

        Its places are free at once.
        """
        self._forget(self)
