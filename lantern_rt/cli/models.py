"""The `models` command: lists published models, and removes their bundles from the cache."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import OutputError
from ..inputs import format_error
from ..published import find_published_model, list_cached_bundles, load_published_models
from .console import print_json, print_stderr, print_table
from .options import JsonOption

EXAMPLES = """
lantern-rt models
lantern-rt models --json
lantern-rt models --remove llamagen-c2i-b-256
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
    remove: Annotated[
        str | None, typer.Option(metavar="NAME", help="Remove the bundles of this model from the cache.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """List the published models that `run`, `serve` and `export` take by name.

    The memory is for one image, with int8 weights. If a model has a finished bundle, the bundle is downloaded in place
    of the checkpoint.
    """
    if remove is not None:
        find_published_model(remove)
        for folder in list_cached_bundles(remove):
            _remove_folder(folder)
            print_stderr(f"removed {folder}")
        print_stderr("downloads stay in the hub's cache; `hf cache rm` removes them")
        return
    rows = [_describe_model(name) for name in load_published_models()]
    if json:
        print_json(
            {"models": [{key: value for key, value in row.items() if not key.endswith("_text")} for row in rows]}
        )
    else:
        print_table(COLUMNS, rows)


def _remove_folder(folder: Path) -> None:
    try:
        if folder.is_symlink():
            folder.unlink()
        else:
            shutil.rmtree(folder)
    except OSError as error:
        raise OutputError(f"cannot be removed ({format_error(error)})", field=str(folder)) from error


def _describe_model(name: str) -> dict[str, Any]:
    """Return the fields of a model for JSON, and the texts of its table row in fields that end with `_text`."""
    model = find_published_model(name)
    folders = [str(folder) for folder in list_cached_bundles(name)]
    return {
        "name": name,
        **model.model_dump(),
        "repositories": model.repositories,
        "cached": folders,
        "gives_text": "images" if model.makes_images else "codes",
        "parameters_text": format_parameter_count(model.parameters),
        "download_gb": model.download_bytes / 1e9,
        "memory_gb": model.memory_bytes / 1e9,
        "bundles_text": ", ".join(
            f"{key} {bundle.download_bytes / 1e9:.1f} GB" for key, bundle in model.bundles.items()
        ),
        "login_text": ", login" if model.login else "",
        "cached_text": "in the cache" if folders else "",
    }


def format_parameter_count(num_parameters: int) -> str:
    """Format a number of parameters as text, such as `111 M` or `7.0 B`."""
    return f"{num_parameters / 1e9:.1f} B" if num_parameters >= 1e9 else f"{num_parameters / 1e6:.0f} M"
