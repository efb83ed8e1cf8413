"""Checks of user input, reading of user files, and conversion of library errors to one line of text.

Reading a pipe or a device might never end, so only regular files are read. Libraries may raise any exception when they
parse a damaged file, so files are parsed inside `convert_read_errors`, whose error names the file.
"""

from __future__ import annotations

import importlib.util
import json
import numbers
import os
import re
import reprlib
import signal
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import StringIO
from pathlib import Path
from traceback import walk_tb
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import unquote, urlsplit

from pydantic import ValidationError

from .errors import EngineError, LanternError, RequestError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # memory address in the `repr` of an object
UNKNOWN_FIELD = "unknown field"
_MAX_ERRORS = 100  # invalid fields of which the first is named; pydantic takes long to list more
# What a value should be: by the limit in pydantic's `ctx`, else by the first word of pydantic's error type.
_EXPECTED_BY_LIMIT = {
    "ge": "at least {}",
    "gt": "more than {}",
    "le": "at most {}",
    "lt": "less than {}",
    "min_length": "at least {} {}",
    "max_length": "at most {} {}",
    "pattern": "text of the pattern {}",
    "expected": "{}",
    "expected_tags": "{}",
}
_EXPECTED_BY_TYPE = {
    "base64": "base64",
    "bool": "true or false",
    "dict": "an object",
    "float": "a number",
    "int": "a whole number",
    "json": "JSON",
    "list": "a list",
    "model": "an object",
    "string": "text",
    "tuple": "a list",
}
_MAX_BITS = 1 << 12  # maximum size of an integer in a message; Python refuses to format much longer integers
_CPU_WHEELS = "https://download.pytorch.org/whl/cpu"  # package index of PyTorch without CUDA
_SHORT_REPR = reprlib.Repr()  # formats only the start of a value; `repr` would format the whole value
vars(_SHORT_REPR).update(maxlevel=3, maxdict=80, maxlist=80, maxtuple=80, maxset=80, maxstring=80, maxother=80)


def is_number(text: str) -> bool:
    """Return whether a text is a whole number from 0 with at most 20 digits. Python refuses to convert long numbers."""
    return re.fullmatch("[0-9]{1,20}", text) is not None


def check_int(name: str, value: Any, default: int, low: int, high: int) -> int:
    """Return an integer parameter as an int, `default` for None, or raise RequestError if it is not `low` .. `high`."""
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not low <= int(value) <= high:
        raise RequestError(field=name, found=format_value(value), expected=f"a whole number {low} .. {high}")
    return int(value)


def convert_numpy_value(value: Any) -> Any:
    """Convert a number or an array of NumPy or PyTorch to Python's numbers and lists; return other values."""
    return value.tolist() if hasattr(value, "tolist") else value


def convert_to_list(value: Any, repeat_count: int = 1) -> list[Any]:
    """Return the items of a list or array; a single value, such as a text, `repeat_count` times."""
    match convert_numpy_value(value):
        case [*items]:
            return items
        case single:
            return [single] * repeat_count


def describe_validation_error(error: ValidationError) -> dict[str, str]:
    """Convert the first error of a pydantic validation to keyword arguments of a `LanternError`.

    The value of `field` is the path of the invalid field, such as `target.hidden_size`.
    """
    if error.error_count() > _MAX_ERRORS:
        return {"field": "", "problem": f"{error.error_count():,} invalid fields"}
    first = error.errors(include_url=False)[0]
    field = " ".join(".".join(str(part) for part in first["loc"]).split())[:80]
    if first["type"] == "missing":
        return {"field": field, "found": "nothing", "expected": "a value"}
    if first["type"] in ("extra_forbidden", "none_required"):
        return {"field": field, "problem": UNKNOWN_FIELD}
    actual = format_value(first["input"])
    if first["type"] == "value_error":
        actual = "" if isinstance(first["input"], dict) else actual
        return {"field": field, "found": actual, "problem": first["msg"].removeprefix("Value error, ")}
    return {"field": field, "found": actual, "expected": _describe_expected_value(first)}


def _describe_expected_value(error: ErrorDetails) -> str:
    """Return our words for what pydantic expected; pydantic's own words describe Python's types."""
    context = error.get("ctx", {})
    unit = "element" if "field_type" in context else "character"
    for name, words in _EXPECTED_BY_LIMIT.items():
        if name in context:
            return words.format(context[name], unit if context[name] == 1 else f"{unit}s")
    message = error["msg"].removeprefix("Input should be ")
    return _EXPECTED_BY_TYPE.get(error["type"].partition("_")[0], message)


