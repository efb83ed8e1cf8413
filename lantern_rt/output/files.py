"""Where files go: names, checks before the work, and writing all or nothing.

A file is written under a hidden name in its own folder and then moved into place, so that no reader ever
sees half of it.
"""

from __future__ import annotations

import os
import re
import secrets
import tempfile
from collections.abc import Sequence
from itertools import chain, count
from pathlib import Path

from ..checks import brief
from ..errors import OutputError

_SLUG_LIMIT = 60  # characters


def slug(text: str) -> str:
    """Lower-case words joined by hyphens, at most 60 characters, cut between words where possible."""
    words = re.findall(r"[a-z0-9]+", text.lower())
    name = "-".join(words)[: _SLUG_LIMIT + 1]
    if len(name) > _SLUG_LIMIT:
        name = name.rpartition("-")[0] or name[:_SLUG_LIMIT]
    return name or "image"


def plan_outputs(output: str | None, stems: Sequence[str], force: bool) -> list[Path]:
    """One PNG path per image, all checked: writable, and not there yet unless `force`. Raises: OutputError.

    `output` is a .png file (for one image), or a folder: one that exists, or a new one in a folder that
    exists. Without it, files go to the current folder. Files in a folder are called after `stems`, with
    -2, -3, ... where two would be the same.
    """
    folder = Path(output or ".")
    try:
        there = folder.is_dir()
        if output is not None and not there and not output.endswith(("/", os.sep)):
            if folder.suffix.lower() == ".png":
                if len(stems) > 1:
                    raise OutputError(f"{output}: found one file name for {len(stems)} images, expected a folder")
                check_output(folder, force)
                return [folder]
            if folder.suffix:
                raise OutputError(f"{output}: found the ending {folder.suffix}, expected a .png file or a folder")
        paths: list[Path] = []
        for stem in stems:
            names = chain([f"{stem}.png"], (f"{stem}-{number}.png" for number in count(2)))
            paths.append(next(folder / name for name in names if folder / name not in paths))
        if there or folder.exists():
            for path in paths:
                check_output(path, force)
        else:
            _check_folder(folder.parent, folder)
    except (OSError, ValueError) as error:  # such as a name that is too long
        raise OutputError(f"{output}: cannot be written ({brief(error)}); give another name") from error
    return paths


def check_output(path: Path, force: bool) -> None:
    """Raise OutputError now if `path` could not be written later."""
    try:
        if path.is_dir():
            raise OutputError(f"{path}: found a folder, expected a file name")
        if path.exists() and not force:
            raise OutputError(f"{path}: found a file, expected none; give another name, or --force to replace it")
    except (OSError, ValueError) as error:
        raise OutputError(f"{path}: cannot be written ({brief(error)}); give another name") from error
    _check_folder(path.parent, path)


def check_png(path: Path, force: bool) -> None:
    """`check_output` for a picture, whose name has to say so."""
    if path.suffix.lower() != ".png":
        raise OutputError(f"{path}: found the ending {path.suffix or 'none'}, expected .png")
    check_output(path, force)


def write_output(path: Path, data: bytes, force: bool) -> None:
    """Write a whole file or nothing; creates the file's folder (but not the folder's folder)."""
    hidden = path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}.partial")
    try:
        new_folder = not path.parent.exists()
        path.parent.mkdir(exist_ok=True)
        try:
            with hidden.open("xb") as file:
                file.write(data)
            if not force and path.exists():
                raise OutputError(f"{path}: a file appeared meanwhile; give another name, or --force to replace it")
            os.replace(hidden, path)
        finally:
            hidden.unlink(missing_ok=True)
            if new_folder and not path.exists():
                path.parent.rmdir()
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({brief(error)}); give another place") from error


def _check_folder(folder: Path, for_whom: Path) -> None:
    """Try to make a file in `folder`: permissions alone do not tell."""
    if not folder.is_dir():
        raise OutputError(f"{for_whom}: found no folder {folder}, expected it to exist; create it first")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OutputError(f"{for_whom}: folder {folder} cannot be written to ({brief(error)})") from error
