"""How tests of errors compare them: by type and key words, all on one line."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from lantern_rt.errors import LanternError

Error = TypeVar("Error", bound=LanternError)


def refused(error: type[LanternError], *words: str) -> Any:
    """Expects an error of this type, of one line that has these words in this order."""
    return pytest.raises(error, match=r"\A.*" + ".*".join(map(re.escape, words)) + r".*\Z")


def error_of(kind: type[Error], call: Callable[..., object], *arguments: Any, **options: Any) -> Error:
    """Return the error of this type that a call raises."""
    with pytest.raises(kind) as caught:
        call(*arguments, **options)
    return caught.value
