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
    return migrated


def _renamed(part: Any, names: dict[str, str]) -> Any:
    return {names.get(key, key): value for key, value in part.items()} if isinstance(part, dict) else part
