"""Checks of single values that a user gives, and what errors of libraries say, as parts of one line."""

from __future__ import annotations

import importlib.util
import numbers
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from .errors import EngineError, RequestError


def whole(name: str, value: Any, default: int, low: int, high: int) -> int:
    """A whole number from `low` to `high`, both included; None gives the default."""
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not low <= int(value) <= high:
        raise RequestError(field=name, found=short(value), expected=f"a whole number {low} .. {high}")
    return int(value)


def explain(error: ValidationError) -> tuple[str, str]:
    """The first field at fault, its name dotted, and what was found and expected of it."""
    first = error.errors(include_url=False, include_context=False)[0]
    field = " ".join(".".join(str(part) for part in first["loc"]).split())[:80]
    if first["type"] == "missing":
        return field, "found nothing, expected a value"
    if first["type"] == "extra_forbidden":
        return field, "unknown, expected it left out"
    expected = "JSON" if first["type"] == "json_invalid" else first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        found = "" if isinstance(first["input"], dict) else f"found {short(first['input'])}, "
        return field, found + expected
    expected = expected.removeprefix("Input should be ").removeprefix("a valid ")
    return field, f"found {short(first['input'])}, expected {expected}"


def short(value: object) -> str:
    """A value for a message: one line of at most 80 characters, text in quotes."""
    value = str(value) if isinstance(value, Path) else value
    text = repr(value) if isinstance(value, str) else " ".join(str(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def brief(error: BaseException, most: int = 160) -> str:
    """What an error says, as one line of at most `most` characters."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join((text or type(error).__name__).split())[:most]


def require_library(name: str, what: str, extra: str) -> None:
    """Raises: EngineError: the library that `what` needs, of lantern-rt's extra `extra`, is not installed."""
    if importlib.util.find_spec(name) is None:
        raise EngineError(f"{name} is not installed", field=what, remedy=f"run `pip install 'lantern-rt[{extra}]'`")
