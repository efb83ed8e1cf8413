"""`run --from`: generate an image again from the settings recorded in the PNG; reject damaged records."""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from lantern_rt import Pipeline, open_bundle
from lantern_rt.bundle.files import Bundle
from lantern_rt.cli.replay import png_contains_image
from lantern_rt.output.formats import PNG
from lantern_rt.output.images import attach_recipe
from lantern_rt.output.recipe import TEXT_LIMIT, TEXTS_LIMIT, read_recipe
from lantern_rt.requests import check_request
from lantern_rt.runtime.noise import FORMAT
from lantern_rt.text.tokenizers import load_bundle_tokenizer

SETTINGS: dict[str, Any] = {
    "method": "lantern", "cfg_scale": 2.0, "temperature": 1.0, "top_k": 24, "top_p": 1.0,
    "filter_order": "top-k, top-p", "tree": "chain-3", "neighbors": 4, "residual": "aggregated", "delta": 0.2,
}  # fmt: skip


@pytest.fixture(scope="module")
def bundle(words_bundle: Path) -> Bundle:
    return open_bundle(words_bundle)


def make_record(bundle: Bundle, /, **changes: Any) -> dict[str, str]:
    """Return the PNG text chunks that record an image, by name; None removes a chunk."""
    defaults = {"prompt": "red cube", "seed": "5", "method": "lantern", "noise": FORMAT, "settings": SETTINGS}
    chunks = defaults | {"bundle": "tiny", "bundle_digest": bundle.digest} | changes
    chunks = {name: text for name, text in chunks.items() if text is not None}
    return {name: text if isinstance(text, str) else json.dumps(text) for name, text in chunks.items()}


def write_png(path: Path, texts: dict[str, str]) -> Path:
    path.write_bytes(PNG.encode_image(attach_recipe(Image.new("RGB", (8, 8)), texts)))
    return path


# ---------------------------------------------------------------- round trip


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--method", "ar", "--temperature", "0"],
        ["--method", "eagle:tree=tree-2-10", "--top-p", "0.9"],
        ["--method", "lantern:delta=0.3:neighbors=8:residual=neighborhood"],
        ["--method", "lantern++:lambda=3", "--top-k", "0"],
        ["--method", "sjd:window=4:delta=0.1", "--cfg-scale", "1"],
        ["--method", "ar", "--negative-prompt", "green sphere"],
        ["--method", "sjd", "--seed", str(2**64 - 3)],
        ["--method", "sjd", "--cfg-tokens", "12"],
        ["--method", "sjd", "--min-p", "0.1"],
        ["--method", "lantern++", "--cfg-tokens", "33.3%"],
    ],
)
def test_run_from_a_png_generates_the_same_file_again(program: Any, words_bundle: Path, arguments: list[str]) -> None:
    prompt = ("Red cube\N{HORIZONTAL ELLIPSIS} on sand", "--count", 3, "--output", "first/", "--json")
    code, out, _ = program("run", words_bundle, *prompt, *arguments)
    assert code == 0
    *_, last_image = json.loads(out)["images"]
    code, out, _ = program("run", words_bundle, "--from", last_image["output"], "--json")
    assert code == 0
    (repeated_image,) = json.loads(out)["images"]
    assert repeated_image == last_image | {"output": f"{Path(last_image['output']).stem}-again.png"}
    assert Path(repeated_image["output"]).read_bytes() == Path(last_image["output"]).read_bytes()


def test_run_from_repeats_images_of_classes_and_embedded_prompts(program: Any, class_bundle: Path) -> None:
    assert program("run", class_bundle, "--class-id", 7, "--seed", 0)[0] == 0
    assert program("run", class_bundle, "--from", "class-7-seed0.png")[0] == 0
    assert Path("class-7-seed0-again.png").read_bytes() == Path("class-7-seed0.png").read_bytes()
    assert program("run", "a red cube", "--method", "rows", "--output", "a.png")[0] == 0
    assert program("run", "--from", "a.png")[0] == 0
    assert Path("a-again.png").read_bytes() == Path("a.png").read_bytes()


def test_run_from_accepts_output_scale_trace_and_force(program: Any, words_bundle: Path, bundle: Bundle) -> None:
    write_png(Path("a.png"), make_record(bundle))
    command = (words_bundle, "--from", "a.png", "--output", "a.png", "--trace", "a.npz", "--scale", 3)
    assert program("run", *command)[0] == 2
    assert program("run", *command, "--force")[0] == 0
    assert sorted(path.name for path in Path().iterdir()) == ["a.npz", "a.png"]
    with Image.open("a.png") as image:
        assert image.size == (72, 72)
    assert read_recipe(Path("a.png")).settings == SETTINGS


# ---------------------------------------------------------------- rejected records


