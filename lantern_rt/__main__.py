"""Entry point of `python -m lantern_rt` and `lantern-rt`, which handles Ctrl-C even during imports."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the program and exit."""
    try:
        if sys.argv[1:2] == ["serve"] and sys.platform != "win32":
            import signal

            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])  # waits until the server can reload its keys
        from .cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("lantern-rt: interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
