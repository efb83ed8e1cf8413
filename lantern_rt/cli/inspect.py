"""The `inspect` command: what a bundle or an engine folder says about itself."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ..bundle.files import embedded_names
from ..engines.engine_folder import is_engine_folder, open_engine_folder
from .console import Facts, print_facts, print_json, progress
from .options import Json, open_whole

EXAMPLES = """
lantern-rt inspect scenes
lantern-rt inspect bundles/llamagen-b --json
lantern-rt inspect engines/llamagen-xl
"""


def inspect(
    bundle: Annotated[
        str, typer.Argument(help="Bundle folder, or the name of an embedded bundle, or an engine folder.")
    ],
    json: Json = False,
) -> None:
    """Check a bundle or an engine folder, hashes included, and print what it says about itself."""
    head: dict[str, Any]
    if bundle not in embedded_names() and is_engine_folder(bundle):
        engines = open_engine_folder(bundle)
        with progress(lines=False) as show:
            show("checking the engines' files")
            engines.check_files()
        head, manifest = {"folder": str(engines.folder)}, engines.manifest.model_dump(mode="json")
        shown = {key: value for key, value in manifest.items() if key != "command"}
        facts = describe("engines", {**head, **shown, "rebuild": engines.rebuild})
    else:
        opened = open_whole(bundle)
        size = sum(entry.bytes for entry in opened.manifest.files.values())
        head = {"folder": str(opened.folder), "digest": opened.digest, "bytes": size}
        manifest = opened.manifest.model_dump(mode="json")
        sizes = {"sizes": [one.name for one in opened.manifest.sizes]} if opened.manifest.sizes else {}
        facts = describe("bundle", {**head, "bytes": f"{size:,}", **manifest, **sizes})
    if json:
        print_json({**head, "manifest": manifest})
    else:
        print_facts(facts)


def describe(kind: str, parts: dict[str, Any]) -> Facts:
    """All values as text: those that stand alone in a section called `kind`, then a section for each part."""
    own = {key: _text(value) for key, value in parts.items() if not isinstance(value, dict)}
    nested = {key: _leaves(value) for key, value in parts.items() if isinstance(value, dict)}
    return {kind: own, **{section: values for section, values in nested.items() if values}}


def _leaves(part: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """The set values of nested parts by their dotted names; a file is one value."""
    lines: dict[str, str] = {}
    for key, value in part.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            value = {str(i): item for i, item in enumerate(value)}
        if isinstance(value, dict) and "path" not in value:
            lines |= _leaves(value, f"{prefix}{key}.")
        elif value is not None:
            lines[f"{prefix}{key}"] = _text(value)
    return lines


def _text(value: Any) -> str:
    if isinstance(value, dict):
        sums = "  ".join(f"{name} {value[name]}" for name in ("sha256", "blake2b") if name in value)
        return f"{value['path']}  {value['bytes']:,} bytes  {sums}"
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else "none" if value is None else str(value)
