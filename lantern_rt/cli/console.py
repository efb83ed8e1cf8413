"""What commands print: progress on stderr, facts and JSON on stdout. No command prints by any other way.

Names and texts come from files of strangers: what a terminal would act on is printed as escapes.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from ..errors import printable
from ..output.tables import text_table

_WIDTH = 200  # of a table that goes to a file

Facts = dict[str, dict[str, str]]  # section -> name -> value


class Show(Protocol):
    """Takes what is being done, and how much of it is done."""

    def __call__(self, what: str, done: int = 0, total: int = 0) -> None: ...


def say(line: str) -> None:
    """A line of progress."""
    print(printable(" ".join(line.splitlines())), file=sys.stderr, flush=True)


def print_text(*parts: object) -> None:
    """Facts, each on lines of its own."""
    print(*(printable(str(part)) for part in parts), sep="\n")


def print_json(value: Any) -> None:
    """One JSON object and nothing else; NaN and infinity are bugs."""
    print_text(json.dumps(value, allow_nan=False))


def print_facts(facts: Facts) -> None:
    """Sections, each with its values in a column."""
    for section, values in facts.items():
        print_text(section, text_table(list(values.items())))


def print_table(columns: Mapping[str, str], rows: Iterable[Mapping[str, Any]], title: str | None = None) -> None:
    """Rows under headings, folded to the width of the terminal, if there is one.

    columns: by heading, how a cell is made of a row, such as `{speed_up:.2f}`; `-` where that is None. Words are set to
    the left, numbers to the right.
    """
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False) if sys.stdout.isatty() else Console(markup=False, width=_WIDTH)
    title = None if title is None else printable(title)
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for heading, template in columns.items():
        table.add_column(heading, justify="right" if ":" in template else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(template, row) for template in columns.values()))
    console.print(table, highlight=False)


def _cell(template: str, row: Mapping[str, Any]) -> str:
    try:
        return printable(template.format_map(row))
    except TypeError:  # None has no format
        return "-"


class _Said(logging.Handler):
    """Says every warning once."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text not in self._said:
            say(f"warning: {text}")
        self._said.add(text)


@contextmanager
def warnings_said() -> Iterator[None]:
    """Warnings of the library are lines on stderr while the block runs."""
    logger, handler = logging.getLogger(__package__.partition(".")[0]), _Said()
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@contextmanager
def progress(lines: bool = True, unit: str = "count") -> Iterator[Show]:
    """Shows on stderr what is being done, each thing once: a bar where an amount is known, else a line.

    Where stderr is no terminal there are only lines, or nothing if not `lines`. unit: of amounts, `count` or `bytes`.
    """
    seen: set[str] = set()

    def line(what: str, done: int = 0, total: int = 0) -> None:
        if lines and what not in seen and (unit == "count" or not total):
            say(what)
        seen.add(what)

    if not sys.stderr.isatty():
        yield line
        return
    from rich import progress as rich
    from rich.console import Console

    counts = (rich.DownloadColumn(), rich.TransferSpeedColumn()) if unit == "bytes" else (rich.MofNCompleteColumn(),)
    columns = (rich.TextColumn("{task.description}"), rich.BarColumn(), *counts, rich.TimeElapsedColumn())
    with rich.Progress(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, rich.TaskID] = {}

        def show(what: str, done: int = 0, total: int = 0) -> None:
            if not total:
                line(what)
                return
            if what not in tasks:
                tasks[what] = bars.add_task(printable(what), total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield show
