"""TensorRT and TensorRT-RTX as Python modules: one API under two names, imported when first asked for.

The classes that TensorRT calls back into derive from the module's own, so they are made by functions.
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
        found = f"{MODULES[name]} cannot be imported ({brief(error, 200)})"
        raise EngineError(f"{found}; install it with `pip install 'lantern-rt[{name}]'`") from error
    return module


def make_logger(library: Any) -> Any:
    """A logger that prints nothing and keeps `errors`, of which `first()` explains a failure on one line."""
    bad = (library.ILogger.ERROR, library.ILogger.INTERNAL_ERROR)

    class Logger(library.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in bad:
                self.errors.append(message)

        def first(self) -> str:  # later ones usually follow from it
            return " ".join(self.errors[0].split())[:300] if self.errors else "no reason given"

    return Logger()


def make_monitor(library: Any, what: str, say: Progress) -> Any:
    """A progress monitor that passes on the outer two levels of phases, and stops the build on Ctrl-C.

    `interrupted` on the result tells that it did: an exception must not cross the library's own frames.
    """

    class Monitor(library.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.interrupted = False
            self._phases: dict[str, tuple[int, int]] = {}  # depth and steps

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            self._phases[name] = (self._phases.get(parent, (0, 0))[0] + 1 if parent else 0, steps)
            self._report(name, 0)

        def step_complete(self, name: str, step: int) -> bool:
            self._report(name, step + 1)
            return not self.interrupted

        def phase_finish(self, name: str) -> None:
            self._report(name)

        def _report(self, name: str, done: int | None = None) -> None:
            depth, steps = self._phases.get(name, (2, 1))
            try:
                if depth < 2:
                    say(f"{what}: {name[0].lower()}{name[1:]}", steps if done is None else done, steps)
            except KeyboardInterrupt:
                self.interrupted = True

    return Monitor()
