"""Files from strangers: text cannot control a terminal, and no file blocks the program or exhausts memory."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundle_folder import read_manifest, write_bundle_manifest
from refusals import expect_error
from tiny_bundle import make_tiny_bundle

from lantern_rt import Pipeline
from lantern_rt.bundle.files import MANIFEST_FILE, Bundle, open_bundle
from lantern_rt.cli.console import print_json, print_sections, print_stderr, print_table, show_progress
from lantern_rt.compare.prompts import read_prompts
from lantern_rt.engines.engine_folder import ENGINE_FILE, open_engine_folder
from lantern_rt.engines.kv_cache import KVCache
from lantern_rt.errors import BundleError, EngineError, LanternError, RequestError, TreeError, escape_unprintable
from lantern_rt.inputs import convert_read_errors, format_value
from lantern_rt.output.recipe import read_recipe
from lantern_rt.runtime.tree_names import parse_tree
from lantern_rt.text.tokenizers import CaptionTokenizer, load_tokenizer
from lantern_rt.text.words import read_word_tokenizer

HOSTILE_TEXT = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202eevil\u2066\u200f\x7f\r"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_bundle(tmp_path / "tiny")


def change_manifest(folder: Path, **fields: Any) -> Path:
    write_bundle_manifest(folder, read_manifest(folder) | fields, rehash=False)
    return folder


def rehash_and_open(folder: Path) -> Bundle:
    """Open a bundle after updating the hashes of the files in `bundle.json`."""
    write_bundle_manifest(folder, read_manifest(folder))
    return open_bundle(folder)


def has_only_printable_text(text: str) -> bool:
    return all(character.isprintable() or character == "\n" for character in text)


# ---------------------------------------------------------------- terminal


class CountingRepr:
    """An object that counts the calls of its `repr`."""

    calls = 0

    def __repr__(self) -> str:
        CountingRepr.calls += 1
        return "part"


def test_a_long_value_is_shortened_without_formatting_all_items() -> None:
    CountingRepr.calls = 0
    many: Any = [CountingRepr()] * 10_000
    for value in (many, {"a": many}, (many, many), {i: CountingRepr() for i in range(10_000)}):
        assert format_value(value).endswith("...")
        assert len(format_value(value)) == 80
    assert CountingRepr.calls < 2000
    for _ in range(100):
        many = (many, many)
    assert len(format_value(many)) <= 80
    assert format_value([1, "a", {"b": [None, 2.5]}]) == "[1, 'a', {'b': [None, 2.5]}]"


def test_control_characters_are_escaped_but_letters_are_not() -> None:
    assert escape_unprintable("Zürich 東京\nline") == "Zürich 東京\nline"
    assert escape_unprintable("\x1b[2J\u202e\U000e0041") == "\\u001b[2J\\u202e\\U000e0041"
    assert json.loads(escape_unprintable(json.dumps({"a": "\x7f\x1b"}))) == {"a": "\x7f\x1b"}


def test_commands_print_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    print_stderr(HOSTILE_TEXT)
    print_json({HOSTILE_TEXT: HOSTILE_TEXT})
    print_sections({HOSTILE_TEXT: {HOSTILE_TEXT: HOSTILE_TEXT + "\nforged  line"}})
    print_table({"name": "{name}"}, [{"name": HOSTILE_TEXT}])
    with show_progress() as progress:
        progress(HOSTILE_TEXT)
    captured = capsys.readouterr()
    assert "evil" in captured.out
    assert "evil" in captured.err
    assert has_only_printable_text(captured.out + captured.err)
    assert not [line for line in captured.out.splitlines() if line.startswith("forged")]


def test_an_error_message_is_one_short_line() -> None:
    assert str(LanternError(f"a{HOSTILE_TEXT}\nb")).endswith(" b")
    assert has_only_printable_text(str(LanternError(HOSTILE_TEXT)))
    assert len(str(BundleError("x" * 100_158))) < 2_100


@pytest.mark.parametrize("command", [["inspect"], ["inspect", "--json"], ["run"]])
def test_control_characters_of_a_bundle_are_not_printed(folder: Path, command: list[str], program: Any) -> None:
    provenance = {"licence": HOSTILE_TEXT, "exporter": HOSTILE_TEXT}
    change_manifest(folder, name=HOSTILE_TEXT, family=HOSTILE_TEXT, provenance=provenance)
    prompt = ["red"] if command == ["run"] else []
    code, out, err = program(*command, folder, *prompt)
    assert (code, has_only_printable_text(out + err)) == (0, True)
    change_manifest(folder, files={HOSTILE_TEXT: 3}, **{HOSTILE_TEXT: HOSTILE_TEXT})
    code, out, err = program(*command, folder, *prompt)
    assert (code, has_only_printable_text(out + err), err.count("\n")) == (2, True, 1)


def test_control_characters_of_arguments_are_not_printed(program: Any) -> None:
    wrong_tree = ["run", "x y", "--method", f"eagle:tree={HOSTILE_TEXT}"]
    for words in ([HOSTILE_TEXT], ["run", f"--{HOSTILE_TEXT}"], ["inspect", HOSTILE_TEXT], wrong_tree):
        code, out, err = program(*words)
        assert (code, has_only_printable_text(out + err)) == (2, True)


# ---------------------------------------------------------------- pipes and devices


@pytest.mark.parametrize(
    "read",
    [
        read_prompts,
        read_word_tokenizer,
        read_recipe,
        lambda path: open_bundle(path.parent),
        lambda path: open_engine_folder(path.parent),
    ],
    ids=["prompts", "tokenizer", "image", "bundle", "engines"],
)
@pytest.mark.parametrize("file_type", ["pipe", "device"])
def test_pipes_and_devices_in_place_of_files_are_rejected(
    tmp_path: Path, read: Callable[[Path], object], file_type: str
) -> None:
    for name in ("file.json", MANIFEST_FILE, ENGINE_FILE):
        if file_type == "pipe":
            os.mkfifo(tmp_path / name)
        else:
            (tmp_path / name).symlink_to("/dev/zero")
    with expect_error(LanternError, str(tmp_path), "a pipe or a device, expected a regular file"):
        read(tmp_path / "file.json")


@pytest.mark.parametrize("inside", ["\u2028", "\u0085", "\x0b", "\x0c"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_prompt_files_are_split_only_at_line_ends(tmp_path: Path, inside: str, end: str) -> None:
    text = f"\ufeffa red cube{end}{end}a blue{inside}cone{end}\0"
    (tmp_path / "prompts.txt").write_bytes(text.encode())
    assert read_prompts(tmp_path / "prompts.txt") == [(1, "a red cube"), (3, f"a blue{inside}cone")]


def test_prompt_files_in_utf_16_without_a_mark_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_bytes("a red cube\n".encode("utf-16-le"))
    with expect_error(RequestError, "prompts.txt", "NUL", "in UTF-8"):
        read_prompts(tmp_path / "prompts.txt")


def test_too_large_files_are_rejected_before_they_are_read(tmp_path: Path) -> None:
    large = tmp_path / "large.json"
    with large.open("wb") as file:
        file.truncate(1 << 40)
    for read in (read_prompts, read_word_tokenizer):
        with expect_error(LanternError, f"{large}: ", "more than "):
            read(large)


# ---------------------------------------------------------------- sizes


LARGE_TREES = ["dynamic-999-99-99", "dynamic-129", "dynamic-64-33-9", "dynamic-64-9-33", "chain-33", "chain-99"]


@pytest.mark.parametrize("name", [*LARGE_TREES, "tree-zz", "tree-z-" + 35 * "3"])
def test_too_large_draft_trees_are_rejected(name: str) -> None:
    with expect_error(TreeError, "tree"):
        parse_tree(name)


def test_a_too_large_default_draft_tree_is_rejected(folder: Path) -> None:
    methods = [{"method": "eagle", "tree": "dynamic-999-99-99"}]
    change_manifest(folder, decoding={"methods": methods})
    with expect_error(BundleError, "default tree", "found 999 nodes, expected at most 128"):
        Pipeline.from_bundle(folder, threads=1)("red cube", method="eagle")


def test_a_kv_cache_larger_than_memory_is_rejected() -> None:
    need = "memory: keys and values of 64 rows of 1,000,000 tokens need"
    with expect_error(EngineError, need, "GiB", "fewer images"):
        KVCache.empty(64, 1_000_000, 1024, 1024, 1024, np.float32)


# ---------------------------------------------------------------- arrays and graphs


def make_npy_file(header: bytes, version: bytes = b"\x01\x00", data: bytes = bytes(256)) -> bytes:
    return b"\x93NUMPY" + version + len(header).to_bytes(2, "little") + header + data


def make_npy_of_shape(shape: bytes, descr: bytes = b"|u1") -> bytes:
    return make_npy_file(b"{'descr': '%s', 'fortran_order': False, 'shape': %s}\n" % (descr, shape))


@pytest.mark.parametrize(
    "damaged",
    [
        make_npy_file(b"{'descr': '|u1', 'fortran_order': False, 'shape': (32, 8"),
        make_npy_of_shape(b"(1000000000000, 8)"),
        make_npy_of_shape(b"(-32, -8)"),
        make_npy_of_shape(b"(32, 8)", b"|O"),
        make_npy_of_shape(b"(32, 8)", b"|V0"),
        make_npy_file(b"{'descr': 7, 'fortran_order': None, 'shape': '\x00'}\n"),
        make_npy_file(b"(" * 500),
        make_npy_file(b"\xff\xfe{", b"\x03\x00"),
        b"\x93NUMPY",
        b"",
    ],
)
def test_a_neighbour_table_with_a_damaged_header_is_rejected(folder: Path, damaged: bytes) -> None:
    path = folder / "neighbors.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("indices.npy", damaged)
    with expect_error(BundleError, str(path)):
        _ = rehash_and_open(folder).neighbor_table


def test_an_invalid_dimension_name_names_the_graph_file(folder: Path) -> None:
    path = folder / "condition.onnx"
    path.write_bytes(path.read_bytes().replace(b"rows", b"\xf3ows"))
    with expect_error(BundleError, f"{path}: "):
        Pipeline.from_bundle(rehash_and_open(folder), threads=1)


@pytest.mark.parametrize("damage", ["template", "bytes", "deep"])
def test_a_panicking_tokenizer_is_rejected(tmp_path: Path, damage: str, capfd: pytest.CaptureFixture[str]) -> None:
    content = json.loads((Path(__file__).parents[1] / "data/tiny-text-tokenizer/tokenizer.json").read_text())
    content["post_processor"]["special_tokens"] = {}
    texts = {"template": json.dumps(content).encode(), "bytes": b"\xff{", "deep": b"[" * 100_000}
    path = tmp_path / "tokenizer.json"
    path.write_bytes(texts[damage])
    with expect_error(BundleError, f"{path}: ", ", expected a tokenizer; "):
        CaptionTokenizer(load_tokenizer(path), None).encode("a red cube", 8)
    assert capfd.readouterr().err == ""


def test_a_panic_becomes_an_error_but_a_keyboard_interrupt_not(tmp_path: Path) -> None:
    class PanicException(BaseException):
        pass

    expected_errors = (
        (PanicException("it broke"), expect_error(BundleError, f"{tmp_path}: it broke, expected a; b")),
        (KeyboardInterrupt(), pytest.raises(KeyboardInterrupt)),
    )
    for error, expected in expected_errors:
        with expected, convert_read_errors(tmp_path, "a", BundleError, "b"):
            raise error
