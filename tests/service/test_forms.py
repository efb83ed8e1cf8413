"""Test the parser of multipart forms: valid forms in pieces of any size, invalid forms and hostile forms."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import catch_error
from running_server import EDITS, FORM, RunningServer, format_form, format_head, wait_until

from lantern_rt.serve.forms import MAX_PARTS, FormBodyParser
from lantern_rt.serve.protocol import EditRequest, HttpError

MAX_TEXT_BYTES = 1 << 16  # maximum size of a text field
IMAGE_HEAD = b'--x\r\ncontent-disposition: form-data; name="image"'
MAX_FORM_BYTES = 8 << 20


def parse_form(body: bytes, content_type: str = FORM, sizes: tuple[int, ...] = (1 << 16,)) -> EditRequest:
    """Parse a form that is received in pieces of these sizes, which repeat until its end."""
    parser = FormBodyParser(content_type, MAX_TEXT_BYTES)
    position = i = 0
    while position < len(body):
        parser.write(body[position : position + sizes[i % len(sizes)]])
        position += sizes[i % len(sizes)]
        i += 1
    return parser.parse_request()


boundary_parts = st.sampled_from([b"\r\n", b"--", b"-", b"x", b"\r", b"\n", b"\0", b"\r\n-", b"\r\n--"])


@settings(max_examples=60, deadline=None)
@given(
    st.builds(b"".join, st.lists(boundary_parts, max_size=30)),
    st.none() | st.binary(max_size=200),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=50),
    st.lists(st.integers(1, 40), min_size=1, max_size=5).map(tuple),
)
def test_a_form_received_in_pieces_of_any_size_is_parsed_correctly(
    image: bytes, mask: bytes | None, prompt: str, sizes: tuple[int, ...]
) -> None:
    fields = {"image": b"P" + image.replace(b"\r\n--x", b"\r\n--y"), "prompt": prompt.encode(), "n": b"2"}
    fields |= {} if mask is None else {"mask": mask.replace(b"\r\n--x", b"\r\n--y")}
    request = parse_form(format_form(fields), sizes=sizes)
    assert (request.image, request.mask) == (fields["image"], fields.get("mask") or None)
    assert (request.prompt, request.n) == (prompt or None, 2)


def test_an_empty_form_field_is_treated_as_missing() -> None:
    empty = dict.fromkeys({*EditRequest.model_fields} - {"image"}, b"")
    assert parse_form(format_form({"image": b"P", **empty})) == parse_form(format_form({"image": b"P"}))
    assert catch_error(HttpError, parse_form, format_form({"image": b"", "prompt": b"red"})).field == "image"


def test_quoted_names_mixed_case_headers_and_quoted_boundaries_are_parsed() -> None:
    body = b"--a b\r\nContent-Type: image/png\r\n"
    body += b'Content-Disposition: form-data; filename="a;\\"b"; name=image[]\r\n\r\nP\r\n'
    body += b'--a b\r\ncontent-disposition: form-data; name="seed"; filename="seed.txt"\r\n\r\n7\r\n--a b--and more'
    request = parse_form(body, 'multipart/form-data; charset=utf-8; Boundary="a b"')
    assert (request.image, request.seed) == (b"P", 7)


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        (IMAGE_HEAD + b'; x="' + b";" * (MAX_FORM_BYTES // 2), 400, "body"),
        (IMAGE_HEAD + b"\r\na: b" * 100_000, 400, "body"),
        (IMAGE_HEAD + b"\r\n" + b"a" * MAX_FORM_BYTES, 400, "body"),
        (b"--x\r\n" + b"a: b\r\n" * 5 + b"\r\n", 400, "body"),
        (IMAGE_HEAD + b"\r\n\r\n" + b"\r\n--xy" * 100_000, 400, "body"),
        (IMAGE_HEAD + b"\r\n\r\n\r\n--x" + b" " * MAX_FORM_BYTES, 400, "body"),
        (format_form({f"f{i}": b"" for i in range(MAX_PARTS + 1)}), 400, "body"),
        (format_form({"image": b"P"})[:-4], 400, "body"),
        (b"--x\r\n\r\n--x--", 400, "body"),
        (b"--x\r\ncontent-disposition: form-data\r\n\r\n\r\n--x--", 400, "body"),
        (b"no form", 400, "body"),
        (b"", 400, "body"),
        (format_form({"image": b"P", "prompt": bytes(MAX_TEXT_BYTES + 1)}), 413, "prompt"),
        (format_form({"image": b"P", **{f"f{i}": bytes(MAX_TEXT_BYTES // 9) for i in range(10)}}), 413, "f9"),
        (format_form({"prompt": b"red"}), 400, "image"),
        (format_form({"image": b"P"})[:-7] + format_form({"image[]": b"P"}), 400, "image"),
        (format_form({"image": b"P", "strength": b"1"}), 400, "strength"),
        (format_form({"image": b"P", "n": b"0"}), 400, "n"),
    ],
    ids=range(18),
)
@pytest.mark.parametrize("sizes", [(1 << 16,), (1 << 16, 1)])
def test_an_invalid_form_is_rejected_with_the_name_of_the_invalid_field(
    body: bytes, status: int, field: str, sizes: tuple[int, ...]
) -> None:
    error = catch_error(HttpError, parse_form, body, sizes=sizes)
    assert (error.status, error.field) == (status, field)
    assert len(str(error)) < 300


@pytest.mark.parametrize(
    "content_type", ["multipart/form-data", "multipart/form-data; boundary=", f"{FORM}{'x' * 300}"]
)
def test_a_form_with_a_missing_empty_or_too_long_boundary_is_rejected(content_type: str) -> None:
    assert catch_error(HttpError, parse_form, format_form({"image": b"P"}), content_type).field == "body"


def test_hostile_forms_do_not_delay_other_requests_or_the_shutdown(
    start_server: Callable[..., RunningServer], tiny_folder: Path
) -> None:
    server = start_server(tiny_folder, "--threads", 1)
    hostile_form = IMAGE_HEAD + b'; x="' + b";" * 1_000_000
    for _ in range(6):
        server.connect(format_head(EDITS, FORM, len(hostile_form)) + hostile_form).close()
    assert server.post({"prompt": "red cube"})[0] == 200
    with server.connect(format_head(EDITS, FORM, 2 * MAX_FORM_BYTES) + hostile_form) as connection:
        assert connection.recv(12) == b"HTTP/1.1 413"
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
    assert "Traceback" not in server.log


# ---------------------------------------------------------------- random bodies

NAMES = [b"image", b"image[]", b"mask", b"prompt", b"n", b"seed", b"stream", b"keep_rows", b"", b"\xff"]
ENCODINGS = [b"content-transfer-encoding: " + name for name in (b"base64", b"quoted-printable", b"nonsense")]
HEADERS = [b"content-type: image/png", *ENCODINGS, b"a" * 5000 + b": b", b"no header", b": empty", b"a:\0"]
field_values = st.sampled_from([b"1", b"red cube", b"true", b"\x89PNG\r\n\x1a\n", b"a" * 70_000])


def format_field(name: bytes, value: bytes, headers: list[bytes]) -> bytes:
    head = [b"--x", b'content-disposition: form-data; name="%s"' % name, *headers]
    return b"\r\n".join([*head, b"", value, b""])


form_fields = st.builds(
    format_field,
    st.sampled_from(NAMES),
    st.binary(max_size=80) | field_values,
    st.lists(st.sampled_from(HEADERS), max_size=3),
)
well_formed_bodies = st.builds(lambda fields: b"".join(fields) + b"--x--\r\n", st.lists(form_fields, max_size=8))
mutated_bodies = st.builds(
    lambda body, seed, count: bytes(mutate_body(bytearray(body), random.Random(seed), count)),
    well_formed_bodies,
    st.integers(0, 2**32),
    st.integers(1, 4),
)
bodies = well_formed_bodies | mutated_bodies | st.binary(max_size=300)
OTHER_TYPES = ['multipart/form-data; boundary="x"', "multipart/form-data", "text/plain"]
content_types = st.sampled_from([FORM, FORM, FORM, *OTHER_TYPES])


def mutate_body(body: bytearray, rng: random.Random, count: int) -> bytearray:
    """Delete, insert, repeat or cut off bytes of `body` at random positions."""
    for _ in range(count):
        at, end = sorted(rng.randrange(len(body) + 1) for _ in range(2))
        kind = rng.randrange(4)
        if kind == 0:
            del body[at : min(end, at + 50)]
        elif kind == 1:
            body[at:at] = rng.choice([b"\r\n--x", b"--x--", b"\r\n\r\n", b";" * 3000, b"\0", b'"', b"\r"])
        elif kind == 2:
            body[at:at] = body[at : min(end, at + 2000)]
        else:
            del body[at:]
    return body


def send_form(server: RunningServer, content_type: str, body: bytes, disconnect_early: bool) -> int | None:
    """Return the status of the response, which must arrive within 20 s; None if disconnected after half of the body."""
    with server.connect(format_head(EDITS, content_type, len(body)) + body[: len(body) // 2]) as connection:
        if disconnect_early:
            return None
        connection.settimeout(20)
        with suppress(ConnectionError):  # the server rejected the form before it was complete
            connection.sendall(body[len(body) // 2 :])
        return int(connection.recv(1 << 16).split()[1])


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_every_random_form_gets_a_response(count: int, tiny_server: RunningServer) -> None:
    statuses: set[int | None] = set()

    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=[*HealthCheck])
    @given(content_types, bodies, st.sampled_from([False, False, False, True]))
    def send_random_form(content_type: str, body: bytes, disconnect_early: bool) -> None:
        statuses.add(send_form(tiny_server, content_type, body, disconnect_early))

    send_random_form()
    assert statuses <= {None, 200, 400, 413, 415}
    assert 400 in statuses
    assert tiny_server.post({"prompt": "red cube"})[0] == 200
    wait_until(lambda: tiny_server.read_metric("lantern_images_running", model="tiny") == 0)
    assert "Traceback" not in tiny_server.log
