"""Kinds of bodies: each endpoint reads a body piece by piece and makes a `Call` of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from starlette.datastructures import Headers

from .codes import NPZ, CodesFileRequest, CodesRequest
from .forms import FORM, FormReader
from .protocol import Call, EditRequest, ImagesRequest, VariationRequest, read_json
from .sglang import read_call
from .state import ServerLimits


class BodyReader(Protocol):
    """Incremental parser of one body. Its methods raise `HttpError` if the body is malformed or too large."""

    def write(self, data: bytes) -> None:
        """Parse or keep the next bytes."""

    def request(self) -> Call:
        """Return the call, once all bytes are there."""

    def close(self) -> None:
        """Free the received bytes."""


class BodyKind(Protocol):
    """Kind of the bodies of an endpoint. media_type: their content type."""

    media_type: str

    def max_bytes(self, limits: ServerLimits) -> int:
        """Return the maximum size of a body."""

    def make_reader(self, headers: Headers, limits: ServerLimits) -> BodyReader:
        """Return the parser of one body."""


@dataclass(frozen=True)
class JsonBodies:
    """JSON texts.

    Args:
        parse: function from a text, the headers and the limits to the call.
        is_batch: whether a body may hold as many prompts as a request may have images.
        holds_image: whether a body may hold an image.
    """

    parse: Callable[[bytes, Headers, ServerLimits], Call]
    is_batch: bool = False
    holds_image: bool = False
    media_type = "application/json"

    def max_bytes(self, limits: ServerLimits) -> int:
        if self.holds_image:
            return limits.max_form_bytes
        return limits.max_body_bytes * (limits.max_n if self.is_batch else 1)

    def make_reader(self, headers: Headers, limits: ServerLimits) -> BodyReader:
        return _JsonReader(self.parse, headers, limits)


class _JsonReader:
    def __init__(
        self, parse: Callable[[bytes, Headers, ServerLimits], Call], headers: Headers, limits: ServerLimits
    ) -> None:
        self._parse = parse
        self._headers = headers
        self._limits = limits
        self._data = bytearray()

    def write(self, data: bytes) -> None:
        self._data += data

    def request(self) -> Call:
        return self._parse(bytes(self._data), self._headers, self._limits)

    def close(self) -> None:
        self._data.clear()


@dataclass(frozen=True)
class FormBodies:
    """Forms with files. model: class of their requests."""

    model: type[EditRequest]
    media_type = FORM

    def max_bytes(self, limits: ServerLimits) -> int:
        return limits.max_form_bytes

    def make_reader(self, headers: Headers, limits: ServerLimits) -> BodyReader:
        return FormReader(headers["content-type"], limits.max_body_bytes, self.model)


def _read_codes(body: bytes, headers: Headers, limits: ServerLimits) -> Call:
    accepted = [part.partition(";")[0].strip() for part in headers.get("accept", "").split(",")]
    return read_json(CodesFileRequest if NPZ in accepted else CodesRequest, body)


# Bodies of each endpoint by the last part of its path.
BODIES: dict[str, BodyKind] = {
    "generations": JsonBodies(lambda body, headers, limits: read_json(ImagesRequest, body)),
    "edits": FormBodies(EditRequest),
    "variations": FormBodies(VariationRequest),
    "codes": JsonBodies(_read_codes, holds_image=True),
    "generate": JsonBodies(lambda body, headers, limits: read_call(body, limits.own_sampling), is_batch=True),
}
