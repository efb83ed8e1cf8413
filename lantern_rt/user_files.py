"""Files that users give, read behind one boundary: plain files only, within limits, and whatever goes wrong is refused.

A pipe or a device could be read for ever, and libraries that parse damaged files raise whatever they like. So every
file is opened here, and parsed inside `reading`, which names the file in one line.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from pydantic import ValidationError

from .checks import brief, explain
from .errors import LanternError


@contextmanager
def reading(path: Path, expected: str, refusal: type[LanternError], cure: str) -> Iterator[None]:
    """Any exception of the block becomes a `refusal` that names the file; those of this package pass as they are.

    So does a panic of a library in Rust, which is no `Exception`.
    """
    try:
        yield
    except LanternError:
        raise
    except OSError as error:
        raise refusal(f"{path}: cannot be read ({brief(error)}), expected {expected}; {cure}") from error
    except ValidationError as error:
        raise refusal(f"{path}: expected {expected}; {'`{}`: {}'.format(*explain(error))}; {cure}") from error
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise refusal(f"{path}: expected {expected}, found {brief(error)}; {cure}") from error


@contextmanager
def open_plain_file(path: Path) -> Iterator[BinaryIO]:
    """A file to read. Raises: OSError, and ValueError on a pipe or a device, for which it does not wait."""
    with open(path, "rb", opener=_without_waiting) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("a pipe or a device where a plain file belongs")
        yield file


def read_plain_file(path: Path, limit: int) -> bytes:
    """All bytes of a file. Raises: OSError, and ValueError on a pipe, a device, or more than `limit` bytes."""
    with open_plain_file(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"more than {limit:,} bytes")
    return data


def _without_waiting(name: str, flags: int) -> int:
    return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))
