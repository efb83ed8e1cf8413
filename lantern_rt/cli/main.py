"""The `lantern-rt` program: runs a command and turns its outcome into an exit code.

0: done, as far as a closed pipe let it. 2: the user can cure it, one line on stderr says how. 130: Ctrl-C, answered
from the start, since commands are imported inside. 143: SIGTERM; nothing half-written stays then either. Anything else
is a bug and shows its traceback.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress

from ..errors import LanternError, OutputError, printable

TYPE_CHECKING = False  # as in the package itself
if TYPE_CHECKING:
    from typing import Any, TextIO

FAILED, INTERRUPTED = 2, 130


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program with `arguments` (by default those of the process) and exit."""
    signal.signal(signal.SIGTERM, _terminate)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed: nobody wants it, and no file may be given its number
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    sys.exit(run_program(sys.argv[1:] if arguments is None else arguments))


def _terminate(number: int, _: object) -> None:
    """Leave by an exception, so that everything cleans up behind itself; further signals do not disturb that."""
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)


def run_program(arguments: Sequence[str]) -> int:
    """Run a command; the exit code."""
    output: Any = _Guarded(sys.stdout, silent=False)
    errors: Any = _Guarded(sys.stderr, silent=True)
    with redirect_stdout(output), redirect_stderr(errors):
        try:
            code = _run_command(arguments)
            sys.stdout.flush()
        except KeyboardInterrupt:
            return _fail("interrupted; no file was left half-written", INTERRUPTED)
        except LanternError as error:
            return _fail(str(error))
        except BrokenPipeError:
            return 0
        return code


class _Guarded:
    """A stream that is given up when it cannot be written: standard output with a refusal, standard error silently."""

    def __init__(self, stream: TextIO, silent: bool) -> None:
        self._stream, self._silent = stream, silent
        self._problem: OSError | None = None

    def write(self, text: str) -> int:
        """Write, or refuse. Raises: OutputError, or BrokenPipeError where nobody reads any more."""
        self._guard(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        """Flush, or refuse as `write` does."""
        self._guard(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _guard(self, act: Callable[..., object], *given: str) -> None:
        """Whoever swallows a refusal meets it again."""
        try:
            act(*given)
        except OSError as error:
            self._problem = error
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())  # the interpreter flushes once more
        if self._problem is not None and not self._silent:
            if isinstance(self._problem, BrokenPipeError):
                raise self._problem
            found = f"standard output: cannot be written ({self._problem.strerror})"
            raise OutputError(f"{found}; send it elsewhere") from self._problem


def _run_command(arguments: Sequence[str]) -> int:
    import typer

    from .app import PROGRAM, app

    if reconfigure := getattr(sys.stdout, "reconfigure", None):
        reconfigure(errors="backslashreplace")  # a file name may hold what the terminal cannot show
    command = typer.main.get_command(app)
    try:
        with command.make_context(PROGRAM, list(arguments)) as context:
            command.invoke(context)
    except typer.Exit as error:
        return error.exit_code
    except Exception as error:
        if not hasattr(error, "format_message"):  # every usage error has it
            raise
        place = getattr(getattr(error, "ctx", None), "command_path", PROGRAM)
        return _fail(f"{error.format_message()} (see `{place} --help`)")
    return 0


def _fail(message: str, code: int = FAILED) -> int:
    with suppress(OutputError, OSError):
        sys.stdout.flush()
    print(f"lantern-rt: {printable(' '.join(message.split()))}", file=sys.stderr)
    return code
