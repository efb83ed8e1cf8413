"""The `lantern-rt` program: runs a command and returns an exit code.

The exit codes are:

- 0: success, or the reader of stdout closed it early
- 2: an error that the user can correct; stderr has one line about the error
- 130: Ctrl-C
- 143: SIGTERM

No incomplete files remain in any of these cases. Any other exception is a bug, and its traceback is printed.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

import typer

from ..bundle import DOWNLOAD_THREAD
from ..engines.system import check_thread_count
from ..errors import EngineError, LanternError
from .app import PROGRAM, app
from .console import print_stderr

FAILED = 2
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program and exit the process. `arguments` omit the program's name; None: those of the process."""
    signal.signal(signal.SIGTERM, _handle_sigterm)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed; the next file opened must not get its number
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    try:
        check_thread_count(min(os.cpu_count() or 1, 64))  # the number of threads that NumPy starts
    except EngineError:  # too few threads: OpenBLAS would raise SIGINT, PyTorch's OpenMP would exit
        for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
            os.environ.setdefault(name, "1")
    try:
        code = run_program(sys.argv[1:] if arguments is None else arguments)
    except _TerminatedExit as terminated:
        code = terminated.code
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # the interpreter flushes again at exit, and would print an error
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if any(thread.name == DOWNLOAD_THREAD for thread in threading.enumerate()):  # interrupted, and cannot be stopped
        os._exit(code)
    sys.exit(code)


class _TerminatedExit(SystemExit):
    code: int


def _handle_sigterm(signal_number: int, _: object) -> None:
    signal.signal(signal_number, signal.SIG_DFL)  # a second SIGTERM ends the program at once, without cleanup
    raise _TerminatedExit(128 + signal_number)


def run_program(arguments: Sequence[str]) -> int:
    """Run a command, print an error message if it fails, and return the exit code."""
    try:
        return _run_command(arguments)
    except KeyboardInterrupt:
        return _print_failure("interrupted; no file is incomplete", INTERRUPTED)
    except LanternError as error:
        return _print_failure(str(error))
    except BrokenPipeError:
        return 0
    except RuntimeError as error:
        if "can't start new thread" not in str(error):
            raise
        return _print_failure("the system cannot start more threads; raise `ulimit -u`")


def _run_command(arguments: Sequence[str]) -> int:
    if reconfigure := getattr(sys.stdout, "reconfigure", None):
        reconfigure(errors="backslashreplace")  # file names may contain characters that the terminal cannot print
    command = typer.main.get_command(app)
    try:
        with command.make_context(PROGRAM, list(arguments)) as context:
            command.invoke(context)
    except typer.Exit as error:
        return error.exit_code
    except Exception as error:
        if not hasattr(error, "format_message"):  # every usage error has it
            raise
        command_path = getattr(getattr(error, "ctx", None), "command_path", PROGRAM)
        return _print_failure(f"{error.format_message()} (see `{command_path} --help`)")
    return 0


def _print_failure(message: str, exit_code: int = FAILED) -> int:
    with suppress(OSError):
        sys.stdout.flush()
    print_stderr(f"lantern-rt: {' '.join(message.split())}")
    return exit_code
