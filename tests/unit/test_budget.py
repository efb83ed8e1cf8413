"""Limits on the size of the project. Code is counted in statements, so that longer lines save nothing.

The limits are set once a release. Between releases, the message of a commit that raises a limit says who
uses the added code.
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
MAX_STATEMENTS = {PRODUCT: 17_500, ("recipes",): 1_650, ("tests",): 21_400, ("benchmarks",): 1_760}
ALLOWANCE = 1.02  # a change may exceed the limit on statements by 2 %
DOCUMENTED_NODES = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
MAX_FILE_LINES = 500
MAX_CLASS_LINES = 250  # lines without docstrings, also for functions
MAX_FUNCTION_LINES = 60
MAX_DOCS_WORDS = 22_860
MAX_README_WORDS = 640
MAX_SENTENCE_WORDS = 24  # for README and `docs/first-hour.md`
MAX_OPTIONS = 129


def find_python_files(*folders: str) -> list[Path]:
    """Return the Python files in folders of the project."""
    return [file for folder in folders for file in (ROOT / folder).rglob("*.py")]


def count_lines(file: Path) -> int:
    return file.read_text("utf-8").count("\n")


def count_statements(file: Path) -> int:
    """Count the statements of a file, without docstrings."""
    nodes = [*ast.walk(ast.parse(file.read_text("utf-8")))]
    docstrings = [
        node for node in nodes if isinstance(node, DOCUMENTED_NODES) and ast.get_docstring(node, False) is not None
    ]
    return sum(isinstance(node, ast.stmt) for node in nodes) - len(docstrings)


def list_options(command: Any) -> list[str]:
    """Return the options of a command and of all subcommands."""
    command_options = [
        parameter.opts[0]
        for parameter in command.params
        if parameter.param_type_name == "option" and parameter.name != "help"
    ]
    names = command.list_commands(None) if hasattr(command, "list_commands") else []
    return command_options + [option for name in names for option in list_options(command.get_command(None, name))]


def format_limit_error(limit: str, count: int) -> str:
    """Return the message for a change that exceeds a limit.

    Args:
        limit: name of the constant with the limit.
        count: number that exceeds the limit.
    """
    return (
        f"{count:,} in all: delete as much as you add, or raise {limit} in {__file__} and name the user in the commit"
    )


@pytest.mark.parametrize("folders", MAX_STATEMENTS, ids=", ".join)
def test_each_part_of_the_code_is_within_the_limit_on_statements(folders: tuple[str, ...]) -> None:
    files = find_python_files(*folders)
    assert len(files) > 5
    count = sum(map(count_statements, files))
    assert count <= ALLOWANCE * MAX_STATEMENTS[folders], format_limit_error(
        f"MAX_STATEMENTS of {', '.join(folders)}", count
    )


def test_no_python_file_is_longer_than_the_limit() -> None:
    folders = (*PRODUCT, "tests", "benchmarks", "recipes")
    assert [str(file) for file in find_python_files(*folders) if count_lines(file) > MAX_FILE_LINES] == []


def count_code_lines(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count the lines of a class or function, without docstrings."""
    documented = [
        definition
        for definition in ast.walk(node)
        if isinstance(definition, DOCUMENTED_NODES) and ast.get_docstring(definition, False)
    ]
    count = (node.end_lineno or 0) - node.lineno + 1
    for docstring in (definition.body[0] for definition in documented):
        count -= (docstring.end_lineno or 0) - docstring.lineno + 1
    return count


def test_no_class_or_function_of_the_product_is_longer_than_the_limit() -> None:
    limits = {
        ast.ClassDef: MAX_CLASS_LINES,
        ast.FunctionDef: MAX_FUNCTION_LINES,
        ast.AsyncFunctionDef: MAX_FUNCTION_LINES,
    }
    too_long = []
    for file in find_python_files(*PRODUCT):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, tuple(limits)) and count_code_lines(node) > limits[type(node)]:
                too_long.append(f"{file}: {node.name}")
    assert too_long == []


def test_the_docs_are_within_the_limit_on_words() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    pages = [page for page in pages if page.name != "published.md"]  # generated from the table of models
    assert len(pages) > 5
    count = sum(len(page.read_text("utf-8").split()) for page in pages)
    assert count <= MAX_DOCS_WORDS, format_limit_error("MAX_DOCS_WORDS", count)


def test_the_readme_and_the_first_hour_page_are_short_and_have_short_sentences() -> None:
    pages = {name: (ROOT / name).read_text("utf-8") for name in ("README.md", "docs/first-hour.md")}
    assert len(pages["README.md"].split()) <= MAX_README_WORDS
    for page in pages.values():
        prose = re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
        prose = re.sub(r"^    .*$|^.* \| .*$", "", prose, flags=re.MULTILINE)
        sentences = re.split(r"(?<=[.:!?])\s|\n\n|\n- ", prose)
        assert len(sentences) > 20
        assert [text for text in sentences if len(text.split()) > MAX_SENTENCE_WORDS] == []


def test_the_command_line_is_within_the_limit_on_options() -> None:
    count = len(list_options(get_command(app)))
    assert 20 < count <= MAX_OPTIONS, format_limit_error("MAX_OPTIONS", count)
