"""Helpers that check the type, the message and the fields of errors."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from lantern_rt.errors import LanternError

Error = TypeVar("Error", bound=LanternError)


def expect_error(error_type: type[LanternError], *words: str) -> Any:
    """Return a context manager that expects an error of one line with these words in this order."""
    return pytest.raises(error_type, match=r"\A.*" + ".*".join(map(re.escape, words)) + r".*\Z")


def catch_error(error_type: type[Error], call: Callable[..., object], *arguments: Any, **options: Any) -> Error:
    with pytest.raises(error_type) as caught:
        call(*arguments, **options)
    return caught.value
