"""Limits of the size of the project: statements rather than lines, so that longer lines gain nothing.

The limits are set once a release. Between releases, a commit that raises a limit names the user of the addition.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from lantern_rt.cli.app import app

ROOT = Path(__file__).parents[2]
PRODUCT = ("runtime", "engines", "export", "lantern_rt", "train")
STATEMENTS = {PRODUCT: 17_500, ("recipes",): 1_650, ("tests",): 21_400, ("benchmarks",): 1_745}
ROOM = 1.02
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
LONGEST_FILE = 500
LONGEST_CLASS = 250  # lines without docstrings, as of a function
LONGEST_FUNCTION = 60
WORDS = 22_860
README_WORDS = 600
SENTENCE_WORDS = 24  # of README and the first hour
OPTIONS = 129


def python_files(*folders: str) -> list[Path]:
    """Return the Python files in folders of the project."""
    return [file for folder in folders for file in (ROOT / folder).rglob("*.py")]


def line_count(file: Path) -> int:
    return file.read_text("utf-8").count("\n")


def statement_count(file: Path) -> int:
    """Count the statements of a file, without docstrings."""
    nodes = [*ast.walk(ast.parse(file.read_text("utf-8")))]
    docstrings = [node for node in nodes if isinstance(node, DOCUMENTED) and ast.get_docstring(node, False) is not None]
    return sum(isinstance(node, ast.stmt) for node in nodes) - len(docstrings)


def options(command: Any) -> list[str]:
    """Return the options of a command and its subcommands."""
    own_options = [
        parameter.opts[0]
        for parameter in command.params
        if parameter.param_type_name == "option" and parameter.name != "help"
    ]
    names = command.list_commands(None) if hasattr(command, "list_commands") else []
    return own_options + [option for name in names for option in options(command.get_command(None, name))]


def how_to_raise(limit: str, count: int) -> str:
    """Return the advice for a change that exceeds a limit."""
    return f"{count:,} in all: delete as much as you add, or raise {limit} in {__file__}; the commit says who uses it"


@pytest.mark.parametrize("folders", STATEMENTS, ids=", ".join)
def test_the_code_keeps_within_its_statements(folders: tuple[str, ...]) -> None:
    files = python_files(*folders)
    assert len(files) > 5
    count = sum(map(statement_count, files))
    assert count <= ROOM * STATEMENTS[folders], how_to_raise(f"STATEMENTS of {', '.join(folders)}", count)


def test_no_file_is_too_long() -> None:
    folders = (*PRODUCT, "tests", "benchmarks", "recipes")
    assert [str(file) for file in python_files(*folders) if line_count(file) > LONGEST_FILE] == []


def code_lines(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count the lines of a class or function, without docstrings."""
    documented = [part for part in ast.walk(node) if isinstance(part, DOCUMENTED) and ast.get_docstring(part, False)]
    count = (node.end_lineno or 0) - node.lineno + 1
    for docstring in (part.body[0] for part in documented):
        count -= (docstring.end_lineno or 0) - docstring.lineno + 1
    return count


def test_no_class_or_function_of_the_product_is_too_long() -> None:
    limits = {ast.ClassDef: LONGEST_CLASS, ast.FunctionDef: LONGEST_FUNCTION, ast.AsyncFunctionDef: LONGEST_FUNCTION}
    too_long = []
    for file in python_files(*PRODUCT):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, tuple(limits)) and code_lines(node) > limits[type(node)]:
                too_long.append(f"{file}: {node.name}")
    assert too_long == []


def test_the_docs_keep_within_their_words() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    pages = [page for page in pages if page.name != "published.md"]  # generated from the table of models
    assert len(pages) > 5
    count = sum(len(page.read_text("utf-8").split()) for page in pages)
    assert count <= WORDS, how_to_raise("WORDS", count)


def test_readme_and_the_first_hour_are_short_and_have_short_sentences() -> None:
    pages = {name: (ROOT / name).read_text("utf-8") for name in ("README.md", "docs/first-hour.md")}
    assert len(pages["README.md"].split()) <= README_WORDS
    for page in pages.values():
        prose = re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
        prose = re.sub(r"^    .*$|^.* \| .*$", "", prose, flags=re.MULTILINE)
        sentences = re.split(r"(?<=[.:!?])\s|\n\n|\n- ", prose)
        assert len(sentences) > 20
        assert [text for text in sentences if len(text.split()) > SENTENCE_WORDS] == []


def test_the_command_line_keeps_within_its_options() -> None:
    count = len(options(get_command(app)))
    assert 20 < count <= OPTIONS, how_to_raise("OPTIONS", count)
