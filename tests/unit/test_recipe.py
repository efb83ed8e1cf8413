"""A PNG is drawn again from what it records; one that somebody tampered with is refused in one line."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from refusals import refused
from tiny_bundle import make_tiny_bundle

from lantern_rt import Pipeline, open_bundle
from lantern_rt.bundle.files import Bundle
from lantern_rt.cli.again import Again
from lantern_rt.cli.main import run_program
from lantern_rt.errors import BundleError, LanternError, RequestError
from lantern_rt.methods import PARAMETERS
from lantern_rt.output.images import png_bytes
from lantern_rt.output.recipe import HEAD_LIMIT, TEXT_LIMIT, read_recipe
from lantern_rt.requests import SAMPLING
from lantern_rt.runtime.noise import FORMAT

SETTINGS: dict[str, Any] = {
    "method": "lantern", "cfg_scale": 2.0, "temperature": 1.0, "top_k": 24, "top_p": 1.0,
    "filter_order": "top-k, top-p", "tree": "chain-3", "neighbors": 4, "residual": "aggregated", "delta": 0.2,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_bundle(tmp_path_factory.mktemp("words") / "tiny")


@pytest.fixture(scope="module")
def bundle(folder: Path) -> Bundle:
    return open_bundle(folder)


@pytest.fixture(scope="module")
def class_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_bundle(tmp_path_factory.mktemp("class") / "tiny", "class")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run `lantern-rt run --threads 1` in an empty folder; exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> tuple[int, str, str]:
        code = run_program(["run", "--threads", "1", *map(str, arguments)])
        return code, *capsys.readouterr()

    return run


def texts(bundle: Bundle, /, **other: Any) -> dict[str, str]:
    """What a picture records, but for some other chunks; None leaves one out, and `settings` may be an object."""
    own = {"prompt": "red cube", "seed": "5", "method": "lantern", "noise": FORMAT, "settings": SETTINGS}
    found = own | {"bundle": "tiny", "bundle_digest": bundle.digest} | other
    named = {name: text for name, text in found.items() if text is not None}
    return {name: text if isinstance(text, str) else json.dumps(text) for name, text in named.items()}


def picture(path: Path, texts: dict[str, str]) -> Path:
    path.write_bytes(png_bytes(Image.new("RGB", (8, 8)), texts))
    return path


# ---------------------------------------------------------------- round trip


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--method", "ar", "--temperature", "0"],
        ["--method", "auto"],
        ["--method", "eagle", "--tree", "paths.json", "--top-p", "0.9"],
        ["--method", "lantern", "--delta", "0.3", "--neighbors", "8", "--residual", "neighborhood"],
        ["--method", "lantern", "--neighbors", "0", "--omega", "2"],
        ["--method", "lantern++", "--lambda", "3", "--top-k", "0", "--omega", "2", "--anneal", "0.5"],
        ["--method", "sjd:window=4:delta=0.1", "--cfg-scale", "1"],
        ["--method", "sjd", "--seed", str(2**63 - 3)],
    ],
)
def test_a_picture_is_drawn_again_bit_by_bit(run: Any, folder: Path, tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "paths.json").write_text("[[0], [1], [0, 0]]")
    prompt = ("--prompt", "Red cube\N{HORIZONTAL ELLIPSIS} on sand", "--num-images", 3, "--output", "first/", "--json")
    code, out, _ = run("--bundle", folder, *prompt, *arguments)
    assert code == 0
    (tmp_path / "paths.json").unlink()
    _, _, last = json.loads(out)["images"]
    code, out, err = run("--bundle", folder, "--from", last["output"], "--json")
    assert (code, err.count("\n")) == (0, 1)
    (again,) = json.loads(out)["images"]
    assert again == last | {"output": f"{Path(last['output']).stem}-again.png"}
    assert Path(again["output"]).read_bytes() == Path(last["output"]).read_bytes()


def test_a_class_is_drawn_again(run: Any, class_folder: Path, tmp_path: Path) -> None:
    assert run("--bundle", class_folder, "--class-id", "7")[0] == 0
    assert run("--bundle", class_folder, "--from", "class-7-seed0.png")[0] == 0
    assert (tmp_path / "class-7-seed0-again.png").read_bytes() == (tmp_path / "class-7-seed0.png").read_bytes()


def test_an_embedded_bundle_is_found_by_the_name_in_the_picture(run: Any, tmp_path: Path) -> None:
    assert run("--prompt", "a red cube", "--method", "sjd", "--output", "a.png")[0] == 0
    assert run("--from", "a.png")[0] == 0
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "a-again.png").read_bytes()


def test_output_scale_trace_and_force_stay_free(run: Any, folder: Path, bundle: Bundle, tmp_path: Path) -> None:
    picture(tmp_path / "a.png", texts(bundle))
    again = ("--bundle", folder, "--from", "a.png", "--output", "a.png", "--trace", "a.npz", "--scale", 3)
    assert run(*again)[0] == 2
    assert run(*again, "--force")[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.npz", "a.png", "a.trace.png"]
    with Image.open(tmp_path / "a.png") as image:
        assert image.size == (72, 72)
    assert read_recipe(tmp_path / "a.png").settings == SETTINGS


# ---------------------------------------------------------------- refusals


@pytest.fixture
def refuses(run: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Expects a run to end before a graph is loaded, with one line that has these words in this order."""
    monkeypatch.setattr(Pipeline, "from_bundle", lambda *_, **__: pytest.fail("loaded a graph"))

    def refuses(arguments: list[object], *words: str) -> None:
        code, out, err = run(*arguments)
        assert (code, out, err.count("\n"), err.partition(": ")[0]) == (2, "", 1, "lantern-rt")
        with refused(LanternError, *words):
            raise LanternError(err.strip())

    return refuses


