"""Kernels that TensorRT-RTX compiles while plans run, kept in this user's cache folder for the next process."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from typing import Any

from ...errors import OutputError
from ...output.files import cache_folder, replace_file
from ...user_files import read_plain_file
from ..engine_folder import EngineFolder
from .cuda import find_gpu

_LIMIT = 1 << 30  # bytes


class Kernels:
    """The kernels of an engine folder's plans, by GPU and driver; of a library that compiles none, nothing."""

    def __init__(self, plans: EngineFolder | None) -> None:
        self._cache: Any = None
        self._path, self._size = None, 0
        with suppress(OutputError):  # no home folder
            if plans is not None:
                what = f"{plans.manifest.model_dump_json()} {find_gpu()}"
                name = hashlib.blake2b(what.encode(), digest_size=16).hexdigest()
                self._path = cache_folder() / "kernels" / f"{name}.bin"

    def make_context(self, engine: Any, strategy: Any) -> Any:
        """A context of a plan that uses and adds kernels."""
        config = engine.create_runtime_config() if hasattr(engine, "create_runtime_config") else None
        if config is None or not hasattr(config, "create_runtime_cache"):
            return engine.create_execution_context(strategy)
        config.set_execution_context_allocation_strategy(strategy)
        if self._cache is None:
            self._cache = config.create_runtime_cache()
            with suppress(OSError, ValueError, RuntimeError):
                data = read_plain_file(self._path, _LIMIT) if self._path else b""
                self._size = len(data) if data and self._cache.deserialize(data) else 0  # False: of another driver
        config.set_runtime_cache(self._cache)
        return engine.create_execution_context(config)

    def save(self) -> None:
        """Write the file if there are more kernels now; where it cannot be written, they are compiled again."""
        if self._path is None or self._cache is None:
            return
        with suppress(OSError, TypeError, RuntimeError):  # what the bindings raise where the library returns nothing
            if len(data := bytes(memoryview(self._cache.serialize()))) > self._size:
                replace_file(self._path, data)
                self._size = len(data)
