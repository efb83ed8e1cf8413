"""Settings that pyproject.toml cannot express.

On a package index the links of README need a host. An editable install uses links instead of an import hook, because
type checkers and editors do not follow import hooks.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

SOURCE = tomllib.loads(Path("pyproject.toml").read_text("utf-8"))["project"]["urls"]["Source"]


def make_absolute_link(link: re.Match[str]) -> str:
    """Turn a relative Markdown link into a link to the file in the repository."""
    kind = "raw" if link[1].endswith(".png") else "blob"
    return f"]({SOURCE}/{kind}/HEAD/{link[1]})"


readme = re.sub(r"\]\((?!\w+:)([^)]+)\)", make_absolute_link, Path("README.md").read_text("utf-8"))
setup(
    long_description=readme,
    long_description_content_type="text/markdown",
    options={"editable_wheel": {"mode": "strict"}},
)
