"""Download of checkpoints from a model hub.

Only files that an exporter reads are fetched: configuration, tokenizer and weights in one format, or a single file.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from fnmatch import fnmatchcase
from os.path import exists
from pathlib import Path
from typing import TypeGuard

from ...bundle.hub import (
    HUB,
    PLAIN_PATH,
    SNAPSHOT,
    convert_hub_errors,
    download_files,
    is_hub_rejection,
    parse_hub_reference,
)
from ...errors import CheckpointError, LanternError
from ...inputs import reraise_error_of_signal_handler
from .files import format_names
from .folders import INDEX, PAIRS, SINGLE, choose_weight_files, read_weight_index

# Files that are fetched with the weights if they exist.
_SIDE_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
_SECONDS = 60  # maximum time in which the hub lists files
_CACHED = re.compile(rf"{SNAPSHOT}/(?P<file>.+)")


def find_hub_reference(path: Path) -> str | None:
    """Return the hub reference (with commit) of a file in the local hub cache; None for a file outside the cache."""
    match = _CACHED.fullmatch(path.as_posix())
    return match and f"{HUB}{match['owner']}/{match['name']}/{match['file']}@{match['commit']}"


def fetch_checkpoint(source: Path | str, file_patterns: Collection[str] = (), side_files: Collection[str] = ()) -> Path:
    """Return the local path of a checkpoint's file or folder; download it first if `source` is a hub reference.

    Args:
        file_patterns: names of files to download instead of a model's weights, such as `processor/*`. The first name
            must not have wildcards.
        side_files: names of further files to download if they exist, besides configurations and `tokenizer.json`.
    """
    text = source.as_posix() if isinstance(source, Path) else source
    if not text.startswith(HUB):
        if not exists(source):
            raise CheckpointError("no such file or folder", field=text, remedy="give a path or hf:owner/name")
        return Path(source)
    repository, file, revision = parse_hub_reference(text, CheckpointError)
    from huggingface_hub import try_to_load_from_cache

    remedy = f"try again, or download {file or 'the folder'} of {repository} by hand and give its path"
    with convert_hub_errors(text, CheckpointError, remedy):
        try:
            sizes, _ = _list_files(repository, revision)
            chosen = _select_download_files(text, file, sizes, file_patterns, side_files)
            folder = download_files(repository, chosen, revision)
            if index := next((name for name in chosen if name in INDEX), None):
                download_files(repository, read_weight_index(folder / index), folder.name)
        except Exception as error:
            reraise_error_of_signal_handler(error)
            # Fall back to the cache; missing files raise an error when they are read.
            known = [file, f"{file}/{SINGLE[0]}"] if file else [*file_patterns, *_SIDE_FILES][:1]
            cached = {name: try_to_load_from_cache(repository, name, revision=revision) for name in known}
            roots = [Path(path).parents[name.count("/")] for name, path in cached.items() if isinstance(path, str)]
            if isinstance(error, LanternError) or is_hub_rejection(error) or not roots:
                raise
            return roots[0] / (file or "")
    return folder / (file or "")


def measure_download_size(
    source: str, file_patterns: Collection[str] = (), side_files: Collection[str] = ()
) -> tuple[int, int]:
    """Return the size of a checkpoint on the hub, and of what `fetch_checkpoint` would download of it, in bytes.

    Both are 0 if the hub cannot be reached or rejects the reference; `fetch_checkpoint` then raises the error.
    """
    from huggingface_hub import try_to_load_from_cache

    try:
        repository, file, revision = parse_hub_reference(source, CheckpointError)
        sizes, commit = _list_files(repository, revision)
        chosen = _select_download_files(source, file, sizes, file_patterns, side_files)
        if index := next((name for name in chosen if name in INDEX), None):
            chosen += read_weight_index(download_files(repository, [index], commit) / index)
        cached = {name for name in chosen if isinstance(try_to_load_from_cache(repository, name, revision=commit), str)}
    except Exception as error:
        reraise_error_of_signal_handler(error)
        return 0, 0
    counted = {name: sizes.get(name, 0) for name in chosen}
    return sum(counted.values()), sum(size for name, size in counted.items() if name not in cached)


def _list_files(repository: str, revision: str | None) -> tuple[dict[str, int], str | None]:
    """Return the sizes of a repository's files by name, unknown ones as 0, and the commit of the repository."""
    from huggingface_hub import HfApi

    info = HfApi().model_info(repository, revision=revision, files_metadata=True, timeout=_SECONDS)
    files = [entry for entry in info.siblings or [] if re.fullmatch(PLAIN_PATH, entry.rfilename)]
    return {entry.rfilename: entry.size if _is_size(entry.size) else 0 for entry in files}, info.sha


def _is_size(size: object) -> TypeGuard[int]:
    return type(size) is int and 0 <= size < 1 << 62


def _select_download_files(
    source: str,
    file: str | None,
    available_files: Collection[str],
    file_patterns: Collection[str],
    side_files: Collection[str],
) -> list[str]:
    patterns = (
        [file, f"{file}/model*.safetensors"]  # the file, or the weights in the folder
        if file
        else [*(file_patterns or _select_weight_files(source, available_files)), *_SIDE_FILES, *side_files]
    )
    chosen = [name for name in available_files if any(fnmatchcase(name, pattern) for pattern in patterns)]
    if not chosen:
        raise CheckpointError(
            "no such file", field=source, found=format_names(available_files), remedy="give one of these files"
        )
    return chosen


def _select_weight_files(source: str, available_files: Collection[str]) -> list[str]:
    chosen = choose_weight_files({name for name in available_files if name in (*SINGLE, *INDEX, *PAIRS[0], *PAIRS[1])})
    if not chosen:
        expected = f"{SINGLE[0]} or alike"
        raise CheckpointError(
            field=source, found=format_names(available_files), expected=expected, remedy=f"name one: {source}/FILE"
        )
    return chosen
