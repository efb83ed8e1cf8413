"""lantern-rt: deploy visual autoregressive image models with relaxed speculative decoding.

    from lantern_rt import Pipeline

    pipe = Pipeline.from_bundle("scenes")
    result = pipe("a red sphere on sand", seed=1)
    result.images[0].save("sphere.png")

The names in `__all__` are public; `docs/reference.py` writes their reference. It logs to the logger `lantern_rt` and
adds no handler. Importing the package is fast, because a module is imported when one of its names is first used.
"""

from __future__ import annotations

import importlib
import os

from .errors import (
    BundleError,
    BusyError,
    CheckpointError,
    EngineError,
    LanternError,
    OutputError,
    ParityError,
    RequestError,
    TreeError,
)
from .version import __version__

TYPE_CHECKING = False  # `typing` is not imported, as Ctrl-C during its import would print a traceback
if TYPE_CHECKING:
    from .asynchronous import AsyncPipeline
    from .bundle.files import open_bundle
    from .options import Options
    from .pipeline import Pipeline
    from .results import Result, StreamStep
    from .runtime.statistics import Statistics

_SOURCE = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
if os.path.isfile(os.path.join(_SOURCE, "pyproject.toml")):  # a checkout, whose sibling folders are subpackages
    __path__[:] = [os.path.dirname(os.path.realpath(__file__)), _SOURCE]

__all__ = [
    "AsyncPipeline",
    "BundleError",
    "BusyError",
    "CheckpointError",
    "EngineError",
    "LanternError",
    "Options",
    "OutputError",
    "ParityError",
    "Pipeline",
    "RequestError",
    "Result",
    "Statistics",
    "StreamStep",
    "TreeError",
    "__version__",
    "open_bundle",
]

_LAZY = {
    "AsyncPipeline": ".asynchronous",
    "Options": ".options",
    "Pipeline": ".pipeline",
    "Result": ".results",
    "Statistics": ".runtime.statistics",
    "StreamStep": ".results",
    "open_bundle": ".bundle.files",
}


def __getattr__(name: str) -> object:
    """Import a public name's module when the name is first used."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names, whether or not they are imported."""
    return sorted({*globals(), *__all__})