@pytest.mark.parametrize(
    "option", ["prompt", "class-id", "seed", "num-images", "method", *PARAMETERS, *SAMPLING]
)  # fmt: skip
def test_what_the_picture_says_is_not_said_again(refuses: Any, bundle: Bundle, tmp_path: Path, option: str) -> None:
    picture(tmp_path / "a.png", texts(bundle))
    option = f"--{option.replace('_', '-')}"
    value = {"--method": "ar", "--tree": "chain-2", "--residual": "aggregated", "--top-p": "1"}.get(option, "0")
    refuses(["--from", "a.png", option, value], option, "found together with --from, and a.png says", "leave one out")


def test_a_bundle_that_is_not_embedded_has_to_be_given(refuses: Any, bundle: Bundle, tmp_path: Path) -> None:
    picture(tmp_path / "a.png", texts(bundle))
    refuses(["--from", "a.png"], "a.png: was drawn by bundle 'tiny'; give the folder of that with --bundle")


def test_a_name_in_a_picture_is_never_a_path(refuses: Any, folder: Path, bundle: Bundle, tmp_path: Path) -> None:
    picture(tmp_path / "a.png", texts(bundle, bundle=str(folder)))
    refuses(["--from", "a.png"], "a.png: was drawn by bundle", "give the folder")


