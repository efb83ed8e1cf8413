"""What pyproject.toml cannot say: a package index has no files beside README, so that its links need a host; and an
editable install is by links instead of an import hook, which type checkers and editors do not follow."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

SOURCE = tomllib.loads(Path("pyproject.toml").read_text("utf-8"))["project"]["urls"]["Source"]


def absolute(link: re.Match[str]) -> str:
    """A relative link of Markdown, to the file in the repository."""
    kind = "raw" if link[1].endswith(".png") else "blob"
    return f"]({SOURCE}/{kind}/HEAD/{link[1]})"


readme = re.sub(r"\]\((?!\w+:)([^)]+)\)", absolute, Path("README.md").read_text("utf-8"))
setup(
    long_description=readme,
    long_description_content_type="text/markdown",
    options={"editable_wheel": {"mode": "strict"}},
)
