"""The documentation names only links, files, extras, commands and options that exist, and its methods run."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from toy_engine import collect_codes, decode, make_model, make_prompt

from lantern_rt.cli.app import app
from lantern_rt.completion import parse_method, parse_method_config
from lantern_rt.methods import Autoregressive, Sampling

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md")]
PAGES += [page for name in ("docs", "recipes", "benchmarks") for page in (ROOT / name).rglob("*.md")]
METHODS_PAGE = (ROOT / "docs/methods.md").read_text("utf-8")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]


def list_anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub names them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_in_the_docs_has_a_target(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        file, _, anchor = link.partition("#")
        if "://" not in link:
            target = (page.parent / file).resolve() if file else page
            assert target.is_file(), link
            assert not anchor or anchor in list_anchors(target), link


def test_files_that_the_docs_name_exist() -> None:
    folders = "lantern_rt|runtime|engines|export|train|tests|benchmarks|recipes|examples|deploy"
    pattern = rf"\b(?:{folders})/[a-z0-9_/]+\.[a-z]+\b"
    named = {name for page in PAGES for name in re.findall(pattern, page.read_text("utf-8"))}
    assert len(named) > 20
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


def test_pages_of_the_docs_that_the_code_names_exist() -> None:
    folders = ("lantern_rt", "runtime", "engines", "export", "train", "tests", "benchmarks", "recipes", "deploy")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*") if file.suffix in (".py", ".yaml")]
    named = {name for file in files for name in re.findall(r"docs/[\w/-]+\.md", file.read_text("utf-8"))}
    assert len(named) > 5
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_install_commands_name_existing_extras() -> None:
    lines = [(page.name, line) for page in PAGES for line in page.read_text("utf-8").splitlines()]
    lines = [(name, line) for name, line in lines if "pip install" in line and re.search(r"lantern.rt|-e ", line)]
    assert len(lines) > 5
    for name, line in lines:
        for extras in re.findall(r"\[([a-z,-]+)\]", line.partition("pip install")[2]):
            assert set(extras.split(",")) <= EXTRAS.keys(), (name, line)
    folders = ("lantern_rt", "runtime", "engines", "export", "train", "examples", "deploy", "benchmarks")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    code = [(path.name, path.read_text("utf-8")) for path in files if path.suffix in (".py", ".ipynb", ".js", ".html")]
    assert len(code) > 200
    assert [name for name, line in [*lines, *code] if re.search(r"pip install[^&\n]*\Wlantern-rt\[", line)] == []


def list_commands(page: Path) -> Iterator[list[str]]:
    """Yield the arguments of each lantern-rt command that is on a separate line of a page."""
    text = page.read_text("utf-8").replace("\\\n", " ")
    for block in re.findall(r"(?:^    .*\n)+|^```sh\n[^`]*```$", text, re.MULTILINE):
        for arguments in re.findall(r"(?:^ *|&& )lantern-rt (.*?)(?: +#.*)?$", block, re.MULTILINE):
            if "..." not in arguments:
                yield shlex.split(arguments)


def test_the_readme_installs_the_extras_that_its_commands_need() -> None:
    sources = "".join(file.read_text("utf-8") for file in (ROOT / "lantern_rt/cli").glob("*.py"))
    needed = dict(re.findall(r'require_library\(\w+, "([a-z-]+).*?", "([a-z,]+)"\)', sources))
    assert {"serve", "export"} <= needed.keys()
    installed: set[str] = set()
    for line in (ROOT / "README.md").read_text("utf-8").splitlines():
        if "pip install" in line and "pytest" not in line:  # the line with pytest installs test dependencies
            installed |= {extra for extras in re.findall(r"\[([a-z,-]+)\]", line) for extra in extras.split(",")}
        command = re.match(r" +lantern-rt ([a-z-]+)", line)
        if command and command[1] in needed:
            assert set(needed[command[1]].split(",")) <= installed, line


def find_usage_error(arguments: list[str]) -> str:
    """Parse arguments without running the command; return the error message, or an empty text for valid arguments."""
    command: Any = typer.main.get_command(app)
    context = command.make_context("lantern-rt", list(arguments))
    try:
        while hasattr(command, "get_command"):
            name, *arguments = arguments
            command = command.get_command(context, name)
            context = command.make_context(name, list(arguments), parent=context)
        methods = context.params.get("method") or []
        for method in [methods] if isinstance(methods, str) else methods:
            parse_method(method)
    except Exception as error:  # typer includes a copy of click with separate exception classes
        return f"{name} {' '.join(arguments)}: {getattr(error, 'message', error)}"
    return ""


@pytest.mark.parametrize("page", [page for page in PAGES if any(list_commands(page))], ids=lambda page: page.name)
def test_every_command_in_the_docs_has_valid_options(page: Path) -> None:
    assert list(filter(None, map(find_usage_error, list_commands(page)))) == []


def read_methods_program(number: int) -> dict[str, Any]:
    """Run a Python block of docs/methods.md and return its names."""
    names: dict[str, Any] = {"__name__": "methods"}
    source = re.findall(r"^```python\n(.*?)^```$", METHODS_PAGE, re.MULTILINE | re.DOTALL)[number]
    exec(compile(source, "docs/methods.md", "exec", dont_inherit=True), names)
    return names


def test_the_loop_of_the_docs_generates_the_tokens_of_plain_sampling(capsys: pytest.CaptureFixture[str]) -> None:
    names = read_methods_program(0)
    tokens, passes = names["plain"]
    expected = [0]
    while len(expected) < names["LENGTH"]:
        expected.append(names["sample"](names["TARGET"][expected[-1]], len(expected)))
    assert tokens == expected
    assert len({*tokens}) > 8
    assert all(names["generate"](window)[0] == expected for window in (1, 2, 9, names["LENGTH"]))
    names["draft"] = lambda tokens, count: [tokens[-1]] * count  # a drafter that knows nothing
    assert names["generate"](4)[0] == expected
    assert capsys.readouterr().out == f"{passes} and {names['drafted'][1]} passes\n"
    assert f": {passes} and {names['drafted'][1]}\n" in METHODS_PAGE


@pytest.mark.usefixtures("own_registrations")
def test_the_method_of_the_docs_gives_ars_tokens_in_fewer_passes() -> None:
    row_above = read_methods_program(1)["RowAbove"]()
    assert parse_method_config("row-above") == row_above
    model = make_model(3, 36, max_logit=3, columns=6)
    request = ([make_prompt(1), make_prompt(2)], [1, 2], Sampling())
    plain, drafted = ([*decode(model, *request, method)] for method in (Autoregressive(), row_above))
    assert collect_codes(drafted, 2) == collect_codes(plain, 2)
    assert len(drafted) < len(plain) == 36
