"""Errors that a user can cause. The fields of an error describe the fault, and its message contains the fields.

Any other exception that escapes the package is a bug.

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

_MAX_MESSAGE_LENGTH = 2000  # number of characters above which the middle of a message is replaced by ` ... `


def escape_unprintable(text: str) -> str:
    """Replace unprintable characters but line breaks, which could control a terminal, by escapes like `\\u001b`."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char == "\n" else _escape_code_point(ord(char)) for char in text)


def _escape_code_point(code_point: int) -> str:
    return f"\\u{code_point:04x}" if code_point < 0x10000 else f"\\U{code_point:08x}"


class LanternError(Exception):
    """Base class of the errors that a user can cause and cure.

    The message has the form `field: problem, found X, expected Y; remedy`, without the parts that are empty. The
    message is one line of at most 2,005 characters, and safe to print. Programs should read the fields instead of the
    message.

    Args:
        problem: description of the fault, if `found` and `expected` do not describe it.
        field: subject of the error: public name of a parameter, path of a file, or name of a graph.
        found: actual value, as text.
        expected: description of the valid values.
        remedy: instruction that tells the user how to cure the fault.

    Attributes:
        suggestions: valid prompts that are similar to an invalid prompt.
    """

    suggestions: tuple[str, ...] = ()

    def __init__(
        self, problem: str = "", field: str = "", found: str = "", expected: str = "", remedy: str = ""
    ) -> None:
        super().__init__(problem, field, found, expected, remedy)  # unpickling in another process needs all arguments
        self.problem = problem
        self.field = field
        self.found = found
        self.expected = expected
        self.remedy = remedy

    def __str__(self) -> str:
        parts = [self.problem, self.found and f"found {self.found}", self.expected and f"expected {self.expected}"]
        text = ": ".join(filter(None, [self.field, ", ".join(filter(None, parts))]))
        text = "; ".join(filter(None, [text, self.remedy]))
        text = escape_unprintable(" ".join(text.split()))
        return (
            text
            if len(text) <= _MAX_MESSAGE_LENGTH
            else f"{text[: _MAX_MESSAGE_LENGTH // 2]} ... {text[-_MAX_MESSAGE_LENGTH // 2 :]}"
        )


class BundleError(LanternError):
    """A bundle is missing, incomplete, altered, or of an unknown format."""


class CheckpointError(LanternError):
    """A checkpoint cannot be read, or belongs to another model family."""


class ParityError(LanternError):
    """The outputs of an exported graph differ from the outputs of the checkpoint."""


class EngineError(LanternError):
    """A backend is not installed, or rejects a graph."""


class OutputError(LanternError):
    """A file cannot be written, or exists already."""


class RequestError(LanternError):
    """A prompt or parameter is invalid, or two parameters contradict each other."""


class BusyError(RequestError):
    """A service rejects a request because its queue is full, or because a deadline would be missed.

    Args:
        problem: description of the fault, such as the number of images in the queue.
        retry_seconds: estimated time until a retry can succeed, in seconds, from 1.
    """

    def __init__(self, problem: str = "", retry_seconds: int = 1) -> None:
        super().__init__(problem, remedy=f"try again in about {retry_seconds} s")
        self.args = problem, retry_seconds  # unpickling in another process calls `__init__` with `args`
        self.retry_seconds = retry_seconds


class TreeError(RequestError):
    """A draft tree is malformed."""
