"""Text files of prompts, one a line."""

from __future__ import annotations

from pathlib import Path

from ..checks import brief
from ..errors import RequestError


def read_prompts(path: Path) -> list[str]:
    """The lines of a file that are not empty; RequestError if it cannot be read, or has none."""
    try:
        lines = [line.strip() for line in path.read_text("utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"prompts {path}: cannot be read ({brief(error)})") from error
    if not any(lines):
        raise RequestError(f"prompts {path}: found no prompt, expected one a line")
    return [line for line in lines if line]
