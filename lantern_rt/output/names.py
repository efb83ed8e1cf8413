"""Names of the output files of images."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

from ..errors import OutputError
from .files import check_output_path, check_parent_writable, convert_output_errors
from .formats import PNG, OutputFormat, find_format

SLUG_LIMIT = 60  # Maximum number of characters.


def make_slug(text: str) -> str:
    """Return a part of a file name: the words of a text in lower case, with hyphens, at most 60 characters."""
    name = "-".join(re.findall(r"[a-z0-9]+", text.lower()))[: SLUG_LIMIT + 1]
    if len(name) > SLUG_LIMIT:
        name = name.rpartition("-")[0] or name[:SLUG_LIMIT]
    return name or "image"


def choose_output_paths(
    output: str | None,
    file_stems: Sequence[str],
    force: bool,
    holds_image: Callable[[int, Path], bool] = lambda i, path: False,
    formats: Sequence[OutputFormat] = (PNG,),
) -> list[tuple[Path, bool]]:
    """Choose the file of each image, and check that it can be written; return its path, and whether it holds the image.

    A file in a folder is named after its stem, with -2, -3, ... if another file has the name, and has the first of
    `formats`. `output` is a folder, by default the current one, which may be new inside an existing one; for a single
    image, it may be a file with the ending of any format.
    """
    folder = Path(output or ".")
    with convert_output_errors(folder):
        if output is not None and not folder.is_dir() and folder.suffix and not output.endswith(("/", os.sep)):
            find_format(folder, formats)
            return [_choose_single_path(folder, file_stems, force, holds_image)]
        new = not os.path.lexists(folder)
        if new:
            check_parent_writable(folder)
        outputs: list[tuple[Path, bool]] = []
        used: set[Path] = set()
        for i, stem in enumerate(file_stems):
            for number in count(1):
                path = folder / f"{stem}{f'-{number}' if number > 1 else ''}{formats[0].suffixes[0]}"
                if path in used:
                    continue
                exists = os.path.lexists(path) and not force
                if not exists or holds_image(i, path):
                    break
            used.add(path)
            outputs.append((path, exists))
    for path, exists in outputs:
        if not new and not exists:
            check_output_path(path, force)
    return outputs


def _choose_single_path(
    path: Path, file_stems: Sequence[str], force: bool, holds_image: Callable[[int, Path], bool]
) -> tuple[Path, bool]:
    if len(file_stems) > 1:
        raise OutputError(field=str(path), found=f"one file name for {len(file_stems)} images", expected="a folder")
    if path.is_file() and not force and holds_image(0, path):
        return path, True
    check_output_path(path, force)
    return path, False
