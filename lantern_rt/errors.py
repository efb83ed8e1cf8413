"""Every error that a user can cause. Fields say what is at fault, text is made of them at the edge. Others are bugs.

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
    """Base of every error that a user can cause and cure.

    As text it is one line, safe to print and never endless: `field: problem, found X, expected Y; remedy`, of what is
    there. Programs read the fields.

    Args:
        problem: what is wrong, where found and expected do not say it.
        field: what is at fault: a parameter by its public name, a file, a graph.
        found: what is there.
        expected: what belongs there.
        remedy: what to do.
    """

    def __init__(
        self, problem: str = "", *, field: str = "", found: str = "", expected: str = "", remedy: str = ""
    ) -> None:
        super().__init__(problem)
        self.problem = problem
        self.field = field
        self.found = found
        self.expected = expected
        self.remedy = remedy

    def __str__(self) -> str:
        parts = [self.problem, self.found and f"found {self.found}", self.expected and f"expected {self.expected}"]
        text = ": ".join(filter(None, [self.field, ", ".join(filter(None, parts))]))
        text = "; ".join(filter(None, [text, self.remedy]))
        text = printable(" ".join(text.split()))
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
    """A service has no room for another request.

    Args:
        problem: how many images are before it.
        seconds: about when to try again.
    """

    def __init__(self, problem: str = "", seconds: int = 1) -> None:
        super().__init__(problem, remedy=f"try again in about {seconds} s")
        self.seconds = seconds


class TreeError(RequestError):
    """A draft tree is malformed."""
