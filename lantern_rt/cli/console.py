"""Output of commands: progress and notes on stderr, results and JSON on stdout. Commands print only with this module.

Names and texts may come from untrusted files, so control characters are printed as escapes.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from ..errors import OutputError, escape_unprintable
from ..output.progress import ProgressCallback, show_progress_bars
from ..output.tables import format_text_table

FIRST_LINE_SECONDS = 2.0  # seconds before the first line of progress
LINE_SECONDS = 5.0  # seconds between two lines of progress

Facts = dict[str, dict[str, str]]  # section -> name -> value


def print_stderr(line: str) -> None:
    """Print one line to stderr. If stderr cannot be written, nothing happens."""
    with suppress(OSError):
        print(escape_unprintable(" ".join(line.splitlines())), file=sys.stderr, flush=True)


def print_text(*parts: object) -> None:
    """Print values to stdout, each on a new line; BrokenPipeError if its reader is gone."""
    try:
        print(*(escape_unprintable(str(part)) for part in parts), sep="\n", flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        problem = f"cannot be written ({error.strerror})"
        raise OutputError(problem, field="standard output", remedy="redirect it elsewhere") from error


def print_json(value: Any) -> None:
    print_text(json.dumps(value, allow_nan=False))


def print_sections(sections: Facts) -> None:
    for section, values in sections.items():
        if values:
            print_text(section, format_text_table(list(values.items())))


def print_table(columns: Mapping[str, str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Print rows of values, None as `-`, by the format string of each column, such as `{speed_up:.2f}`."""
    cells = [[_format_cell(template, row) for template in columns.values()] for row in rows]
    print_text(format_text_table([list(columns), *cells]))


def _format_cell(template: str, row: Mapping[str, Any]) -> str:
    try:
        return template.format_map(row)
    except TypeError:  # None does not take a format
        return "-"


class _WarningPrinter(logging.Handler):
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
    """Print each warning of lantern-rt once to stderr while the `with` block runs."""
    logger = logging.getLogger(__package__.partition(".")[0])
    handler = _WarningPrinter()
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@contextmanager
def show_progress(announce_tasks: bool = True) -> Iterator[ProgressCallback]:
    """Show progress on stderr: bars in a terminal, else a line every five seconds, perhaps one as a task begins."""
    if sys.stderr.isatty():
        with show_progress_bars() as progress:
            yield progress
    else:
        yield _ProgressPrinter(announce_tasks)


class _ProgressPrinter:
    def __init__(self, announce_tasks: bool) -> None:
        self._announce_tasks = announce_tasks
        self._next = time.monotonic() + FIRST_LINE_SECONDS
        # By task, a time and the steps done then: at the first call, and at the last call with new steps.
        self._starts: dict[str, tuple[float, int]] = {}
        self._latest: dict[str, tuple[float, int]] = {}

    def __call__(self, task: str, done: int = 0, total: int = 0) -> None:
        now = time.monotonic()
        if task not in self._starts:
            self._starts[task] = (now, done)
            self._latest[task] = (now, done)
            if self._announce_tasks:
                print_stderr(task.removesuffix(" (MB)"))
        if done > self._latest[task][1]:
            self._latest[task] = (now, done)
        if not total or now < self._next:
            return
        self._next = now + LINE_SECONDS
        began, first = self._starts[task]
        line = f"{task} [{done:,}/{total:,}]"
        latest, _ = self._latest[task]
        if done > first:
            remaining = (latest - began) / (done - first) * (total - done) - (now - latest)
            line += f", about {_format_duration(max(0.0, remaining))} left"
        print_stderr(line)


def format_bytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _format_duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if minutes else f"{rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
