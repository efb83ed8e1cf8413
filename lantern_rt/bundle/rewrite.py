"""Changes of an existing bundle: presets and draft heads."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import BundleError, OutputError
from ..methods import Quality
from ..output.files import replace_file, write_output
from ..runtime.heads import draft_head_shapes
from .files import MANIFEST_FILE, Bundle
from .manifest import FORMAT_VERSION, DraftHeadsSpec, FileEntry, Manifest, Preset


def check_bundle_writable(bundle: Bundle) -> None:
    """Raise OutputError if the bundle is in the hub's cache, because files in the cache must not be changed."""
    path = bundle.folder / MANIFEST_FILE
    if path.is_symlink():
        raise OutputError("is in the hub's cache", field=str(path), remedy="copy the bundle to another folder")


def write_presets(bundle: Bundle, presets: Mapping[Quality, Preset]) -> Bundle:
    """Add presets to a bundle, or replace those of the same qualities. The manifest is written atomically.

    The bundle's digest changes, so engine folders and recipes of images no longer match the bundle.
    """
    return _rewrite_manifest(
        bundle, {"format_version": FORMAT_VERSION, "presets": {**bundle.manifest.presets, **presets}}
    )


def write_draft_heads(bundle: Bundle, head_arrays: Mapping[str, NDArray[np.float16]]) -> Bundle:
    """Add draft heads to a bundle, or replace its draft heads, by the names of the fields of `DraftHeads`.

    The files are written atomically. The bundle's digest changes. All presets except `strict` are removed, because
    relaxed windows generate different images with other draft heads.
    """
    manifest = bundle.manifest
    spec = DraftHeadsSpec(rank=head_arrays["change"].shape[1], units=head_arrays["left"].shape[1])
    shapes = draft_head_shapes(manifest.codebook_size, manifest.target.hidden_size, spec.rank, spec.units)
    assert {name: table.shape for name, table in head_arrays.items()} == shapes
    buffer = io.BytesIO()
    arrays: dict[str, Any] = {**head_arrays}
    np.savez_compressed(buffer, **arrays)
    path = bundle.folder / f"heads-{hashlib.sha256(buffer.getvalue()).hexdigest()[:12]}.npz"
    write_output(path, buffer.getvalue(), force=True)
    files = {**manifest.files, "heads": FileEntry.from_file(path)}
    presets = {"strict": manifest.presets["strict"]}
    changed = _rewrite_manifest(
        bundle, {"format_version": FORMAT_VERSION, "heads": spec, "files": files, "presets": presets}
    )
    if (old := manifest.files.get("heads")) and old.path != path.name:
        (bundle.folder / old.path).unlink(missing_ok=True)
    return changed


def _rewrite_manifest(bundle: Bundle, changes: Mapping[str, Any]) -> Bundle:
    path = bundle.folder / MANIFEST_FILE
    changed = bundle.manifest.model_copy(update=changes)
    text = (changed.model_dump_json(indent=2) + "\n").encode()
    manifest = Manifest.model_validate_json(text, strict=True)
    try:
        if hashlib.sha256(path.read_bytes()).hexdigest() != bundle.digest:
            raise BundleError("changed since it was opened", field=str(path), remedy="repeat the command")
        replace_file(path, text)
    except OSError as error:
        problem = f"cannot be written ({error.strerror})"
        raise OutputError(problem, field=str(path), remedy="copy the bundle to a writable folder") from error
    return replace(bundle, manifest=manifest, digest=hashlib.sha256(text).hexdigest())
