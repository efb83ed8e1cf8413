"""Forms with files: read as they were written, however they come; hostile ones are refused at once."""

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
from running_server import EDITS, FORM, RunningServer, form, head, until

from lantern_rt.serve.forms import MAX_PARTS, FormReader
from lantern_rt.serve.protocol import EditRequest, HttpError

TEXT = 1 << 16  # bytes of a field
IMAGE = b'--x\r\ncontent-disposition: form-data; name="image"'
LARGE = 8 << 20


def read(body: bytes, content_type: str = FORM, sizes: tuple[int, ...] = (1 << 16,)) -> EditRequest:
    """What a form of these bytes asks for, which come in pieces of these sizes, again and again."""
    reader = FormReader(content_type, TEXT)
    at = i = 0
    while at < len(body):
        reader.write(body[at : at + sizes[i % len(sizes)]])
        at += sizes[i % len(sizes)]
        i += 1
    return reader.request()


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
    found = read(form(fields), sizes=sizes)
    assert (found.image, found.mask) == (fields["image"], fields.get("mask") or None)
    assert (found.prompt, found.n) == (prompt or None, 2)


def test_an_empty_part_is_one_left_out() -> None:
    empty = dict.fromkeys({*EditRequest.model_fields} - {"image"}, b"")
    assert read(form({"image": b"P", **empty})) == read(form({"image": b"P"}))
    assert error_of(HttpError, read, form({"image": b"", "prompt": b"red"})).field == "image"


def test_names_headers_and_boundaries_are_read_as_clients_write_them() -> None:
    body = b"--a b\r\nContent-Type: image/png\r\n"
    body += b'Content-Disposition: form-data; filename="a;\\"b"; name=image[]\r\n\r\nP\r\n'
    body += b'--a b\r\ncontent-disposition: form-data; name="seed"; filename="seed.txt"\r\n\r\n7\r\n--a b--and more'
    found = read(body, 'multipart/form-data; charset=utf-8; Boundary="a b"')
    assert (found.image, found.seed) == (b"P", 7)


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        (IMAGE + b'; x="' + b";" * (LARGE // 2), 400, "body"),
        (IMAGE + b"\r\na: b" * 100_000, 400, "body"),
        (IMAGE + b"\r\n" + b"a" * LARGE, 400, "body"),
        (b"--x\r\n" + b"a: b\r\n" * 5 + b"\r\n", 400, "body"),
        (IMAGE + b"\r\n\r\n" + b"\r\n--xy" * 100_000, 400, "body"),
        (IMAGE + b"\r\n\r\n\r\n--x" + b" " * LARGE, 400, "body"),
        (form({f"f{i}": b"" for i in range(MAX_PARTS + 1)}), 400, "body"),
        (form({"image": b"P"})[:-4], 400, "body"),
        (b"--x\r\n\r\n--x--", 400, "body"),
        (b"--x\r\ncontent-disposition: form-data\r\n\r\n\r\n--x--", 400, "body"),
        (b"no form", 400, "body"),
        (b"", 400, "body"),
        (form({"image": b"P", "prompt": bytes(TEXT + 1)}), 413, "prompt"),
        (form({"prompt": b"red"}), 400, "image"),
        (form({"image": b"P"})[:-7] + form({"image[]": b"P"}), 400, "image"),
        (form({"image": b"P", "strength": b"1"}), 400, "strength"),
        (form({"image": b"P", "n": b"0"}), 400, "n"),
    ],
    ids=range(17),
)
@pytest.mark.parametrize("sizes", [(1 << 16,), (1 << 16, 1)])
def test_what_is_wrong_with_a_form_is_named(body: bytes, status: int, field: str, sizes: tuple[int, ...]) -> None:
    error = error_of(HttpError, read, body, sizes=sizes)
    assert (error.status, error.field) == (status, field)
    assert len(str(error)) < 300


@pytest.mark.parametrize(
    "content_type", ["multipart/form-data", "multipart/form-data; boundary=", f"{FORM}{'x' * 300}"]
)
def test_a_form_has_a_boundary(content_type: str) -> None:
    assert error_of(HttpError, read, form({"image": b"P"}), content_type).field == "body"


def test_hostile_forms_hold_up_nobody_and_a_server_that_was_sent_some_ends(
    start: Callable[..., RunningServer], tiny_folder: Path
) -> None:
    server = start(tiny_folder, "--threads", 1)
    hostile = IMAGE + b'; x="' + b";" * 1_000_000
    for _ in range(6):
        server.connect(head(EDITS, FORM, len(hostile)) + hostile).close()
    assert server.post({"prompt": "red cube"})[0] == 200
    with server.connect(head(EDITS, FORM, 2 * LARGE) + hostile) as unread:
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
whole = st.builds(lambda some: b"".join(some) + b"--x--\r\n", st.lists(parts, max_size=8))
mutated = st.builds(
    lambda body, seed, count: bytes(mutate(bytearray(body), random.Random(seed), count)),
    whole,
    st.integers(0, 2**32),
    st.integers(1, 4),
)
bodies = whole | mutated | st.binary(max_size=300)
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


def answer(server: RunningServer, content_type: str, body: bytes, leave: bool) -> int | None:
    """The status of a form's response, which has to come within the server's time for bodies; None to who leaves."""
    with server.connect(head(EDITS, content_type, len(body)) + body[: len(body) // 2]) as connection:
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
        statuses.add(answer(tiny, content_type, body, leave))

    check()
    assert statuses <= {None, 200, 400, 413, 415}
    assert 400 in statuses
    assert tiny.post({"prompt": "red cube"})[0] == 200
    until(lambda: tiny.metric("lantern_images_running", model="tiny") == 0)
    assert "Traceback" not in tiny.log
