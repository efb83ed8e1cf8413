"""Formats of request bodies. A parser receives a body in pieces and converts it to a `ParsedBody`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from starlette.datastructures import Headers

from ..output.formats import CODES
from .codes import CodesFileRequest, CodesRequest
from .forms import FORM, FormBodyParser
from .protocol import EditRequest, HttpError, ImagesRequest, ParsedBody, VariationRequest, parse_json_body
from .sglang import parse_sglang_body
from .state import ServerLimits

JSON = "application/json"
# Field with an image in base64. In base64, a JSON string has no escapes but these.
_IMAGE_FIELD = re.compile(rb'"image"\s*+:\s*+"[^"\\]*+(?:\\[/nr][^"\\]*+)*+"')


class BodyParser(Protocol):
    """Incremental parser of one request body, which raises `HttpError` if the body is malformed or too large."""

    def write(self, data: bytes) -> None: ...

    def parse_request(self) -> ParsedBody:
        """Return the requests in the body, of which all bytes have been written."""

    def close(self) -> None:
        """Free the received bytes."""


@dataclass(frozen=True)
class BodyFormat:
    """Format of the request bodies of an endpoint, such as JSON."""

    media_type: str
    max_bytes: Callable[[ServerLimits], int]
    make_parser: Callable[[Headers, ServerLimits], BodyParser]


class _JsonParser:
    def __init__(self, parse: Callable[[bytes], ParsedBody]) -> None:
        self._parse = parse
        self._data = bytearray()

    def write(self, data: bytes) -> None:
        self._data += data

    def parse_request(self) -> ParsedBody:
        return self._parse(bytes(self._data))

    def close(self) -> None:
        self._data.clear()


def _make_json_format(
    parse: Callable[[bytes, Headers, ServerLimits], ParsedBody],
    max_bytes: Callable[[ServerLimits], int] = lambda limits: limits.max_body_bytes,
) -> BodyFormat:
    return BodyFormat(JSON, max_bytes, lambda headers, limits: _JsonParser(lambda body: parse(body, headers, limits)))


def _make_form_format(request_class: type[EditRequest]) -> BodyFormat:
    def make_parser(headers: Headers, limits: ServerLimits) -> BodyParser:
        return FormBodyParser(headers["content-type"], limits.max_body_bytes, request_class)

    return BodyFormat(FORM, lambda limits: limits.max_form_bytes, make_parser)


def _parse_codes_body(body: bytes, headers: Headers, server_limits: ServerLimits) -> ParsedBody:
    """Parse a request for codes. The header `Accept` selects JSON or an .npz file as the response."""
    image = _IMAGE_FIELD.search(body)
    size = len(body) - len(image[0] if image else b"")
    if size > server_limits.max_body_bytes:  # before parsing, as many small fields take long to parse
        expected = f"at most {server_limits.max_body_bytes:,} bytes beside the image"
        raise HttpError(413, field="body", found=f"{size:,} bytes", expected=expected)
    accept = ",".join(headers.getlist("accept")).lower()
    file_weight = _find_weight(accept, CODES.media_type)
    wants_file = file_weight > 0 and file_weight >= _find_weight(accept, JSON)
    return parse_json_body(CodesFileRequest if wants_file else CodesRequest, body)


def _find_weight(accept: str, media_type: str) -> float:
    """Return the weight `q` of a media type in a header `Accept`; 0 if the header does not name the type."""
    for part in accept.split(","):
        name, *parameters = [item.strip() for item in part.split(";")]
        if name == media_type:
            weights = [re.fullmatch(r"q=([01](?:\.[0-9]{0,3})?)", parameter) for parameter in parameters]
            return next((float(weight[1]) for weight in weights if weight), 1.0)
    return 0.0


# Format of the request bodies of each endpoint, by the last part of the endpoint's path.
BODY_FORMATS: dict[str, BodyFormat] = {
    "generations": _make_json_format(lambda body, headers, limits: parse_json_body(ImagesRequest, body)),
    "edits": _make_form_format(EditRequest),
    "variations": _make_form_format(VariationRequest),
    "codes": _make_json_format(_parse_codes_body, lambda limits: limits.max_form_bytes),  # with an image in base64
    "generate": _make_json_format(
        lambda body, headers, limits: parse_sglang_body(body),
        lambda limits: limits.max_body_bytes * limits.max_n,  # a batch
    ),
}
