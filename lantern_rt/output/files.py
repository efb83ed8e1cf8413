"""Writing files and folders: checks before the work, then all or nothing.

What is written grows under a hidden name beside its goal and is then moved into place, so that no reader ever sees half
of it. A folder of a kind is known by one file in it (`bundle.json`, `engine.json`); no other folder is ever replaced.
"""

from __future__ import annotations

import glob
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import OutputError
from ..inputs import format_error

try:
    import fcntl
except ImportError:  # on Windows, what a killed program left stays
    fcntl = None  # type: ignore[assignment]

_OTHER_NAME = "give another name, or --force to replace it"


def cache_folder() -> Path:
    """Return the folder of this user's compiled kernels; `LANTERN_RT_CACHE` overrules the system's custom.

    Raises: OutputError: the user has no home folder.
    """
    if own := os.environ.get("LANTERN_RT_CACHE"):
        return Path(own)
    home = Path(os.path.expanduser("~"))  # stays `~` for a user without a home folder
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = home / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    if not base.is_absolute():
        remedy = "set LANTERN_RT_CACHE to a folder"
        raise OutputError(field=str(base), found="no home folder to keep compiled kernels in", remedy=remedy)
    return base / "lantern-rt"


def replace_file(path: Path, data: bytes) -> None:
    """Write a file, and the folders that it is in, so that no reader ever sees half of it. Raises: OSError."""
    partial = path.with_name(f".{path.name[:50]}.{os.getpid()}.{threading.get_ident()}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        partial.unlink(missing_ok=True)  # of a killed program, or a link or pipe that is not written to
        with partial.open("xb") as file:
            file.write(data)
        os.replace(partial, path)
    except BaseException:  # also Ctrl-C
        with suppress(OSError):
            partial.unlink()
        raise


def check_output(path: Path, force: bool) -> None:
    """Raise OutputError now if `path` could not be written later."""
    with output_errors(path):
        if path.is_dir():
            raise OutputError(field=str(path), found="a folder", expected="a file name")
        if os.path.lexists(path) and not force:  # a link to nowhere, too
            raise OutputError(field=str(path), found="a file", expected="none", remedy=_OTHER_NAME)
        check_parent(path)


def check_new_folder(output: Path, force: bool, marker: str, kind: str) -> None:
    """Refuse a goal that is there already, or that `force` would replace without being of this kind."""
    if not os.path.lexists(output):
        with output_errors(output), tempfile.TemporaryFile(dir=existing_parent(output)):
            return
    if not force:
        raise OutputError("is there already", field=str(output), remedy=_OTHER_NAME)
    replaceable = output.is_dir() and not output.is_symlink()
    if not replaceable or (any(output.iterdir()) and not (output / marker).is_file()):
        problem = f"is no {kind}, so --force does not replace it"
        raise OutputError(problem, field=str(output), remedy="give another name")


def write_output(path: Path, data: bytes, force: bool) -> None:
    """Write a whole file or nothing; creates the file's folder. Raises: OutputError."""
    with output_errors(path), _with_parents(path):
        if not force and os.path.lexists(path):
            raise OutputError("a file appeared meanwhile", field=str(path), remedy=_OTHER_NAME)
        replace_file(path, data)


@contextmanager
def atomic_folder(output: Path, force: bool, marker: str, kind: str) -> Iterator[Path]:
    """A new folder that becomes `output` when the block ends well, and vanishes otherwise; so do folders around it."""
    output = output.resolve()
    with output_errors(output, (OSError,)), _with_parents(output), _hidden_folder(output) as work:
        folder, old = work / "new", work / "old"
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


def existing_parent(goal: Path) -> Path:
    """The nearest folder around `goal` that is there."""
    return next(folder for folder in goal.resolve().parents if folder.exists())


@contextmanager
def _with_parents(goal: Path) -> Iterator[None]:
    new = [folder for folder in goal.parents if not folder.exists()]  # from the inside out
    goal.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        for folder in () if goal.exists() else new:
            with suppress(OSError):  # something else is in it now
                folder.rmdir()


@contextmanager
def _hidden_folder(goal: Path) -> Iterator[Path]:
    """Beside `goal`, on the same disk; gone when the block ends, and at the next try if the program was killed."""
    name = f".{goal.name[:100]}."
    for left in goal.parent.glob(f"{glob.escape(name)}*.partial"):
        with suppress(OSError), _claimed(left) as ours:
            if ours:
                shutil.rmtree(left, ignore_errors=True)
    with (
        tempfile.TemporaryDirectory(".partial", name, goal.parent, ignore_cleanup_errors=True) as work,
        _claimed(Path(work)),
    ):
        yield Path(work)


@contextmanager
def _claimed(folder: Path) -> Iterator[bool]:
    """Whether this user made `folder` and no program works in it, nor can claim it meanwhile.

    A killed program claims nothing. Raises: OSError: it is no folder, or cannot be opened.
    """
    if fcntl is None:
        yield False
        return
    handle = os.open(folder, os.O_RDONLY | os.O_NONBLOCK | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = os.fstat(handle).st_uid == os.geteuid()
        except OSError:  # another program's, or a disk without locks
            ours = False
        yield ours
    finally:
        os.close(handle)


def check_parent(path: Path) -> None:
    """Try to make a file in the folder of `path`: permissions alone do not tell."""
    if not path.parent.is_dir():
        found = f"no folder {path.parent}"
        raise OutputError(field=str(path), found=found, expected="it to exist", remedy="create it first")
    with tempfile.TemporaryFile(dir=path.parent):
        pass


@contextmanager
def output_errors(path: Path, errors: tuple[type[Exception], ...] = (OSError, ValueError)) -> Iterator[None]:
    """Turn what the system says, such as that a name is too long, into the refusal to write `path`."""
    try:
        yield
    except errors as error:
        problem = f"cannot be written ({format_error(error)})"
        raise OutputError(problem, field=str(path), remedy="give another path") from error
