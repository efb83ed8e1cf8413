"""Names of the files that images go to."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

from ..errors import OutputError
from .files import check_output, check_parent, output_errors

SLUG_LIMIT = 60  # characters


def slug(text: str) -> str:
    """Lower-case words joined by hyphens, at most 60 characters, cut between words where possible."""
    name = "-".join(re.findall(r"[a-z0-9]+", text.lower()))[: SLUG_LIMIT + 1]
    if len(name) > SLUG_LIMIT:
        name = name.rpartition("-")[0] or name[:SLUG_LIMIT]
    return name or "image"


def plan_outputs(
    output: str | None, stems: Sequence[str], force: bool, drawn: Callable[[int, Path], bool] = lambda i, path: False
) -> list[tuple[Path, bool]]:
    """The PNG of each image, checked to be writable, and whether it holds the image already.

    Args:
        output: a .png file (for one image), or a folder: one that exists, or a new one in a folder that exists. None:
            the current folder.
        stems: what files in a folder are called, with -2, -3, ... where another file has that name.
        force: files that are there do not count.
        drawn: whether a file that is there holds image i.

    Raises:
        OutputError: one cannot be written, or `output` is a file that is there and holds another image.
    """
    folder = Path(output or ".")
    with output_errors(folder):
        if output is not None and not folder.is_dir() and not output.endswith(("/", os.sep)):
            if folder.suffix.lower() == ".png":
                return [_one_file(folder, stems, force, drawn)]
            if folder.suffix:
                raise OutputError(field=output, found=f"the ending {folder.suffix}", expected="a .png file or a folder")
        new = not os.path.lexists(folder)
        if new:
            check_parent(folder)
        outputs: list[tuple[Path, bool]] = []
        taken: set[Path] = set()
        for i, stem in enumerate(stems):
            for number in count(1):
                path = folder / f"{stem}{f'-{number}' if number > 1 else ''}.png"
                if path in taken:
                    continue
                there = os.path.lexists(path) and not force
                if not there or drawn(i, path):
                    break
            taken.add(path)
            outputs.append((path, there))
    for path, there in outputs:
        if not new and not there:
            check_output(path, force)
    return outputs


def _one_file(path: Path, stems: Sequence[str], force: bool, drawn: Callable[[int, Path], bool]) -> tuple[Path, bool]:
    if len(stems) > 1:
        raise OutputError(field=str(path), found=f"one file name for {len(stems)} images", expected="a folder")
    if path.is_file() and not force and drawn(0, path):
        return path, True
    check_output(path, force)
    return path, False
