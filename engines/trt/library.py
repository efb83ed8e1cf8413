"""TensorRT and TensorRT-RTX as Python modules: one API under two names, and what both need around a build.

Neither is imported before it is asked for. The classes that TensorRT calls back into derive from the module's
own, so they are made by functions.
"""

from __future__ import annotations

import importlib
from typing import Any

from ...checks import brief
from ...errors import EngineError
from ..contracts import Progress

MODULES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}


def import_library(name: str) -> Any:
    """The module of a backend. Raises: EngineError with the command that installs it."""
    try:
        module = importlib.import_module(MODULES[name])
        _ = module.__version__  # any folder of that name on the path would be a module, too
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        what = brief(error, 200)
        raise EngineError(
            f"{MODULES[name]} cannot be imported ({what}); install it with `pip install 'lantern-rt[{name}]'`"
        ) from error
    return module


def make_logger(library: Any, errors: list[str]) -> Any:
    """A logger that prints nothing and appends to `errors`, which explain a failure."""
    bad = (library.ILogger.ERROR, library.ILogger.INTERNAL_ERROR)

    class Logger(library.ILogger):  # type: ignore[misc]
        def log(self, severity: Any, message: str) -> None:
            if severity in bad:
                errors.append(message)

    return Logger()


def first(errors: list[str]) -> str:
    """The first error on one line; later ones usually follow from it."""
    return " ".join(errors[0].split())[:300] if errors else "no reason given"


def make_monitor(library: Any, what: str, say: Progress) -> Any:
    """A progress monitor that passes on the outer two levels of phases, and stops the build on Ctrl-C.

    `interrupted` on the result tells that it did: an exception must not cross the library's own frames.
    """

    class Monitor(library.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.interrupted = False
            self._steps: dict[str, int] = {}
            self._depth: dict[str, int] = {}

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            self._depth[name] = self._depth.get(parent, 0) + 1 if parent else 0
            self._steps[name] = steps
            self._report(name, 0)

        def step_complete(self, name: str, step: int) -> bool:
            self._report(name, step + 1)
            return not self.interrupted

        def phase_finish(self, name: str) -> None:
            self._report(name, self._steps.get(name, 1))

        def _report(self, name: str, done: int) -> None:
            try:
                if self._depth.get(name, 2) < 2:
                    say(f"{what}: {name[0].lower()}{name[1:]}", done, self._steps[name])
            except KeyboardInterrupt:
                self.interrupted = True

    return Monitor()
