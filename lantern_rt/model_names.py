"""What a word means that may name a model, for all commands and for Python."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import Any

from .bundle.files import MANIFEST_FILE, Bundle, list_embedded_bundle_names, open_bundle
from .bundle.hub import HUB, REPOSITORY
from .errors import BundleError, RequestError
from .published import is_published, load_published_models, open_published_model

_CHECKPOINT_FILES = ("config.json", "model_index.json", "adapter_config.json")
_WEIGHT_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")


def find_model_name(word: str) -> str | None:
    """Return the name under which the model that a word names is opened, or None if the word is no model.

    A word is the name of an embedded bundle or of a published model, the repository of a published model on the hub
    (`owner/name`), another repository, or the path of a bundle or checkpoint. Any other word may be a prompt.
    """
    if word in list_embedded_bundle_names() or is_published(word):
        return word
    repository = word.removeprefix(HUB)
    models = load_published_models()
    if names := [name for name, model in models.items() if model.target_repository == repository]:
        if len(names) > 1:
            raise RequestError(field="model", found=repr(word), expected=f"one of its models: {', '.join(names)}")
        return names[0]
    is_model = word.startswith(HUB) or _holds_bundle(word) or _holds_checkpoint(word)
    return word if is_model or re.fullmatch(REPOSITORY, word) else None


def open_model(name: str | Path, download: bool = False, **options: Any) -> Bundle:
    """Open the bundle of a model, which is a word as `find_model_name` reads it, or the path of a bundle.

    With `download`, a published model that is not in the caches is downloaded and, if needed, exported. `options` are
    those of `open_bundle`.
    """
    word = str(name)
    known = (find_model_name(word) or name) if isinstance(name, str) else name  # a path is never a name
    if is_published(known):
        return open_published_model(known, download, **options)
    exported = f"`lantern-rt export {quote(word)} --output {quote(Path(word).name)}-bundle`"
    if _holds_checkpoint(word) and not _holds_bundle(word):
        raise BundleError("a checkpoint, not a bundle", field=word, remedy=f"{exported} makes a bundle of it")
    if re.fullmatch(REPOSITORY, word) and not Path(word).exists():
        problem = "neither a folder nor the repository of a published model"
        remedy = f"for a bundle on the hub write {HUB}{word}; for a checkpoint run {exported}"
        raise BundleError(problem, field=word, remedy=remedy)
    return open_bundle(known, **options)


def _holds_bundle(word: str) -> bool:
    with suppress(OSError, ValueError):  # too long for a path
        return word != "" and (Path(word) / MANIFEST_FILE).is_file()
    return False


def _holds_checkpoint(word: str) -> bool:
    """Return whether a path is a file of weights, or a folder with such a file or a configuration."""
    path = Path(word)
    with suppress(OSError, ValueError):
        files = path.iterdir() if word != "" and path.is_dir() else [path]
        return any(file.is_file() and is_checkpoint_file(file) for file in files)
    return False


def is_checkpoint_file(file: Path) -> bool:
    return file.name in _CHECKPOINT_FILES or file.suffix in _WEIGHT_SUFFIXES
