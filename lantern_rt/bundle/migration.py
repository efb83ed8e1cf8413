"""Manifests of earlier formats as the present one: what format 1 called otherwise.

Works on parsed JSON before it is validated: whatever does not look like format 1 is left for validation to refuse.
"""

from __future__ import annotations

from typing import Any

_DECODER = {
    "width": "hidden_size",
    "layers": "num_layers",
    "kv_heads": "num_kv_heads",
    "head_width": "head_dim",
    "vocabulary": "vocab_size",
    "positions": "max_positions",
}


def from_format_1(manifest: dict[str, Any], version: str) -> dict[str, Any]:
    """The fields of a manifest of format 1.x under their names in format `version`."""
    migrated = {**manifest, "format_version": version}
    for part in ("target", "drafter"):
        migrated[part] = _renamed(manifest.get(part), _DECODER)
    migrated["condition"] = _renamed(manifest.get("condition"), {"caption_width": "caption_dim"})
    migrated["decoding"] = _decoding(manifest.get("decoding"))
    files = manifest.get("files")
    if isinstance(files, dict):  # statistics of format 1 were of methods that are gone; `auto` does without them
        migrated["files"] = {role: entry for role, entry in files.items() if role != "rates"}
    return migrated


def _decoding(part: Any) -> Any:
    """Defaults as methods. Windows of format 1 could be drafted in other ways, equally exact, which are gone."""
    if not isinstance(part, dict):
        return part
    methods: list[Any] = []
    listed = part.get("methods", {})
    for name, own in listed.items() if isinstance(listed, dict) else ():
        if not isinstance(own, dict):
            return part
        idle = {"eagle": ("neighbors", "delta", "lambda_"), "lantern": ("lambda_",)}.get(name, ("delta",))
        given = {key: value for key, value in own.items() if value not in (None, 0) and key not in idle}
        methods.append({"method": name, **_renamed(given, {"lambda_": "lambda"})})
    if isinstance(window := part.get("sjd"), dict):
        methods.append({"method": "sjd", **{key: value for key, value in window.items() if key == "window"}})
    rest = {key: value for key, value in part.items() if key != "sjd"}
    return {**rest, "methods": methods}


def _renamed(part: Any, names: dict[str, str]) -> Any:
    return {names.get(key, key): value for key, value in part.items()} if isinstance(part, dict) else part