@pytest.fixture
def expect_rejection(program: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that checks that `run`, without loading a graph, writes one line with `a.png` and words."""
    monkeypatch.setattr(Pipeline, "from_bundle", lambda *_, **__: pytest.fail("loaded a graph"))

    def check(arguments: list[object], words: str) -> None:
        code, out, err = program("run", *arguments)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith("lantern-rt: ")
        assert "a.png" in err
        assert words in err

    return check


@pytest.mark.parametrize(
    "options", [("--class-id", 3), ("--seed", 0), ("--count", 2), ("--method", "ar"), ("--top-p", 1)]
)
def test_settings_that_the_png_records_are_rejected_as_options(
    expect_rejection: Any, bundle: Bundle, options: tuple[str, object]
) -> None:
    write_png(Path("a.png"), make_record(bundle))
    expect_rejection(["--from", "a.png", *options], f"{options[0]}: is recorded in a.png already")


def test_a_path_in_the_png_is_not_opened(
    expect_rejection: Any, words_bundle: Path, class_bundle: Path, bundle: Bundle
) -> None:
    write_png(Path("a.png"), make_record(bundle, bundle=str(words_bundle)))
    expect_rejection(["--from", "a.png"], "a.png: was generated by bundle")
    expect_rejection([class_bundle, "--from", "a.png"], f"digest {open_bundle(class_bundle).digest[:12]}")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": None}, "text chunk seed: found nothing"),
        ({"bundle_digest": None}, "text chunk bundle_digest: found nothing"),
        ({"prompt": None}, "found nothing to generate"),
        ({"class_id": "3"}, "found class ids"),
        ({"class_id": "9" * 4000}, "found class ids"),
        ({"class_id": "9" * 5000}, "text chunk class_id: found '999"),
        ({"token_ids": "9" * 5000}, "text chunk token_ids: found '999"),
        ({"class_id": "3.5"}, "text chunk class_id: found '3.5'"),
        ({"edit": "0" * 64}, "a.png: records an edit of another image, which it does not contain"),
        ({"prompt": None, "embedding": "0" * 64}, "a.png: records a hash of text embeddings"),
        ({"prompt": "a purple cube"}, "prompt: found unknown word 'purple'"),
        ({"prompt": "red " * 2500}, "found 10,000 characters"),
        ({"prompt": "r" * (TEXT_LIMIT + 1)}, f"text chunk prompt: found {TEXT_LIMIT + 1:,} characters"),
        ({"prompt": "r" * TEXTS_LIMIT}, f"cannot be read as a PNG with at most {TEXTS_LIMIT:,} bytes of texts"),
        ({"seed": "five"}, "text chunk seed: found 'five'"),
        ({"seed": "-1"}, "seed: found -1"),
        ({"seed": "9" * 5000}, "text chunk seed: found '9999"),
        ({"method": "magic"}, "text chunk method: found 'magic'"),
        ({"method": "sjd"}, "settings.method: found 'lantern', expected sjd"),
        ({"bundle_digest": "0" * 63}, "text chunk bundle_digest: found '000"),
        ({"bundle_digest": "0" * 64}, "expected the bundle that generated it, 'tiny' with 000000000000"),
        ({"settings": '{"method": "lantern"'}, "text chunk settings: found '{"),
        ({"settings": "[" * 9000}, "text chunk settings: found '[["),
        ({"settings": [SETTINGS]}, "text chunk settings: found ["),
        ({"settings": SETTINGS | {"method": ["lantern"]}}, "settings.method: found ['lantern']"),
        ({"settings": SETTINGS | {"tree": "paths.json"}}, "tree: found 'paths.json'"),
        ({"settings": SETTINGS | {"tree": ["chain-3"]}}, "tree: found \"['chain-3']\""),
        ({"settings": SETTINGS | {"tree": "oak"}}, "oak"),
        ({"settings": SETTINGS | {"window": 4}}, "window: method lantern does not take it"),
        ({"settings": SETTINGS | {"delta": "0.2"}}, "'delta': found '0.2', expected 0.2"),
        ({"settings": SETTINGS | {"delta": float("nan")}}, "delta: found nan"),
        ({"settings": SETTINGS | {"delta": None}}, "delta: found 'None'"),
        ({"settings": SETTINGS | {"neighbors": 10**30}}, "neighbors: found 1000"),
        ({"settings": SETTINGS | {"top_p": {}}}, "top_p: found {}"),
        ({"settings": SETTINGS | {"filter_order": "top-p, top-k"}}, "settings: 'filter_order': found 'top-p"),
        ({"settings": SETTINGS | {"colour\x1b[2J": 1}}, "settings: 'colour\\x1b[2J': found 1, expected nothing"),
    ],
)
def test_an_altered_record_is_rejected(
    expect_rejection: Any, words_bundle: Path, bundle: Bundle, changes: dict[str, Any], words: str
) -> None:
    Path("paths.json").mkdir()  # reading this path would fail with a different error
    write_png(Path("a.png"), make_record(bundle, **changes))
    expect_rejection([words_bundle, "--from", "a.png"], words)


def make_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def make_png(*chunks: bytes, size: tuple[int, int] = (8, 8)) -> bytes:
    header = make_chunk(b"IHDR", struct.pack(">IIBBBBB", *size, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + make_chunk(b"IDAT", b"") + make_chunk(b"IEND", b"")


BOMB = zlib.compress(bytes(1 << 23), 9)  # 8 MiB when decompressed
HOSTILE_FILES = {
    "an empty file": b"",
    "a text file": b"red cube",
    "a PNG without text chunks": PNG.encode_image(Image.new("RGB", (8, 8))),
    "no pixels": make_png(size=(0, 0)),
    "many pixels": make_png(size=(1 << 20, 1 << 20)),
    "a chunk of 2 GiB": b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 2**31 - 1) + b"tEXtprompt\0red",
    "a compressed bomb": make_png(make_chunk(b"zTXt", b"prompt\0\0" + BOMB)),
    "a bomb of colours": make_png(make_chunk(b"iCCP", b"icc\0\0" + BOMB)),
    "many bombs": make_png(*[make_chunk(b"zTXt", b"seed\0\0" + zlib.compress(bytes(1 << 20), 9))] * 60),
    "many chunks": make_png(*[make_chunk(b"tEXt", b"seed\x005")] * 100_000),
    "text that is not UTF-8": make_png(make_chunk(b"iTXt", b"prompt\0\0\0\0\0\xff\xfe")),
    "a text without a name": make_png(make_chunk(b"tEXt", b""), make_chunk(b"zTXt", b""), make_chunk(b"iTXt", b"")),
    "a broken animation": make_png(make_chunk(b"acTL", bytes(8)), make_chunk(b"acTL", bytes(8))),
    "names in Pillow": make_png(*(make_chunk(b"tEXt", key + b"\0x") for key in (b"bbox", b"interlace", b"exif"))),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE_FILES)
def test_a_file_without_a_record_is_rejected(expect_rejection: Any, name: str) -> None:
    Path("a.png").write_bytes(HOSTILE_FILES[name])
    expect_rejection(["--from", "a.png"], "; give a PNG that `lantern-rt run` wrote")


def test_a_path_that_cannot_be_read_is_rejected(program: Any, tmp_path: Path) -> None:
    for name, words in (("no.png", "No such file"), (tmp_path, "directory"), ("x" * 300, "too long")):
        code, _, err = program("run", "--from", name)
        assert (code, err.count("\n"), "cannot be read" in err, words in err) == (2, 1, True, True)


def test_a_record_is_read_beside_other_chunks(bundle: Bundle, tmp_path: Path) -> None:
    info = PngInfo()
    for name, text in make_record(bundle, Comment="mine", seed="7").items():
        info.add_itxt(name, text, zip=True)
    Image.new("P", (8, 8)).save(tmp_path / "a.png", "PNG", pnginfo=info, dpi=(72, 72))
    data = (tmp_path / "a.png").read_bytes()
    (tmp_path / "a.png").write_bytes(data[: data.index(b"IDAT") + 4])
    assert read_recipe(tmp_path / "a.png").seed == 7


def split_png(data: bytes) -> list[bytes]:
    chunks = []
    start = 8
    while start < len(data):
        # Length, type and checksum have 4 bytes each.
        end = start + 12 + int.from_bytes(data[start : start + 4])
        chunks.append(data[start:end])
        start = end
    return chunks


def test_a_record_is_read_before_or_after_the_pixels(bundle: Bundle, tmp_path: Path) -> None:
    path = write_png(tmp_path / "a.png", make_record(bundle))
    header, *records, pixels, end = split_png(path.read_bytes())
    expected = read_recipe(path)
    large_chunk = make_chunk(b"tEXt", b"workflow\0" + b"x" * (2 * TEXTS_LIMIT))
    with_large_chunk = ([header, large_chunk, *records, pixels, end], [header, *records, pixels, large_chunk])
    for order in ([header, pixels, *records, end], *with_large_chunk):
        path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(order))
        assert read_recipe(path) == expected


def test_an_edit_reads_the_prompt_after_the_pixels(tmp_path: Path) -> None:
    path = write_png(tmp_path / "a.png", {"prompt": "a red cube"})
    header, text, pixels, end = split_png(path.read_bytes())
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + header + pixels + text + end)
    scenes = open_bundle("scenes", verify=False)
    request = check_request(scenes.manifest, load_bundle_tokenizer(scenes), {"image": path, "keep_rows": 8})
    assert request.images[0].subject.label == "a red cube"


def test_an_image_of_another_exact_method_is_reused(bundle: Bundle, words_bundle: Path, tmp_path: Path) -> None:
    with Pipeline.from_bundle(words_bundle, threads=1) as pipe:
        (image,) = pipe("red cube", method="ar").images
    path = tmp_path / "cube.png"
    path.write_bytes(PNG.encode_image(image))
    tokenizer = load_bundle_tokenizer(bundle)
    eagle = check_request(bundle.manifest, tokenizer, {"prompts": "red cube", "method": "eagle"})
    target = bundle.manifest.target.model_copy(update={"precision": "int8-weights"})
    dequantized = replace(bundle, manifest=bundle.manifest.model_copy(update={"target": target}))
    assert png_contains_image(bundle, eagle, 1, 0, path)
    assert not png_contains_image(dequantized, eagle, 1, 0, path)
    strict = check_request(bundle.manifest, tokenizer, {"prompts": "red cube"})
    assert png_contains_image(dequantized, strict, 1, 0, path)
