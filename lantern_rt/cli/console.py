"""What commands print: progress on stderr, facts and JSON on stdout. No command prints by any other way.

Names and texts come from files of strangers: what a terminal would act on is printed as escapes.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from ..errors import OutputError, printable
from ..output.tables import text_table

FIRST_LINE_SECONDS = 2.0  # seconds before the first line of progress
LINE_SECONDS = 5.0  # seconds between two lines of progress

Facts = dict[str, dict[str, str]]  # section -> name -> value


class ProgressCallback(Protocol):
    """Takes what is being done, and how much of it is done."""

    def __call__(self, what: str, done: int = 0, total: int = 0) -> None: ...


def print_stderr(line: str) -> None:
    """Print one line to stderr, if that can be written."""
    with suppress(OSError):
        print(printable(" ".join(line.splitlines())), file=sys.stderr, flush=True)


def print_text(*parts: object) -> None:
    """Print facts to stdout, each on lines of its own.

    Raises: OutputError: they cannot be written. BrokenPipeError: nobody reads them.
    """
    try:
        print(*(printable(str(part)) for part in parts), sep="\n", flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        problem = f"cannot be written ({error.strerror})"
        raise OutputError(problem, field="standard output", remedy="send it elsewhere") from error


def print_json(value: Any) -> None:
    """Print one JSON object; NaN and infinity are bugs."""
    print_text(json.dumps(value, allow_nan=False))


def print_facts(facts: Facts) -> None:
    """Print sections, each with its values in a column."""
    for section, values in facts.items():
        if not values:
            continue
        print_text(section, text_table(list(values.items())))


def print_table(columns: Mapping[str, str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Print rows under headings.

    Args:
        columns: by heading, how a cell is made of a row, such as `{speed_up:.2f}`; `-` where that is None.
        rows: a mapping for each row.
    """
    cells = [[_cell(template, row) for template in columns.values()] for row in rows]
    print_text(text_table([list(columns), *cells]))


def _cell(template: str, row: Mapping[str, Any]) -> str:
    try:
        return template.format_map(row)
    except TypeError:  # None has no format
        return "-"


class _Warnings(logging.Handler):
    """Prints every warning once."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._texts: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text not in self._texts:
            print_stderr(f"warning: {text}")
        self._texts.add(text)


@contextmanager
def print_warnings() -> Iterator[None]:
    """Print the library's warnings to stderr while the block runs."""
    logger = logging.getLogger(__package__.partition(".")[0])
    handler = _Warnings()
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@contextmanager
def show_progress(lines: bool = True) -> Iterator[ProgressCallback]:
    """Show on stderr what is being done, `[done/total]`, and how long it still takes.

    On a terminal these are bars; elsewhere a line every five seconds, from the second second on.

    Args:
        lines: elsewhere, print a line when a thing begins, too.
    """
    if sys.stderr.isatty():
        with _progress_bars() as progress:
            yield progress
    else:
        yield _ProgressLines(lines)


class _ProgressLines:
    """Progress as lines."""

    def __init__(self, lines: bool) -> None:
        self._lines = lines
        self._next = time.monotonic() + FIRST_LINE_SECONDS
        self._starts: dict[str, tuple[float, int]] = {}  # when each thing began, and how much of it was done then
        self._latest: dict[str, tuple[float, int]] = {}  # the same of what was done last

    def __call__(self, what: str, done: int = 0, total: int = 0) -> None:
        now = time.monotonic()
        if what not in self._starts:
            self._starts[what] = (now, done)
            self._latest[what] = (now, done)
            if self._lines:
                print_stderr(what)
        if done > self._latest[what][1]:
            self._latest[what] = (now, done)
        if not total or now < self._next:
            return
        self._next = now + LINE_SECONDS
        began, first = self._starts[what]
        line = f"{what} [{done:,}/{total:,}]"
        latest, _ = self._latest[what]
        if done > first:
            left = (latest - began) / (done - first) * (total - done) - (now - latest)
            line += f", about {_format_duration(max(0.0, left))} left"
        print_stderr(line)


@contextmanager
def _progress_bars() -> Iterator[ProgressCallback]:
    from rich import progress as rich
    from rich.console import Console

    words = (rich.TextColumn("{task.description}", markup=False), rich.BarColumn())
    numbers = (rich.TextColumn("{task.fields[amount]}", markup=False), rich.TimeRemainingColumn(compact=True))
    with rich.Progress(*words, *numbers, console=Console(stderr=True)) as bars:
        tasks: dict[str, rich.TaskID] = {}

        def progress(what: str, done: int = 0, total: int = 0) -> None:
            if what not in tasks:
                for task in bars.tasks:
                    bars.update(task.id, visible=bool(task.fields["amount"]))
                tasks[what] = bars.add_task(printable(what), amount="")
            amount = f"[{done:,}/{total:,}]" if total else ""
            bars.update(tasks[what], completed=done, total=total or None, amount=amount)

        yield progress


def _format_duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"
