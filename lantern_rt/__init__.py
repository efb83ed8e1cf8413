"""lantern-rt: deploy visual autoregressive image models with relaxed speculative decoding.

    from lantern_rt import Pipeline

    pipe = Pipeline.from_bundle("scenes")
    result = pipe("a red sphere on sand", seed=1)
    result.images[0].save("sphere.png")

The names in `__all__` are public; `docs/reference.py` writes their reference. The package logs to the logger
`lantern_rt` and adds no log handler. Importing the package is fast, because it imports a module only when a program
first uses a public name of that module.
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

TYPE_CHECKING = False  # not from `typing`, because Ctrl-C during the import of `typing` would print a traceback
if TYPE_CHECKING:
    from .asynchronous import AsyncPipeline
    from .bundle.files import open_bundle
    from .extending import register_input, register_method, register_sampling_setting
    from .options import Options
    from .pipeline import Pipeline
    from .results import Result, StreamStep
    from .runtime.statistics import Statistics

_SOURCE = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
# In a checkout, subpackages such as `runtime` lie beside this folder, so Python must search for them there, too.
if os.path.isfile(os.path.join(_SOURCE, "pyproject.toml")):
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
    "register_input",
    "register_method",
    "register_sampling_setting",
]

_MODULES_BY_NAME = {  # public name -> module that defines the name
    "AsyncPipeline": ".asynchronous",
    "Options": ".options",
    "Pipeline": ".pipeline",
    "Result": ".results",
    "Statistics": ".runtime.statistics",
    "StreamStep": ".results",
    "open_bundle": ".bundle.files",
    "register_input": ".extending",
    "register_method": ".extending",
    "register_sampling_setting": ".extending",
}


def __getattr__(name: str) -> object:
    """Return a public name of the package, after importing the module that defines the name."""
    if name not in _MODULES_BY_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES_BY_NAME[name], __name__), name)
    globals()[name] = value  # Python calls `__getattr__` only for names that are not in `globals()`
    return value


def __dir__() -> list[str]:
    """Return all names of the package, including public names that are not imported yet."""
    return sorted({*globals(), *__all__})
