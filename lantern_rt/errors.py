"""Every error that a user can cause; the message is one line: found, expected, what to do. Others are bugs.

LanternError
|-- BundleError
|-- CheckpointError
|-- ParityError
|-- EngineError
|-- OutputError
`-- RequestError
    |-- BusyError
    `-- TreeError
"""

from __future__ import annotations

_LONGEST = 2000  # characters of a message


def printable(text: str) -> str:
    """The text with what a terminal would act on, or show in another order, as escapes (`\\u001b`); lines stay lines.

    Escapes are those of JSON, so that JSON stays JSON.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one == "\n" else _escape(ord(one)) for one in text)


def _escape(code: int) -> str:
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


class LanternError(Exception):
    """Base of every error that a user can cause and cure. As text it is one line, safe to print and never endless."""

    def __str__(self) -> str:
        text = printable(" ".join(super().__str__().split()))
        return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"


class BundleError(LanternError):
    """A bundle is missing, incomplete, altered, or of an unknown format."""


class CheckpointError(LanternError):
    """A checkpoint cannot be read, or does not belong to the family asked for."""


class ParityError(LanternError):
    """An exported graph does not compute what the checkpoint computes."""


class EngineError(LanternError):
    """A backend is not installed, or does not take a graph."""


class OutputError(LanternError):
    """A file cannot be written, or is there already."""


class RequestError(LanternError):
    """A prompt or parameter is out of range, or contradicts another."""


class BusyError(RequestError):
    """A service has no room for another request. seconds: about when to try again."""

    def __init__(self, message: str, seconds: int) -> None:
        super().__init__(message)
        self.seconds = seconds

    def __reduce__(self) -> tuple[type[BusyError], tuple[str, int]]:
        return type(self), (self.args[0], self.seconds)  # pickled by replicas


class TreeError(RequestError):
    """A draft tree is malformed."""
