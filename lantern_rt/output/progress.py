"""Progress bars in terminals and notebooks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any, Protocol, TextIO, cast

from ..errors import escape_unprintable


class ProgressCallback(Protocol):
    """Progress callback. Its arguments are a task's name, finished steps, and total steps; a total of 0 is unknown."""

    def __call__(self, task: str, done: int = 0, total: int = 0) -> None: ...


class _OptionalOutput:
    """Text stream that drops what cannot be written, as no image may be lost with its progress bar."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> None:
        with suppress(AttributeError, OSError, ValueError):  # no stream, a full one, a closed one
            self._stream.write(text)

    def flush(self) -> None:
        with suppress(AttributeError, OSError, ValueError):
            self._stream.flush()


@contextmanager
def show_progress_bars() -> Iterator[ProgressCallback]:
    """Show a progress bar for each task, on stderr or below a notebook's cell.

    If stderr is not a terminal, only the last state of the bars is written. If stderr is closed or full, nothing is.
    """
    from rich import progress as rich
    from rich.console import Console

    words = (rich.TextColumn("{task.description}", markup=False), rich.BarColumn())
    numbers = (rich.TextColumn("{task.fields[amount]}", markup=False), rich.TimeRemainingColumn(compact=True))
    # In a notebook, rich needs ipywidgets; without them it would warn in the cell.
    in_notebook = None if find_spec("ipywidgets") else False
    console = Console(file=cast(TextIO, _OptionalOutput(sys.stderr)), force_jupyter=in_notebook)
    with rich.Progress(*words, *numbers, console=console) as bars:
        tasks: dict[str, rich.TaskID] = {}

        def progress(task: str, done: int = 0, total: int = 0) -> None:
            if task not in tasks:
                for old in bars.tasks:
                    bars.update(old.id, visible=bool(old.fields["amount"]))
                tasks[task] = bars.add_task(escape_unprintable(task), amount="")
            amount = f"[{done:,}/{total:,}]" if total else ""
            bars.update(tasks[task], completed=done, total=total or None, amount=amount)

        yield progress
