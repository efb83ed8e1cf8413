"""Every error that a user can cause; the message is one line: found, expected, what to do. Others are bugs.

LanternError
|-- BundleError
|-- CheckpointError
|-- ParityError
|-- EngineError
|-- OutputError
`-- RequestError
    `-- TreeError
"""

from __future__ import annotations


class LanternError(Exception):
    """Base of every error that a user can cause and cure."""


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


class TreeError(RequestError):
    """A draft tree is malformed."""
