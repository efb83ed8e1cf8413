"""Parser of forms with files (`multipart/form-data`). The time and memory to parse a form are linear in its size."""

from __future__ import annotations

import logging
import re
from typing import Any

from pydantic import ValidationError
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import Field, File, FormParser, parse_options_header

from ..inputs import describe_validation_error, format_error
from .protocol import EditRequest, HttpError

FORM = "multipart/form-data"
FILES = ("image", "mask")  # all other fields are text
MAX_PARTS = 64
LIMITS = {"MAX_HEADER_COUNT": 4, "MAX_HEADER_SIZE": 1 << 10, "MAX_MEMORY_FILE_SIZE": float("inf")}  # per part

logging.getLogger("python_multipart").setLevel(logging.ERROR)  # our log has one line per request


class FormBodyParser:
    """Parser of one form that arrives in pieces, with at most `max_text_bytes` in all text fields; see `BodyParser`."""

    def __init__(self, content_type: str, max_text_bytes: int, request_class: type[EditRequest] = EditRequest) -> None:
        self._max_text_bytes = max_text_bytes
        self._remaining_text_bytes = max_text_bytes
        self._request_class = request_class
        self._values: dict[str, bytes] = {}
        self._complete = False
        self._tail = b""
        boundary = parse_options_header(content_type)[1].get(b"boundary") or None
        self._delimiter = b"\r\n--" + (boundary or b"")
        # A boundary inside a part would slow the parser down to single bytes. No client sends this, so an error is
        # raised.
        self._misplaced = re.compile(re.escape(self._delimiter) + rb"(?:[^\r-]|\r[^\n]|-[^-])")
        try:
            self._parser = FormParser(
                FORM, self._add_field, self._add_file, self._mark_complete, boundary, config=LIMITS
            )
        except FormParserError as error:
            raise _make_malformed_error(format_error(error)) from error

    def write(self, data: bytes) -> None:
        window = self._tail + data
        self._tail = window[-len(self._delimiter) - 1 :]
        if self._misplaced.search(window):
            raise _make_malformed_error("a boundary within a part")
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _make_malformed_error(format_error(error)) from error

    def parse_request(self) -> EditRequest:
        if not self._complete:
            raise _make_malformed_error("an incomplete form")
        # Browsers send an empty part for every input that was not filled.
        filled = {name: value for name, value in self._values.items() if value}
        files: dict[str, Any] = {name: filled.pop(name) for name in FILES if name in filled}
        if "image" not in files:
            raise HttpError(400, field="image", found="none", expected="a PNG, JPEG or WebP file")
        texts = {name: value.decode("utf-8", "replace") for name, value in filled.items()}
        try:
            return self._request_class.model_validate_strings(texts).model_copy(update=files)
        except ValidationError as error:
            fields: dict[str, Any] = describe_validation_error(error)
            raise HttpError(400, **fields) from error

    def close(self) -> None:
        self._values.clear()
        self._parser.parser = None

    def _add_field(self, part: Field) -> None:
        self._add_value(part.field_name, part.value or b"")

    def _add_file(self, part: File) -> None:
        part.file_object.seek(0)
        self._add_value(part.field_name, part.file_object.read())

    def _add_value(self, field_name: bytes | None, value: bytes) -> None:
        name = (field_name or b"").decode("utf-8", "replace").removesuffix("[]")[:80]
        if name in self._values:
            raise HttpError(400, field=name, found="more than one", expected="one")
        if len(self._values) == MAX_PARTS:
            raise _make_malformed_error(f"a form with more than {MAX_PARTS} parts")
        self._values[name] = value
        if name not in FILES:
            self._remaining_text_bytes -= len(self._values[name])
        if self._remaining_text_bytes < 0:
            raise HttpError(413, field=name, expected=f"at most {self._max_text_bytes:,} bytes of text in all")

    def _mark_complete(self) -> None:
        self._complete = True


def _make_malformed_error(problem: str) -> HttpError:
    return HttpError(400, field="body", found=problem, expected=f"{FORM} with its boundary")
