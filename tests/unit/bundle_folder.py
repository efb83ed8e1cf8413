"""Helpers that read and change the manifest of a bundle, and the smallest ONNX graph."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any


def make_stub_graph(location: str | None = None) -> bytes:
    """Return the bytes of an ONNX model with one initializer, stored in the file `location` if given."""
    tensor = _encode_field(8, b"w")
    if location is not None:
        tensor += _encode_field(13, _encode_field(1, b"location") + _encode_field(2, location.encode()))
    return b"\x08\x0a" + _encode_field(7, _encode_field(2, b"g") + _encode_field(5, tensor))


def _encode_field(number: int, payload: bytes) -> bytes:
    """Return a field of a protobuf message: tag, length and payload."""
    assert len(payload) < 128  # the length is a single byte
    return bytes([number << 3 | 2, len(payload)]) + payload


def read_manifest(folder: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((folder / "bundle.json").read_text())
    return manifest


def write_bundle_manifest(folder: Path, manifest: dict[str, Any], rehash: bool = True) -> None:
    for entry in manifest["files"].values() if rehash else ():
        data = (folder / entry["path"]).read_bytes()
        entry.update(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    (folder / "bundle.json").write_text(json.dumps(manifest, indent=2))


def set_manifest_field(manifest: dict[str, Any], path: str, value: object) -> None:
    """Set a field of a manifest, or remove it if `value` is None."""
    *outer, last = path.split(".")
    container: Any = manifest
    for key in outer:
        container = container[int(key) if isinstance(container, list) else key]
    if value is None:
        del container[last]
    else:
        container[last] = value
