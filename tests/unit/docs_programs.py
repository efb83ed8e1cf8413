"""Python programs of docs/methods.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PAGE = (Path(__file__).parents[2] / "docs/methods.md").read_text("utf-8")


def read_program(word: str) -> str:
    """Return the program that contains a word."""
    programs = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (program,) = (each for each in programs if word in each)
    return str(program)


def run_program(word: str) -> dict[str, Any]:
    """Run the program that contains a word, and return its names."""
    names: dict[str, Any] = {"__name__": "methods"}
    exec(compile(read_program(word), "docs/methods.md", "exec", dont_inherit=True), names)
    return names
