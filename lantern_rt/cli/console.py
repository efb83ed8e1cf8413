"""What commands print: progress on stderr, facts and JSON on stdout. No command prints by any other way.

Names and texts come from files of strangers: what a terminal would act on is printed as escapes.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

from ..errors import printable
from ..output.tables import text_table

_WIDTH = 200  # of a table that goes to a file
QUIET, EVERY = 2.0, 5.0  # seconds before the first line of progress, and between two

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
    with console.capture() as text:  # it would answer a closed pipe by itself
        console.print(table, highlight=False)
    print(text.get(), end="")


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
def progress(
    lines: bool = True, unit: str = "count", seconds: float | None = None, bars: bool = True
) -> Iterator[Show]:
    """Shows on stderr what is being done, and from two seconds on how far it is and how long it still takes.

    On a terminal these are bars. Elsewhere it is a line every few seconds, also from within a call that takes long. If
    `lines`, each thing is a line when it begins, too. unit: of amounts, `count` or `bytes`. seconds: what all of it
    takes together, where that is known beforehand. Without `bars` a terminal is left to others.
    """
    shown = _Lines(lines, unit, seconds)
    if sys.stderr.isatty():
        with _bars(shown) if bars else nullcontext(_nothing) as show:
            yield show
        return
    shown.start()
    try:
        yield shown.show
    finally:
        shown.ended.set()
        shown.join()


class _Lines(threading.Thread):
    """Where things are, and a thread that says it in lines."""

    def __init__(self, lines: bool, unit: str, seconds: float | None) -> None:
        super().__init__(name="progress", daemon=True)
        self.lines, self.unit, self.seconds = lines, unit, seconds
        self.ended, self.began = threading.Event(), time.monotonic()
        self.first: dict[str, tuple[float, int]] = {}  # when each thing began, and how much of it was done then
        self.last = ("", 0, 0)

    def show(self, what: str, done: int = 0, total: int = 0) -> None:
        """Take in where things are; a line where that is a new thing."""
        if what not in self.first:
            self.first[what] = (time.monotonic(), done)
            if self.lines and (self.unit == "count" or not total):
                say(what)
        self.last = (what, done, total)

    def run(self) -> None:
        """Say it from time to time."""
        wait = QUIET
        while not self.ended.wait(wait):
            wait = EVERY
            if self.last[0]:
                say(self.line(time.monotonic()))

    def line(self, now: float) -> str:
        """Where things are at an instant."""
        what, done, total = self.last
        began, before = self.first[what]
        parts = [
            f"{what}: {self._amount(done)} of {self._amount(total)}"
            if total
            else f"{what}: {_time(now - began)} so far"
        ]
        if self.seconds is not None:
            parts.append(f"about {self.left(now)} left")
        elif done > before:
            parts.append(f"about {_time((now - began) / (done - before) * (total - done))} left")
        return ", ".join(parts)

    def left(self, now: float) -> str:
        """What is left of the seconds."""
        return _time(max(0.0, self.began + (self.seconds or 0.0) - now))

    def _amount(self, count: int) -> str:
        return f"{count / 1e6:,.0f} MB" if self.unit == "bytes" else f"{count:,}"


@contextmanager
def _bars(shown: _Lines) -> Iterator[Show]:
    """Bars on a terminal; what has no amount is there while it lasts."""
    from rich import progress as rich
    from rich.console import Console

    class Left(rich.ProgressColumn):
        def render(self, task: rich.Task) -> Any:
            return f"{shown.left(time.monotonic())} left"

    counts = (
        (rich.DownloadColumn(), rich.TransferSpeedColumn()) if shown.unit == "bytes" else (rich.MofNCompleteColumn(),)
    )
    left = rich.TimeRemainingColumn(compact=True) if shown.seconds is None else Left()
    columns = (rich.TextColumn("{task.description}"), rich.BarColumn(), *counts, rich.TimeElapsedColumn(), left)
    with rich.Progress(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, rich.TaskID] = {}
        passing: list[str] = []  # what has no amount

        def show(what: str, done: int = 0, total: int = 0) -> None:
            shown.show(what, done, total)
            if what not in tasks:
                while passing:
                    bars.remove_task(tasks.pop(passing.pop()))
                tasks[what] = bars.add_task(printable(what), total=total or None)
                passing.extend([] if total else [what])
            bars.update(tasks[what], completed=done, total=total or None)

        try:
            yield show
        finally:
            while passing:
                bars.remove_task(tasks.pop(passing.pop()))


def _nothing(what: str, done: int = 0, total: int = 0) -> None:
    pass


def _time(seconds: float) -> str:
    """About so long, in one unit or two."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"
