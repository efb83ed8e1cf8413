"""The `lantern-rt` program: runs a command and turns its outcome into an exit code.

0: done. 2: the user can cure it, one line on stderr says how. 130: Ctrl-C, answered from the start, since commands are
imported inside. 143: SIGTERM; nothing half-written stays then either. Anything else is a bug and shows its traceback.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from ..errors import LanternError, printable

FAILED, INTERRUPTED, PIPE_CLOSED = 2, 130, 141


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program with `arguments` (by default those of the process) and exit."""
    signal.signal(signal.SIGTERM, _terminate)
    sys.exit(run_program(sys.argv[1:] if arguments is None else arguments))


def _terminate(number: int, _: object) -> None:
    """Leave by an exception, so that everything cleans up behind itself; further signals do not disturb that."""
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)


def run_program(arguments: Sequence[str]) -> int:
    """Run a command; the exit code."""
    try:
        code = _run_command(arguments)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except LanternError as error:
        return _fail(str(error))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more
        return PIPE_CLOSED
    return _fail("interrupted; no file was left half-written", code) if code == INTERRUPTED else code


def _run_command(arguments: Sequence[str]) -> int:
    import typer

    from .app import PROGRAM, app

    if reconfigure := getattr(sys.stdout, "reconfigure", None):
        reconfigure(errors="backslashreplace")  # a file name may hold what the terminal cannot show
    try:
        code = app(list(arguments), prog_name=PROGRAM, standalone_mode=False)
        sys.stdout.flush()
    except typer.Abort as error:
        raise KeyboardInterrupt from error  # of some versions; others return 130
    except Exception as error:
        if not hasattr(error, "format_message"):  # every usage error has it
            raise
        context = getattr(error, "ctx", None)
        return _fail(f"{error.format_message()} (see `{context.command_path if context else PROGRAM} --help`)")
    return code if isinstance(code, int) else 0


def _fail(message: str, code: int = FAILED) -> int:
    print(f"lantern-rt: {printable(' '.join(message.split()))}", file=sys.stderr)
    return code