def test_another_bundle_of_the_same_name_is_refused(
    refuses: Any, class_folder: Path, bundle: Bundle, tmp_path: Path
) -> None:
    picture(tmp_path / "a.png", texts(bundle))
    own = open_bundle(class_folder).digest
    words = ("a.png: ", f"digest {own[:12]}", f"expected the one that drew it, 'tiny' of {bundle.digest[:12]}", "give")
    refuses(["--from", "a.png", "--bundle", class_folder], *words)
    with refused(BundleError, *words):
        Again(Path("a.png"), read_recipe(tmp_path / "a.png")).check(open_bundle(class_folder))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"seed": None}, ["text chunk seed: found nothing", "give a PNG that"]),
        ({"method": None}, ["text chunk method: found nothing"]),
        ({"settings": None}, ["text chunk settings: found nothing"]),
        ({"bundle": None}, ["text chunk bundle: found nothing"]),
        ({"bundle_digest": None}, ["text chunk bundle_digest: found nothing"]),
        ({"prompt": None}, ["found nothing to draw, expected a prompt"]),
        ({"prompt": None, "class_id": "3"}, ["found class ids, expected a prompt"]),
        ({"class_id": "3"}, ["found class ids, expected a prompt"]),
        ({"class_id": "3.5"}, ["text chunk class_id: found '3.5', expected integer"]),
        ({"prompt": "a purple cube"}, ["prompt: found unknown word 'purple'"]),
        ({"prompt": "red " * 2500}, ["prompt: found 10,000 characters"]),
        ({"prompt": "r" * (TEXT_LIMIT + 1)}, ["text chunk prompt: found 16,385 characters, expected at most 16,384"]),
        ({"prompt": "r" * HEAD_LIMIT}, ["cannot be read as a PNG with at most 65,536 bytes before its pixels"]),
        ({"seed": "five"}, ["text chunk seed: found 'five', expected integer"]),
        ({"seed": "-1"}, ["seed: found -1, expected a whole number"]),
        ({"seed": "9" * 40}, ["seed: found 9999"]),
        ({"seed": "9" * 5000}, ["text chunk seed: found '9999"]),
        ({"method": "magic"}, ["text chunk method: found 'magic', expected 'ar'"]),
        ({"method": "auto"}, ["method: found auto, expected the one that it chose"]),
        ({"method": "sjd"}, ["settings.method: found 'lantern', expected sjd"]),
        ({"bundle_digest": "0" * 63}, ["text chunk bundle_digest: found '000"]),
        ({"bundle_digest": "0" * 64}, ["found bundle", "expected the one that drew it, 'tiny' of 000000000000"]),
        ({"settings": ""}, ["text chunk settings: found '', expected JSON"]),
        ({"settings": '{"method": "lantern"'}, ["text chunk settings: found '{", "expected JSON"]),
        ({"settings": "[" * 9000}, ["text chunk settings: found '[[", "expected JSON"]),
        ({"settings": [SETTINGS]}, ["text chunk settings: found [", "expected an object"]),
        ({"settings": {}}, ["settings.method: found None, expected lantern"]),
        ({"settings": SETTINGS | {"method": "lantern:delta=0.1"}}, ["settings.method: found 'lantern:delta=0.1'"]),
        ({"settings": SETTINGS | {"method": ["lantern"]}}, ["settings.method: found ['lantern']"]),
        ({"settings": SETTINGS | {"tree": "paths.json"}}, ["settings.tree: found 'paths.json', expected the name"]),
        ({"settings": SETTINGS | {"tree": ["chain-3"]}}, ["settings.tree: found ['chain-3']"]),
        ({"settings": SETTINGS | {"tree": "oak"}}, ["no tree is called 'oak'"]),
        ({"settings": SETTINGS | {"tree": "tree-2-1"}}, ["tree 'tree-2-1' does not add up"]),
        ({"settings": SETTINGS | {"window": 4}}, ["window: method lantern does not take it"]),
        ({"settings": SETTINGS | {"delta": "0.2"}}, ["delta: found '0.2', expected number"]),
        ({"settings": SETTINGS | {"delta": float("nan")}}, ["delta: found nan"]),
        ({"settings": SETTINGS | {"delta": None}}, ["settings: 'delta': found None, expected 0.2"]),
        ({"settings": SETTINGS | {"delta": 2}}, ["delta: found 2, expected less than 1"]),
        ({"settings": SETTINGS | {"neighbors": True}}, ["neighbors: found True"]),
        ({"settings": SETTINGS | {"neighbors": 10**30}}, ["neighbors: found 1000"]),
        ({"settings": SETTINGS | {"top_k": 2.5}}, ["top_k: found 2.5"]),
        ({"settings": SETTINGS | {"top_p": {}}}, ["top_p: found {}"]),
        ({"settings": SETTINGS | {"filter_order": "top-p, top-k"}}, ["settings: 'filter_order': found 'top-p"]),
        ({"settings": SETTINGS | {"colour\x1b[2J": 1}}, ["settings: 'colour\\x1b[2J': found 1, expected nothing"]),
        (
            {"settings": {name: value for name, value in SETTINGS.items() if name != "top_k"}},
            ["settings: 'top_k': found nothing, expected 24"],
        ),
    ],
)
def test_a_record_that_was_tampered_with_is_one_line(
    refuses: Any, folder: Path, bundle: Bundle, tmp_path: Path, other: dict[str, Any], words: list[str]
) -> None:
    (tmp_path / "paths.json").mkdir()  # reading it would be another error
    picture(tmp_path / "a.png", texts(bundle, **other))
    refuses(["--bundle", folder, "--from", "a.png"], "a.png", *words)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def with_chunks(*chunks: bytes, size: tuple[int, int] = (8, 8)) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", *size, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


def jpeg() -> bytes:
    buffer = BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "JPEG")
    return buffer.getvalue()


