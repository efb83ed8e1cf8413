"""Folders that appear whole or not at all: written beside their goal, then renamed.

A folder of a kind is known by one file in it (`bundle.json`, `engine.json`); nothing else is ever replaced.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..checks import brief
from ..errors import OutputError


def check_new_folder(output: Path, force: bool, marker: str, kind: str) -> None:
    """Refuse a goal that is there already, or that `force` would replace without being of this kind."""
    if not os.path.lexists(output):
        if not output.resolve().parent.is_dir():
            raise OutputError(f"{output}: the folder {output.resolve().parent} does not exist")
        return
    if not force:
        raise OutputError(f"{output}: is there already; choose another name, or --force to replace it")
    replaceable = output.is_dir() and not output.is_symlink()
    if not replaceable or (any(output.iterdir()) and not (output / marker).is_file()):
        raise OutputError(f"{output}: is no {kind}, so --force does not replace it; choose another name")


@contextmanager
def folder_or_nothing(output: Path, force: bool, marker: str, kind: str) -> Iterator[Path]:
    """A new folder that becomes `output` when the block ends well, and vanishes otherwise."""
    output = output.resolve()
    try:
        work = Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=".partial", dir=output.parent))
    except OSError as error:
        raise OutputError(f"{output}: cannot be written ({brief(error)})") from error
    folder, old = work / "new", work / "old"
    try:
        folder.mkdir()
        yield folder
        check_new_folder(output, force, marker, kind)  # it may have appeared meanwhile
        if output.is_dir():
            output.rename(old)
        try:
            folder.rename(output)
        except BaseException:
            if old.exists():
                old.rename(output)
            raise
    except OSError as error:
        raise OutputError(f"{output}: cannot be written ({brief(error)})") from error
    finally:
        with suppress(OSError):
            shutil.rmtree(work)
