"""Writing presets into the manifest of a bundle that is there already."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace

from ..errors import BundleError, OutputError
from ..methods import Quality
from ..output.files import replace_file
from .files import MANIFEST_FILE, Bundle
from .manifest import Manifest, Preset


def check_own(bundle: Bundle) -> None:
    """Raises: OutputError: the bundle lies in the hub's cache, which is to be left as it was fetched."""
    path = bundle.folder / MANIFEST_FILE
    if path.is_symlink():
        raise OutputError("is the hub's", field=str(path), remedy="copy the bundle to a folder of your own")


def write_presets(bundle: Bundle, presets: Mapping[Quality, Preset]) -> Bundle:
    """Write presets beside those that a bundle has, in place of those of the same quality; at once or not at all.

    Its digest changes with them: what was stored for this host, engine folders and pictures' records name the one
    before.

    Args:
        bundle: as it was opened.
        presets: by quality.

    Returns:
        The bundle as it is now.

    Raises:
        BundleError: the manifest is not the one that was opened.
        OutputError: it cannot be written.
    """
    path = bundle.folder / MANIFEST_FILE
    changed = bundle.manifest.model_copy(update={"presets": {**bundle.manifest.presets, **presets}})
    text = (changed.model_dump_json(indent=2) + "\n").encode()
    manifest = Manifest.model_validate_json(text, strict=True)
    try:
        if hashlib.sha256(path.read_bytes()).hexdigest() != bundle.digest:
            raise BundleError("changed meanwhile", field=str(path), remedy="evaluate the bundle again")
        replace_file(path, text)
    except OSError as error:
        problem = f"cannot be written ({error.strerror})"
        raise OutputError(problem, field=str(path), remedy="copy the bundle to a folder that can") from error
    return replace(bundle, manifest=manifest, digest=hashlib.sha256(text).hexdigest())
