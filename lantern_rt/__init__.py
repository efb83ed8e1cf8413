"""lantern-rt: deploy visual autoregressive image models with relaxed speculative decoding."""

from __future__ import annotations

from pathlib import Path

_SOURCE = Path(__file__).resolve().parent.parent
if (_SOURCE / "pyproject.toml").is_file():  # a checkout: the sibling folders are this package's subpackages
    __path__.append(str(_SOURCE))

__version__ = "0.1.0"