BOMB = zlib.compress(bytes(1 << 23), 9)
HOSTILE = {
    "nothing": b"",
    "text": b"red cube",
    "a JPEG": jpeg(),
    "a signature": b"\x89PNG\r\n\x1a\n",
    "no chunks of ours": png_bytes(Image.new("RGB", (8, 8)), {}),
    "no pixels": with_chunks(size=(0, 0)),
    "many pixels": with_chunks(size=(1 << 20, 1 << 20)),
    "a chunk of 2 GiB": b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 2**31 - 1) + b"tEXtprompt\0red",
    "a large chunk": with_chunks(chunk(b"tEXt", b"prompt\0" + b"r" * (1 << 20))),
    "a compressed bomb": with_chunks(chunk(b"zTXt", b"prompt\0\0" + BOMB)),
    "an international bomb": with_chunks(chunk(b"iTXt", b"prompt\0\1\0\0\0" + BOMB)),
    "a bomb of colours": with_chunks(chunk(b"iCCP", b"icc\0\0" + BOMB)),
    "many bombs": with_chunks(*[chunk(b"zTXt", b"seed\0\0" + zlib.compress(bytes(1 << 20), 9))] * 60),
    "many chunks": with_chunks(*[chunk(b"tEXt", b"seed\x005")] * 100_000),
    "text that is not UTF-8": with_chunks(chunk(b"iTXt", b"prompt\0\0\0\0\0\xff\xfe")),
    "a text without a name": with_chunks(chunk(b"tEXt", b""), chunk(b"zTXt", b""), chunk(b"iTXt", b"")),
    "a bad checksum": with_chunks(chunk(b"tEXt", b"seed\x005")[:-1] + b"!"),
    "a broken animation": with_chunks(chunk(b"acTL", bytes(8)), chunk(b"acTL", bytes(8))),
    "Pillow's own names": with_chunks(*(chunk(b"tEXt", key + b"\0x") for key in (b"bbox", b"interlace", b"exif"))),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_one_line(refuses: Any, tmp_path: Path, name: str) -> None:
    (tmp_path / "a.png").write_bytes(HOSTILE[name])
    refuses(["--from", "a.png"], "a.png: ", "; give a PNG that `lantern-rt run` wrote")


def test_a_file_that_cannot_be_read_is_one_line(refuses: Any, tmp_path: Path) -> None:
    refuses(["--from", "no.png"], "no.png: cannot be read", "No such file")
    refuses(["--from", tmp_path], "cannot be read", "directory")
    refuses(["--from", "x" * 300], "cannot be read", "too long")


def test_pixels_are_not_looked_at_and_foreign_chunks_do_not_count(bundle: Bundle, tmp_path: Path) -> None:
    info = PngInfo()
    for name, text in texts(bundle, Comment="mine", seed="7").items():
        info.add_itxt(name, text, zip=True)
    Image.new("P", (8, 8)).save(tmp_path / "a.png", "PNG", pnginfo=info, dpi=(72, 72))
    data = (tmp_path / "a.png").read_bytes()
    (tmp_path / "a.png").write_bytes(data[: data.index(b"IDAT") + 4])
    assert read_recipe(tmp_path / "a.png").seed == 7


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file for every example of a property."""
    return tmp_path_factory.mktemp("hostile") / "a.png"


properties = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def read_or_refuse(place: Path, bundle: Bundle) -> None:
    """Whatever lies there is a request or a refusal of one line that names the file."""
    try:
        Again(place, read_recipe(place)).check(bundle)
    except (RequestError, BundleError) as error:
        with refused(type(error), str(place)):
            raise


@properties
@given(data=st.data())
def test_damaged_bytes_never_escape_as_another_error(bundle: Bundle, place: Path, data: st.DataObject) -> None:
    good = bytearray(png_bytes(Image.new("RGB", (8, 8)), texts(bundle)))
    for _ in range(data.draw(st.integers(0, 4))):
        start = data.draw(st.integers(0, len(good)))
        good[start : start + data.draw(st.integers(0, 8))] = data.draw(st.binary(max_size=8))
    place.write_bytes(bytes(good[: data.draw(st.integers(0, len(good)))]))
    read_or_refuse(place, bundle)


KINDS = b"tEXt zTXt iTXt iCCP tRNS PLTE gAMA sRGB cHRM pHYs eXIf acTL fcTL fdAT IHDR abcd".split()


@properties
@given(chunks=st.lists(st.tuples(st.sampled_from(KINDS), st.binary(max_size=40)), max_size=5))
@example(chunks=[(b"fdAT", bytes(4))])
def test_no_chunk_escapes_as_another_error(bundle: Bundle, place: Path, chunks: list[tuple[bytes, bytes]]) -> None:
    place.write_bytes(with_chunks(*(chunk(*one) for one in chunks)))
    read_or_refuse(place, bundle)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


@properties
@given(
    method=st.sampled_from(["ar", "eagle", "lantern", "lantern++", "sjd", "auto"]),
    other=st.dictionaries(st.sampled_from([*SETTINGS, *PARAMETERS, "seed", "prompts"]), json_values, max_size=3),
    left_out=st.sets(st.sampled_from(list(SETTINGS)), max_size=3),
)
def test_no_value_of_a_setting_escapes_as_another_error(
    bundle: Bundle, place: Path, method: str, other: dict[str, Any], left_out: set[str]
) -> None:
    changed = {name: value for name, value in SETTINGS.items() if name not in left_out} | {"method": method} | other
    picture(place, texts(bundle, method=method, settings=changed))
    read_or_refuse(place, bundle)
