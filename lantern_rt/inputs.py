"""What users give: checks of single values, what errors of libraries say as parts of one line, and files.

A pipe or a device could be read for ever, and libraries that parse damaged files raise whatever they like. So every
file is opened here, and parsed inside `reading`, which names the file in one line.
"""

from __future__ import annotations

import importlib.util
import numbers
import os
import re
import reprlib
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import ValidationError

from .errors import EngineError, LanternError, RequestError

# Parameters of a pipeline that the command line or HTTP names otherwise: (option, field of a request).
PARAMETER_NAMES = {
    "prompts": ("prompt", "prompt"),
    "class_ids": ("class_id", "class_id"),
    "num_images": ("count", "n"),
    "quality": ("quality", "quality_budget"),
    "together": ("batch", "together"),
}
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_MAX_BITS = 1 << 12  # of a whole number that is shown; Python refuses to make texts of longer ones
_SHORT = reprlib.Repr()  # stops after so many parts, where repr would first make the whole text
vars(_SHORT).update(maxlevel=3, maxdict=80, maxlist=80, maxtuple=80, maxset=80, maxstring=80, maxother=80)


def check_int(name: str, value: Any, default: int, low: int, high: int) -> int:
    """A whole number from `low` to `high`, both included; None gives the default."""
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not low <= int(value) <= high:
        raise RequestError(field=name, found=format_value(value), expected=f"a whole number {low} .. {high}")
    return int(value)


def error_fields(error: ValidationError) -> dict[str, str]:
    """Fields of a `LanternError` about the first value at fault; `field` is its dotted name."""
    first = error.errors(include_url=False, include_context=False)[0]
    field = " ".join(".".join(str(part) for part in first["loc"]).split())[:80]
    if first["type"] == "missing":
        return {"field": field, "found": "nothing", "expected": "a value"}
    if first["type"] in ("extra_forbidden", "none_required"):
        return {"field": field, "problem": "unknown", "expected": "it left out"}
    found = format_value(first["input"])
    if first["type"] == "value_error":
        found = "" if isinstance(first["input"], dict) else found
        return {"field": field, "found": found, "problem": first["msg"].removeprefix("Value error, ")}
    said = first["msg"].removeprefix("Input should be ").removeprefix("a valid ").partition(", unable")[0]
    expected = {"int": "a whole number", "json": "JSON"}.get(first["type"].partition("_")[0], said)
    return {"field": field, "found": found, "expected": expected}


def format_value(value: object) -> str:
    """A value for a message: one line of at most 80 characters, text in quotes, no addresses in memory."""
    value = str(value) if isinstance(value, Path) else value
    if isinstance(value, str):
        text = repr(value[:80])
    elif isinstance(value, dict | list | tuple | set):
        text = _SHORT.repr(value)
    elif isinstance(value, int) and value.bit_length() > _MAX_BITS:
        text = f"a whole number of {value.bit_length():,} bits"
    else:
        text = " ".join(str(value).split())
    text = _ADDRESS.sub("", text)
    return text if len(text) <= 80 else f"{text[:77]}..."


def format_error(error: BaseException, most: int = 160) -> str:
    """What an error says, as one line of at most `most` characters, without addresses of objects."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    text = re.sub(r" <\S+ object>", "", _ADDRESS.sub("", text))
    return " ".join((text or type(error).__name__).split())[:most]


def require_library(name: str, what: str, extra: str) -> None:
    """Raises: EngineError: the library that `what` needs, of lantern-rt's extra `extra`, cannot be imported."""
    if importlib.util.find_spec(name) is None:
        raise EngineError(f"{name} is not installed", field=what, remedy=f"run `pip install 'lantern-rt[{extra}]'`")
    if name == "torch":
        try:
            os.getcwd()
        except OSError as error:  # on which MKL ends the program
            raise EngineError("the current folder was deleted", field=what, remedy="go to another with `cd`") from error


@contextmanager
def reading(path: Path, expected: str, refusal: type[LanternError], cure: str) -> Iterator[None]:
    """Any exception of the block becomes a `refusal` that names the file; those of this package pass as they are.

    So does a panic of a library in Rust, which is no `Exception`.
    """
    try:
        yield
    except LanternError:
        raise
    except ValidationError as error:
        fields = error_fields(error)
        field = f"{path}: field `{fields.pop('field')}`"
        raise refusal(**fields, field=field, remedy=f"expected {expected}; {cure}") from error
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        problem = f"cannot be read ({format_error(error)})" if isinstance(error, OSError) else format_error(error)
        raise refusal(problem, field=str(path), expected=expected, remedy=cure) from error


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