def format_value(value: object) -> str:
    """Format a value for an error message, as one line of at most 80 characters. Text gets quotes."""
    match value:
        case str() | Path():
            text = repr(str(value)[:80])
        case dict() | list() | tuple() | set():
            text = _SHORT_REPR.repr(value)
        case int() if value.bit_length() > _MAX_BITS:
            text = f"a whole number of {value.bit_length():,} bits"
        case _:
            text = " ".join(str(value).split())
    text = _ADDRESS.sub("", text)
    return text if len(text) <= 80 else f"{text[:77]}..."


def format_error(error: BaseException, max_length: int = 160) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    text = re.sub(r" <(?:\S+ object|_io\..*)>", "", _ADDRESS.sub("", text))
    return " ".join((text or type(error).__name__).split())[:max_length]


def reraise_error_of_signal_handler(error: BaseException) -> None:
    """Raise an error again if a signal handler raised it, for example to enforce a time limit.

    An `except` block that converts any exception must call this first, or it names a file as the cause.
    """
    handlers = [getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()]
    # A frame of a handler in the traceback shows that the handler raised the error.
    if any(frame.f_code in handlers for frame, _ in walk_tb(error.__traceback__)):
        raise error


def make_install_command(extra: str, reinstall: bool = False) -> str:
    """Return the pip command that installs an extra from where this copy came: a clone, an address or the index.

    With `cpu` as the first of several extras, with commas between, PyTorch is installed without the CUDA libraries.
    """
    from importlib.metadata import PackageNotFoundError, distribution

    origin: dict[str, Any] = {}  # pip records a clone, a file or an address, but nothing for a package from an index
    with suppress(PackageNotFoundError):
        origin = json.loads(distribution("lantern-rt").read_text("direct_url.json") or "{}")
    address = "+".join(filter(None, [origin.get("vcs_info", {}).get("vcs"), origin.get("url")]))
    if origin.get("dir_info", {}).get("editable"):
        package = f"-e '{unquote(urlsplit(address).path)}[{extra}]'"
    else:
        package = f"'lantern-rt[{extra}]" + (f" @ {address}'" if address else "'")
    options = ["--force-reinstall"] * reinstall + [f"--extra-index-url {_CPU_WHEELS}"] * extra.startswith("cpu,")
    return " ".join(["pip install", *options, package])


def require_library(name: str, feature: str, extra: str) -> None:
    """Raise EngineError if a library, which `extra` installs, is missing or cannot be imported."""
    if importlib.util.find_spec(name) is None:
        raise EngineError(f"{name} is not installed", field=feature, remedy=f"run `{make_install_command(extra)}`")
    if name == "torch":
        try:
            os.getcwd()
        except OSError as error:  # MKL, which PyTorch loads, would end the program
            raise EngineError(
                "the current folder was deleted", field=feature, remedy="go to another with `cd`"
            ) from error


@contextmanager
def convert_read_errors(path: Path, expected: str, error_class: type[LanternError], remedy: str) -> Iterator[None]:
    """Convert any exception in a `with` block but ours to an error of `error_class` that names the file `path`."""
    try:
        yield
    except LanternError:
        raise
    except ValidationError as error:
        fields = describe_validation_error(error)
        field = f"{path}: field `{fields.pop('field')}`"
        raise error_class(**fields, field=field, remedy=f"expected {expected}; {remedy}") from error
    except BaseException as error:
        # pyo3's `PanicException` is matched by its name, because the class cannot be imported.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reraise_error_of_signal_handler(error)
        problem = f"cannot be read ({format_error(error)})" if isinstance(error, OSError) else format_error(error)
        raise error_class(problem, field=str(path), expected=expected, remedy=remedy) from error


@contextmanager
def open_regular_file(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading; raise ValueError for a pipe or a device, without waiting for its data."""
    with open(path, "rb", opener=_open_nonblocking) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("a pipe or a device, expected a regular file")
        yield file


def read_regular_file(path: Path, max_bytes: int) -> bytes:
    """Read all bytes of a regular file; raise OSError, or ValueError if it is too large, a pipe or a device."""
    with open_regular_file(path) as file:
        data = file.read(max_bytes + 1)  # one more byte shows that the file is too large
    if len(data) > max_bytes:
        raise ValueError(f"a file of more than {max_bytes:,} bytes")
    return data


def split_lines(text: str) -> list[str]:
    """Split a text into lines at LF, CR LF and CR, and remove a byte order mark.

    `str.splitlines` would also split at other characters, such as U+2028, which may occur in a prompt.
    """
    return [line.removesuffix("\n") for line in StringIO(text.removeprefix("\ufeff"), newline=None)]


def _open_nonblocking(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
