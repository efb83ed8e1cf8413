"""Writing of output files and folders, completely or not at all, and checks before the work begins.

Data is written under a hidden name beside the output path and then renamed, so that readers never see partial data. A
marker file (`bundle.json`, `engine.json`) identifies the kind of a folder. A folder without the expected marker file is
never replaced.
"""

from __future__ import annotations

import glob
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import OutputError
from ..inputs import format_error

try:
    import fcntl
except ImportError:  # On Windows, files of killed programs are not removed.
    fcntl = None  # type: ignore[assignment]

_OTHER_NAME = "give another name, or --force to replace it"


def find_cache_folder() -> Path:
    """Return the folder for exported bundles and compiled kernels: `LANTERN_RT_CACHE`, or one of the user."""
    if folder := os.environ.get("LANTERN_RT_CACHE"):
        return Path(folder)
    home = Path(os.path.expanduser("~"))  # Stays `~` if the user has no home folder.
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = home / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    if not base.is_absolute():
        raise OutputError(field=str(base), found="no home folder", remedy="set LANTERN_RT_CACHE to a folder")
    return base / "lantern-rt"


def replace_file(path: Path, data: bytes) -> None:
    """Create the parent folders of a file, and write the file atomically; OSError if it cannot be written."""
    partial = path.with_name(f".{path.name[:50]}.{os.getpid()}.{threading.get_ident()}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        partial.unlink(missing_ok=True)  # From a killed program, or a link or pipe, which must not be written to.
        with partial.open("xb") as file:
            file.write(data)
        os.replace(partial, path)
    except BaseException:  # Includes Ctrl-C.
        with suppress(OSError):
            partial.unlink()
        raise


def check_output_path(path: Path, force: bool) -> None:
    """Raise OutputError if a file cannot be written to `path`, or exists there and `force` is False."""
    with convert_output_errors(path):
        if path.is_dir():
            raise OutputError(field=str(path), found="a folder", expected="a file name")
        if os.path.lexists(path) and not force:  # Also finds broken links.
            raise OutputError(field=str(path), found="a file", expected="none", remedy=_OTHER_NAME)
        check_parent_writable(path)


def check_new_folder(output: Path, force: bool, marker_file: str) -> None:
    """Raise OutputError if a folder cannot be created, or replaced: with `force`, if it has the marker file."""
    with convert_output_errors(output):
        if os.path.lexists(output):
            if not force:
                raise OutputError("already exists", field=str(output), remedy=_OTHER_NAME)
            if output.is_mount():
                problem = "is a mount point, which cannot be replaced"
                raise OutputError(problem, field=str(output), remedy=f"give a folder in it, such as {output / 'new'}")
            replaceable = output.is_dir() and not output.is_symlink()
            if not replaceable or (any(output.iterdir()) and not (output / marker_file).is_file()):
                problem = f"has no {marker_file}, so --force does not replace it"
                raise OutputError(problem, field=str(output), remedy="give another name")
        with tempfile.TemporaryFile(dir=find_existing_ancestor(output.absolute().parent)):
            pass


def write_output(path: Path, data: bytes, force: bool) -> None:
    """Create the folder of an output file, and write the file atomically. After an error, nothing has changed."""
    with convert_output_errors(path), _make_parent_folders(path):
        if not force and os.path.lexists(path):
            raise OutputError("was created by another program meanwhile", field=str(path), remedy=_OTHER_NAME)
        replace_file(path, data)


@contextmanager
def write_folder_atomically(output: Path, force: bool, marker_file: str) -> Iterator[Path]:
    """Create a hidden folder for the `with` block, and rename it to `output` at the end of the block.

    If the block raises an error, the hidden folder and new parent folders are removed. With `force`, an existing folder
    is replaced if it has the marker file.
    """
    output = output.resolve()
    with convert_output_errors(output, (OSError,)), _make_parent_folders(output), _create_hidden_folder(output) as work:
        folder = work / "new"
        old = work / "old"
        folder.mkdir()
        yield folder
        check_new_folder(output, force, marker_file)  # Another program may have created it.
        if output.is_dir():
            output.rename(old)
        try:
            folder.rename(output)
        except BaseException:
            if old.exists():
                old.rename(output)
            raise


def find_existing_ancestor(path: Path) -> Path:
    """Return `path` if it exists, even as a broken link; otherwise the innermost existing folder above."""
    path = path.resolve()
    return next(part for part in (path, *path.parents) if os.path.lexists(part))


@contextmanager
def _make_parent_folders(path: Path) -> Iterator[None]:
    """Create the parent folders of `path`, and remove the new ones if `path` does not exist after the block."""
    new = [folder for folder in path.parents if not folder.exists()]  # Innermost first.
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        for folder in () if path.exists() else new:
            with suppress(OSError):  # Another program has written to the folder.
                folder.rmdir()


@contextmanager
def _create_hidden_folder(output_path: Path) -> Iterator[Path]:
    """Create a temporary folder beside `output_path`. Remove temporary folders that killed programs left there."""
    name = f".{output_path.name[:100]}."
    for abandoned in output_path.parent.glob(f"{glob.escape(name)}*.partial"):
        with suppress(OSError, OutputError), lock_folder(abandoned) as locked:
            if locked and abandoned.stat().st_uid == os.geteuid():
                shutil.rmtree(abandoned, ignore_errors=True)
    with (
        tempfile.TemporaryDirectory(".partial", name, output_path.parent, ignore_cleanup_errors=True) as work,
        lock_folder(Path(work)),
    ):
        yield Path(work)


@contextmanager
def lock_folder(folder: Path, report_wait: Callable[[], None] | None = None) -> Iterator[bool]:
    """Lock a folder for the `with` block, and yield whether it is locked: Windows and some network disks have no locks.

    `report_wait` is called before the wait for another holder of the lock; None: do not wait. The lock leaves no file,
    and ends with the program.
    """
    if fcntl is None:
        yield False
        return
    with convert_output_errors(folder, (OSError,)):
        handle = os.open(folder, os.O_RDONLY | os.O_NONBLOCK | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        locked = True
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            locked = report_wait is not None
            if report_wait is not None:
                report_wait()
                fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            locked = False
        yield locked
    finally:
        os.close(handle)


def check_parent_writable(path: Path) -> None:
    """Check that files can be created in the folder of `path`, by creating one: its permissions do not show it."""
    if not path.parent.is_dir():
        actual = f"no folder {path.parent}"
        raise OutputError(field=str(path), found=actual, expected="an existing folder", remedy="create it first")
    with tempfile.TemporaryFile(dir=path.parent):
        pass


@contextmanager
def convert_output_errors(
    path: Path, error_types: tuple[type[Exception], ...] = (OSError, RuntimeError, ValueError)
) -> Iterator[None]:
    """Convert errors in a `with` block, such as a file name that is too long, to an OutputError about `path`."""
    try:
        yield
    except error_types as error:
        problem = f"cannot be written ({format_error(error)})"
        raise OutputError(problem, field=str(path), remedy="give another path") from error
