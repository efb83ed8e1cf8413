"""Check errors by type, key words and fields."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from lantern_rt.errors import LanternError

Error = TypeVar("Error", bound=LanternError)


def expects_error(error: type[LanternError], *words: str) -> Any:
    """Expect an error of this type, whose message is one line with these words in this order."""
    return pytest.raises(error, match=r"\A.*" + ".*".join(map(re.escape, words)) + r".*\Z")


def error_of(kind: type[Error], call: Callable[..., object], *arguments: Any, **options: Any) -> Error:
    """Return the error of this type that a call raises."""
    with pytest.raises(kind) as caught:
        call(*arguments, **options)
    return caught.value
