"""Download of checkpoints from a model hub.

Only files that an exporter reads are fetched: configuration, tokenizer and weights in one format, or a single file.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from fnmatch import fnmatchcase
from pathlib import Path

from ...bundle.hub import HUB, PLAIN_PATH, SNAPSHOT, download_files, hub_errors, is_rejected, parse_reference
from ...errors import CheckpointError, LanternError
from ...inputs import reraise_interruption
from .files import listing
from .folders import INDEX, PAIRS, SINGLE, choose_files, read_index

# Files that are fetched with the weights if they exist.
_SIDE_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
_SECONDS = 60  # maximum time in which the hub lists files
_CACHED = re.compile(rf"{SNAPSHOT}/(?P<file>.+)")


def cached_origin(path: Path) -> str | None:
    """Return the reference, with its commit, of a file in the hub's cache; None for other files."""
    match = _CACHED.fullmatch(path.as_posix())
    return match and f"{HUB}{match['owner']}/{match['name']}/{match['file']}@{match['commit']}"


def fetch(source: Path | str, names: Collection[str] = (), side_files: Collection[str] = ()) -> Path:
    """Return the local path of a file or folder, downloading it if `source` is a reference.

    Args:
        source: path, which is returned unchanged, or reference to the hub.
        names: files of a folder, or patterns, to fetch instead of a model's weights; the first is a file.
        side_files: further files to fetch if they exist, besides a model's configurations and `tokenizer.json`.

    Raises:
        CheckpointError: the reference is malformed, does not exist, or can neither be downloaded nor is cached.
    """
    text = source.as_posix() if isinstance(source, Path) else source
    if not text.startswith(HUB):
        return Path(source)
    repository, file, revision = parse_reference(text, CheckpointError)
    from huggingface_hub import HfApi, try_to_load_from_cache

    remedy = f"try again, or download {file or 'the folder'} of {repository} by hand and give its path"
    with hub_errors(text, CheckpointError, remedy):
        try:
            siblings = HfApi().model_info(repository, revision=revision, timeout=_SECONDS).siblings or []
            files = [entry.rfilename for entry in siblings if re.fullmatch(PLAIN_PATH, entry.rfilename)]
            patterns = [file] if file else [*(names or _choose_weights(text, files)), *_SIDE_FILES, *side_files]
            chosen = [name for name in files if any(fnmatchcase(name, pattern) for pattern in patterns)]
            if not chosen:
                raise CheckpointError("no such file", field=text, found=listing(files), remedy="give one of these")
            folder = download_files(repository, chosen, revision)
            index = folder / patterns[0]
            if index.name in INDEX:
                download_files(repository, read_index(index), folder.name)
        except Exception as error:
            reraise_interruption(error)
            # Fall back to the cache; missing files raise an error when they are read.
            known = file or [*names, *_SIDE_FILES][0]
            cached = try_to_load_from_cache(repository, known, revision=revision)
            if isinstance(error, LanternError) or is_rejected(error) or not isinstance(cached, str):
                raise
            return Path(cached) if file else Path(cached).parents[known.count("/")]
    return folder / (file or "")


def _choose_weights(source: str, files: Collection[str]) -> list[str]:
    chosen = choose_files({name for name in files if name in (*SINGLE, *INDEX, *PAIRS[0], *PAIRS[1])})
    if not chosen:
        expected = f"{SINGLE[0]} or alike"
        raise CheckpointError(field=source, found=listing(files), expected=expected, remedy=f"name one: {source}/FILE")
    return chosen
