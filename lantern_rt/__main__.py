"""Entry point of `python -m lantern_rt` and `lantern-rt`, which handles Ctrl-C even during imports."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the program and exit."""
    try:
        if sys.argv[1:2] == ["serve"] and sys.platform != "win32":
            import signal

            # SIGHUP tells a server to reload its API keys, but ends a process without a handler. Until the server has
            # its handler, the signal must wait.
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
        # imported inside `try`, so that Ctrl-C during the import ends the program without a traceback
        from .cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("lantern-rt: interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
