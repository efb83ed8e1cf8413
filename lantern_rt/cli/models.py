"""The `models` command: lists published models."""

from __future__ import annotations

from typing import Any

from ..published import find_cached_bundle, find_published_model, load_published_models
from .console import print_json, print_table
from .options import JsonOption

EXAMPLES = """
lantern-rt models
lantern-rt models --json
"""
COLUMNS = {
    "name": "{name}",
    "gives": "{gives_text}",
    "sizes": "{sizes}",
    "parameters": "{parameters_text}",
    "download": "{download_gb:.1f} GB",
    "memory": "{memory_gb:.1f} GB",
    "finished bundle": "{bundles_text}",
    "licence": "{licence}{login_text}",
    "": "{cached_text}",
}


def models(
    json: JsonOption = False,
) -> None:
    """List the published models that `run`, `serve` and `export` take by name.

    The memory is for one image, with int8 weights. If a model has a finished bundle, the bundle is downloaded in place
    of the checkpoint.
    """
    rows = [_describe_model(name) for name in load_published_models()]
    if json:
        print_json(
            {"models": [{key: value for key, value in row.items() if not key.endswith("_text")} for row in rows]}
        )
    else:
        print_table(COLUMNS, rows)


def _describe_model(name: str) -> dict[str, Any]:
    """Return the fields of a model for JSON, and the texts of its table row in fields that end with `_text`."""
    model = find_published_model(name)
    places = [place for precision in ("fp16", "int8") if (place := find_cached_bundle(name, precision))]
    return {
        "name": name,
        **model.model_dump(),
        "repositories": model.repositories,
        "cached": [*map(str, places)],
        "gives_text": "images" if model.makes_images else "codes",
        "parameters_text": format_parameter_count(model.parameters),
        "download_gb": model.download_bytes / 1e9,
        "memory_gb": model.memory_bytes / 1e9,
        "bundles_text": ", ".join(
            f"{key} {bundle.download_bytes / 1e9:.1f} GB" for key, bundle in model.bundles.items()
        ),
        "login_text": ", login" if model.login else "",
        "cached_text": "in the cache" if places else "",
    }


def format_parameter_count(num_parameters: int) -> str:
    """Format a number of parameters as text, such as `111 M` or `7.0 B`."""
    return f"{num_parameters / 1e9:.1f} B" if num_parameters >= 1e9 else f"{num_parameters / 1e6:.0f} M"
