"""Layers and source files of the package `lantern_rt`, without other files of the checkout."""

from __future__ import annotations

from pathlib import Path

import lantern_rt

# From low to high: a module imports only from its layer and lower layers.
LAYERS = (
    ("errors", "version"),
    ("hints", "inputs", "methods", "options"),
    ("runtime", "bundle", "text", "subjects", "output"),
    ("completion", "engines", "extending", "requests"),
    ("export",),
    ("memory", "results", "prepared", "service_request", "shared_batches", "sharing", "published", "model_names"),
    ("pipeline",),
    ("asynchronous", "service"),
    ("serve", "compare", "train"),
    ("cli",),
)
# The index of each module's layer.
RANKS = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}


def find_package_files() -> dict[str, Path]:
    """Return the file of every module in `LAYERS`, by dotted name; a package's is its `__init__.py`."""
    files: dict[str, Path] = {}
    for root in map(Path, lantern_rt.__path__):
        for name in RANKS:
            for file in (root / f"{name}.py", *(root / name).rglob("*.py")):
                if file.is_file():
                    parts = file.relative_to(root).with_suffix("").parts
                    files[".".join(part for part in parts if part != "__init__")] = file
    return files
