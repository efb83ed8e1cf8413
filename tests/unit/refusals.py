"""How tests of errors compare them: by type and key words, all on one line."""

from __future__ import annotations

import re
from typing import Any

import pytest

from lantern_rt.errors import LanternError


def refused(error: type[LanternError], *words: str) -> Any:
    """Expects an error of this type, of one line that has these words in this order."""
    return pytest.raises(error, match=r"\A.*" + ".*".join(map(re.escape, words)) + r".*\Z")
