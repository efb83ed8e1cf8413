"""Check forms with files: read as they were written, in pieces of any size; hostile forms are rejected at once."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import error_of
from running_server import EDITS, FORM, RunningServer, format_form, format_head, wait_until

from lantern_rt.serve.forms import MAX_PARTS, FormBodyParser
from lantern_rt.serve.protocol import EditRequest, HttpError

TEXT = 1 << 16  # bytes of a field
IMAGE = b'--x\r\ncontent-disposition: form-data; name="image"'
LARGE = 8 << 20


def parse_form(body: bytes, content_type: str = FORM, sizes: tuple[int, ...] = (1 << 16,)) -> EditRequest:
    """Return the request in a form whose bytes come in pieces of these sizes, repeated in turn."""
    reader = FormBodyParser(content_type, TEXT)
    position = i = 0
    while position < len(body):
        reader.write(body[position : position + sizes[i % len(sizes)]])
        position += sizes[i % len(sizes)]
        i += 1
    return reader.parse_request()


pieces = st.lists(st.sampled_from([b"\r\n", b"--", b"-", b"x", b"\r", b"\n", b"\0", b"\r\n-", b"\r\n--"]), max_size=30)


@settings(max_examples=60, deadline=None)
@given(
    st.builds(b"".join, pieces),
    st.none() | st.binary(max_size=200),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=50),
    st.lists(st.integers(1, 40), min_size=1, max_size=5).map(tuple),
)
def test_a_form_is_read_as_it_was_written_whatever_its_pieces(
    image: bytes, mask: bytes | None, prompt: str, sizes: tuple[int, ...]
) -> None:
    fields = {"image": b"P" + image.replace(b"\r\n--x", b"\r\n--y"), "prompt": prompt.encode(), "n": b"2"}
    fields |= {} if mask is None else {"mask": mask.replace(b"\r\n--x", b"\r\n--y")}
    request = parse_form(format_form(fields), sizes=sizes)
    assert (request.image, request.mask) == (fields["image"], fields.get("mask") or None)
    assert (request.prompt, request.n) == (prompt or None, 2)


def test_an_empty_part_is_one_left_out() -> None:
    empty = dict.fromkeys({*EditRequest.model_fields} - {"image"}, b"")
    assert parse_form(format_form({"image": b"P", **empty})) == parse_form(format_form({"image": b"P"}))
    assert error_of(HttpError, parse_form, format_form({"image": b"", "prompt": b"red"})).field == "image"


def test_names_headers_and_boundaries_are_read_as_clients_write_them() -> None:
    body = b"--a b\r\nContent-Type: image/png\r\n"
    body += b'Content-Disposition: form-data; filename="a;\\"b"; name=image[]\r\n\r\nP\r\n'
    body += b'--a b\r\ncontent-disposition: form-data; name="seed"; filename="seed.txt"\r\n\r\n7\r\n--a b--and more'
    request = parse_form(body, 'multipart/form-data; charset=utf-8; Boundary="a b"')
    assert (request.image, request.seed) == (b"P", 7)


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        (IMAGE + b'; x="' + b";" * (LARGE // 2), 400, "body"),
        (IMAGE + b"\r\na: b" * 100_000, 400, "body"),
        (IMAGE + b"\r\n" + b"a" * LARGE, 400, "body"),
        (b"--x\r\n" + b"a: b\r\n" * 5 + b"\r\n", 400, "body"),
        (IMAGE + b"\r\n\r\n" + b"\r\n--xy" * 100_000, 400, "body"),
        (IMAGE + b"\r\n\r\n\r\n--x" + b" " * LARGE, 400, "body"),
        (format_form({f"f{i}": b"" for i in range(MAX_PARTS + 1)}), 400, "body"),
        (format_form({"image": b"P"})[:-4], 400, "body"),
        (b"--x\r\n\r\n--x--", 400, "body"),
        (b"--x\r\ncontent-disposition: form-data\r\n\r\n\r\n--x--", 400, "body"),
        (b"no form", 400, "body"),
        (b"", 400, "body"),
        (format_form({"image": b"P", "prompt": bytes(TEXT + 1)}), 413, "prompt"),
        (format_form({"prompt": b"red"}), 400, "image"),
        (format_form({"image": b"P"})[:-7] + format_form({"image[]": b"P"}), 400, "image"),
        (format_form({"image": b"P", "strength": b"1"}), 400, "strength"),
        (format_form({"image": b"P", "n": b"0"}), 400, "n"),
    ],
    ids=range(17),
)
@pytest.mark.parametrize("sizes", [(1 << 16,), (1 << 16, 1)])
def test_what_is_wrong_with_a_form_is_named(body: bytes, status: int, field: str, sizes: tuple[int, ...]) -> None:
    error = error_of(HttpError, parse_form, body, sizes=sizes)
    assert (error.status, error.field) == (status, field)
    assert len(str(error)) < 300


@pytest.mark.parametrize(
    "content_type", ["multipart/form-data", "multipart/form-data; boundary=", f"{FORM}{'x' * 300}"]
)
def test_a_form_has_a_boundary(content_type: str) -> None:
    assert error_of(HttpError, parse_form, format_form({"image": b"P"}), content_type).field == "body"


def test_hostile_forms_hold_up_nobody_and_a_server_that_was_sent_some_ends(
    start: Callable[..., RunningServer], tiny_folder: Path
) -> None:
    server = start(tiny_folder, "--threads", 1)
    hostile = IMAGE + b'; x="' + b";" * 1_000_000
    for _ in range(6):
        server.connect(format_head(EDITS, FORM, len(hostile)) + hostile).close()
    assert server.post({"prompt": "red cube"})[0] == 200
    with server.connect(format_head(EDITS, FORM, 2 * LARGE) + hostile) as unread:
        assert unread.recv(12) == b"HTTP/1.1 413"
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
    assert "Traceback" not in server.log


# ---------------------------------------------------------------- random bodies

names = st.sampled_from(
    [b"image", b"image[]", b"mask", b"prompt", b"n", b"seed", b"stream", b"keep_rows", b"", b"\xff"]
)
values = st.binary(max_size=80) | st.sampled_from([b"1", b"red cube", b"true", b"\x89PNG\r\n\x1a\n", b"a" * 70_000])
headers = st.sampled_from(
    [
        b"content-type: image/png",
        b"content-transfer-encoding: base64",
        b"content-transfer-encoding: quoted-printable",
        b"content-transfer-encoding: nonsense",
        b"a" * 5000 + b": b",
        b"no header",
        b": empty",
        b"a:\0",
    ]
)
parts = st.builds(
    lambda name, value, more: (
        b"\r\n".join([b"--x", b'content-disposition: form-data; name="%s"' % name, *more])
        + b"\r\n\r\n"
        + value
        + b"\r\n"
    ),
    names,
    values,
    st.lists(headers, max_size=3),
)
well_formed = st.builds(lambda some: b"".join(some) + b"--x--\r\n", st.lists(parts, max_size=8))
mutated = st.builds(
    lambda body, seed, count: bytes(mutate(bytearray(body), random.Random(seed), count)),
    well_formed,
    st.integers(0, 2**32),
    st.integers(1, 4),
)
bodies = well_formed | mutated | st.binary(max_size=300)
types = st.sampled_from([FORM, FORM, FORM, 'multipart/form-data; boundary="x"', "multipart/form-data", "text/plain"])


def mutate(body: bytearray, rng: random.Random, count: int) -> bytearray:
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


def send_form(server: RunningServer, content_type: str, body: bytes, leave: bool) -> int | None:
    """Return the status of the response to a form, which must come in time; None if the client leaves."""
    with server.connect(format_head(EDITS, content_type, len(body)) + body[: len(body) // 2]) as connection:
        if leave:
            return None
        connection.settimeout(20)
        with suppress(ConnectionError):  # it was refused before all of it was there
            connection.sendall(body[len(body) // 2 :])
        return int(connection.recv(1 << 16).split()[1])


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_every_form_is_answered(count: int, tiny: RunningServer) -> None:
    statuses: set[int | None] = set()

    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=[*HealthCheck])
    @given(types, bodies, st.sampled_from([False, False, False, True]))
    def check(content_type: str, body: bytes, leave: bool) -> None:
        statuses.add(send_form(tiny, content_type, body, leave))

    check()
    assert statuses <= {None, 200, 400, 413, 415}
    assert 400 in statuses
    assert tiny.post({"prompt": "red cube"})[0] == 200
    wait_until(lambda: tiny.metric("lantern_images_running", model="tiny") == 0)
    assert "Traceback" not in tiny.log
