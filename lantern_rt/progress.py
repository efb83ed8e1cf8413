"""What long work tells its caller: lines of text, and bytes written of how many.

Does not know terminals; the command line derives one that draws a bar.
"""

from __future__ import annotations


class Progress:
    """Takes reports and does nothing with them."""

    def __call__(self, line: str) -> None:
        """A new piece of work begins."""

    def bytes(self, done: int, total: int) -> None:
        """So many bytes are written, of about so many."""
