"""The `lantern-rt` program: runs a command and turns its outcome into an exit code.

0: done, as far as a closed pipe let it. 2: the user can cure it, one line on stderr says how. 130: Ctrl-C. 143:
SIGTERM. Nothing half-written stays then. Anything else is a bug and shows its traceback.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

import typer

from ..engines.system import start_threads
from ..errors import EngineError, LanternError
from .app import PROGRAM, app
from .console import print_stderr

FAILED, INTERRUPTED = 2, 130


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program with `arguments` (by default those of the process) and exit."""
    signal.signal(signal.SIGTERM, _terminate)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed: nobody wants it, and no file may be given its number
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    try:
        start_threads(min(os.cpu_count() or 1, 64))  # as many as NumPy
    except EngineError:  # on which its OpenBLAS would raise SIGINT, and PyTorch's OpenMP exit
        for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
            os.environ.setdefault(name, "1")
    code = run_program(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # the interpreter flushes once more, and would complain
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(code)


def _terminate(number: int, _: object) -> None:
    """Leave by an exception, so that everything cleans up behind itself; further signals do not disturb that."""
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)


def run_program(arguments: Sequence[str]) -> int:
    """Run a command; the exit code."""
    try:
        return _run_command(arguments)
    except KeyboardInterrupt:
        return _fail("interrupted; no file was left half-written", INTERRUPTED)
    except LanternError as error:
        return _fail(str(error))
    except BrokenPipeError:
        return 0
    except RuntimeError as error:
        if "can't start new thread" not in str(error):
            raise
        return _fail("the system starts no more threads; raise `ulimit -u`")


def _run_command(arguments: Sequence[str]) -> int:
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
    with suppress(OSError):
        sys.stdout.flush()
    print_stderr(f"lantern-rt: {' '.join(message.split())}")
    return code
