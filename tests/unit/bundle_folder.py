"""Read and write the manifest of a bundle's folder; and the smallest ONNX graph."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any


def stub_graph(location: str | None = None) -> bytes:
    """Return the bytes of an ONNX model with one initializer, stored in the file `location` if given."""
    tensor = _field(8, b"w")
    if location is not None:
        tensor += _field(13, _field(1, b"location") + _field(2, location.encode()))
    return b"\x08\x0a" + _field(7, _field(2, b"g") + _field(5, tensor))


def _field(number: int, payload: bytes) -> bytes:
    assert len(payload) < 128
    return bytes([number << 3 | 2, len(payload)]) + payload


def read_manifest(folder: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((folder / "bundle.json").read_text())
    return manifest


def write_manifest(folder: Path, manifest: dict[str, Any], rehash: bool = True) -> None:
    """Write `bundle.json`, with the current sizes and hashes of the files."""
    for entry in manifest["files"].values() if rehash else ():
        data = (folder / entry["path"]).read_bytes()
        entry.update(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    (folder / "bundle.json").write_text(json.dumps(manifest, indent=2))


def set_field(manifest: dict[str, Any], path: str, value: object) -> None:
    """Set a field by its dotted name; None removes it."""
    *outer, last = path.split(".")
    part: Any = manifest
    for key in outer:
        part = part[int(key) if isinstance(part, list) else key]
    if value is None:
        del part[last]
    else:
        part[last] = value
