"""The `inspect` command: what a bundle or an engine folder says about itself."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ..bundle.files import Bundle, embedded_names, open_bundle
from ..engines.engine_folder import EngineFolder, is_engine_folder, open_engine_folder
from ..engines.profiles import Profile
from .console import Facts, print_facts, print_json
from .options import Json

EXAMPLES = """
lantern-rt inspect scenes
lantern-rt inspect bundles/llamagen-b --json
lantern-rt inspect engines/scenes-cpu
"""


def inspect(
    bundle: Annotated[
        str, typer.Argument(help="Bundle folder, or the name of an embedded bundle, or an engine folder.")
    ],
    json: Json = False,
) -> None:
    """Check a bundle or an engine folder, hashes included, and print what it says about itself."""
    if bundle not in embedded_names() and is_engine_folder(bundle):
        engines = open_engine_folder(bundle)
        engines.check_files()
        if json:
            print_json({"folder": str(engines.folder), "manifest": engines.manifest.model_dump(mode="json")})
        else:
            print_facts(describe_engines(engines))
        return
    opened = open_bundle(bundle)
    if json:
        size = sum(entry.bytes for entry in opened.manifest.files.values())
        head = {"folder": str(opened.folder), "digest": opened.digest, "bytes": size}
        print_json({**head, "manifest": opened.manifest.model_dump(mode="json")})
    else:
        print_facts(describe(opened))


def describe(bundle: Bundle) -> Facts:
    """Everything a bundle says about itself: one section per part of the manifest, its own values first."""
    size = sum(entry.bytes for entry in bundle.manifest.files.values())
    facts: Facts = {"bundle": {"folder": str(bundle.folder), "digest": bundle.digest, "bytes": f"{size:,}"}}
    for key, value in bundle.manifest.model_dump(mode="json").items():
        if key == "files":
            facts[key] = {role: f"{f['path']}  {f['bytes']:,} bytes  sha256 {f['sha256']}" for role, f in value.items()}
        elif isinstance(value, dict):
            facts[key] = _leaves(value)
        else:
            facts["bundle"][key] = "none" if value is None else str(value)
    return facts


def _leaves(part: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """The set values of nested parts as dotted names and text."""
    lines: dict[str, str] = {}
    for key, value in part.items():
        if isinstance(value, list):
            value = {str(i): item for i, item in enumerate(value)}
        if isinstance(value, dict):
            lines |= _leaves(value, f"{prefix}{key}.")
        elif value is not None:
            lines[f"{prefix}{key}"] = str(value)
    return lines


def describe_engines(engines: EngineFolder) -> Facts:
    """Everything an engine folder says about itself: the folder, its settings, and a section for every graph."""
    manifest = engines.manifest
    own = {"folder": str(engines.folder)}
    for key, value in manifest.model_dump(mode="json", exclude={"graphs", "settings", "command"}).items():
        own[key] = (", ".join(value) if isinstance(value, list) else str(value or "")) or "none"
    facts = {"engines": {**own, "rebuild": engines.rebuild}}
    if manifest.settings:
        facts["settings"] = dict(manifest.settings)
    for role, graph in manifest.graphs.items():
        facts[role] = {
            "build": f"{graph.seconds:.1f} s",
            **{f"from {name}": f"sha256 {sha256}" for name, sha256 in graph.onnx_sha256.items()},
            **{file.path: f"{file.bytes:,} bytes  blake2b {file.blake2b}" for file in graph.files},
            **{f"profile {profile.name}": profile_line(profile) for profile in graph.profiles},
        }
    return facts


def profile_line(profile: Profile) -> str:
    """A profile's ranges as text: smallest / tuned for / largest."""
    parts: dict[str, Any] = profile.model_dump(exclude={"name"})
    return ", ".join(f"{name} {'/'.join(map(str, sizes))}" for name, sizes in parts.items() if sizes[2])
