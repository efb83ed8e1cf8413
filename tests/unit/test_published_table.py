"""Published models: the table in README, checks before a download, the cache of bundles, and rejected commands."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from refusals import catch_error
from tiny_bundle import make_tiny_bundle

from lantern_rt import published
from lantern_rt.errors import LanternError, OutputError
from lantern_rt.export.registry import check_family_options
from lantern_rt.inputs import make_install_command
from lantern_rt.text.words import ANY_WORDS

ROOT = Path(__file__).parents[2]
NAME = "llamagen-c2i-b-256"


def test_the_table_in_the_readme_has_the_sizes_of_published_models() -> None:
    sizes = [
        (f"{model.download_bytes / 1e9:.1f}", f"{model.memory_bytes / 1e9:.1f}")
        for model in published.load_published_models().values()
    ]
    table = (ROOT / "README.md").read_text("utf-8").partition("Model | pixels")[2].partition("\n\n")[0]
    rows = [[re.findall(r"\d+\.\d", cell) for cell in line.split(" | ")[2:]] for line in table.splitlines()[2:]]
    assert len(rows) > 5
    for downloads, memory in rows:
        assert set(zip(downloads * len(memory), memory, strict=False)) <= set(sizes)


def test_the_suggested_models_download_size_is_the_tables() -> None:
    name, size = re.findall(r"lantern-rt run (\S+) .*at most ([\d.]+) GB", ANY_WORDS)[0]
    assert float(size) == round(published.find_published_model(name).download_bytes / 1e9, 1)


def test_model_names_in_the_docs_are_published() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    text = "\n".join(page.read_text("utf-8") for page in pages)
    names = re.findall(r"lantern-rt (?:run|serve|export) ((?:llamagen|janus|emu3|simplear|anole|lumina)\S*)", text)
    assert len(names) > 3
    assert set(names) <= published.load_published_models().keys()


@pytest.mark.parametrize("name", published.load_published_models())
def test_models_name_prints_facts_and_commands(program: Any, host: pytest.MonkeyPatch, name: str) -> None:
    model = published.find_published_model(name)
    code, out, _ = program("models", name)
    assert code == 0
    assert f"licence          {model.licence}\n" in out
    assert f"\nlantern-rt run {name} " in out
    assert ("lantern-rt serve" in out) == model.makes_images
    (row,) = json.loads(program("models", name, "--json")[1])["models"]
    assert (row["name"], row["memory_bytes"]) == (name, model.memory_bytes)


@pytest.mark.parametrize("name", published.load_published_models())
def test_published_models_have_the_options_of_their_family(name: str) -> None:
    pytest.importorskip("torch")
    model = published.find_published_model(name)
    check_family_options(model.family, model.export_options)
    assert model.repositories
    assert model.download_bytes > 1e8
    assert model.memory_bytes > model.parameters  # int8


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Make a simulated host with enough memory, disk space and libraries for every model; return the patches."""
    monkeypatch.setenv("LANTERN_RT_CACHE", str(tmp_path))
    monkeypatch.setattr("lantern_rt.engines.host.available_memory", lambda: 1 << 40)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: path.stat() and SimpleNamespace(free=1 << 50))
    monkeypatch.setattr(published, "require_library", lambda *_: None)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    return monkeypatch


def change_table_row(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> None:
    """Replace the table of published models by one row: the model `NAME`, with other values of some fields."""
    row = published.find_published_model(NAME).model_copy(update=fields)
    monkeypatch.setattr(published, "load_published_models", lambda: {NAME: row})


def check_host() -> None:
    published.check_host_requirements(NAME, published.find_bundle_source(NAME))


def get_host_error(name: str) -> str:
    with pytest.raises(LanternError) as error:
        published.check_host_requirements(name, published.find_bundle_source(name))
    return str(error.value)


def test_missing_memory_or_disk_is_an_error_before_downloading(host: pytest.MonkeyPatch, tmp_path: Path) -> None:
    check_host()
    assert get_host_error("llamagen").endswith("`lantern-rt models` lists the names")
    host.setattr("lantern_rt.engines.host.available_memory", lambda: 2 << 30)
    remedy = "close other programs, or use a smaller model or precision"
    assert get_host_error(NAME) == f"memory: found 2.1 GB free, expected 2.2 GB; {remedy}"
    host.setattr("lantern_rt.engines.host.available_memory", lambda: 1 << 40)
    host.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))  # on the disk of the bundles
    host.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 30))
    assert "found 1.07 GB free on the disk, expected 1.46 GB; free some, or use another disk" in get_host_error(NAME)


def test_a_login_error_says_where_to_accept_the_terms(host: pytest.MonkeyPatch) -> None:
    change_table_row(host, login=True)
    remedy = "accept the terms at https://huggingface.co/FoundationVision/LlamaGen, then run `hf auth login`"
    assert get_host_error(NAME) == f"{NAME}: the hub asks for a login; {remedy}"
    host.setattr("huggingface_hub.get_token", lambda: "token")
    check_host()


def test_a_missing_pytorch_names_the_installing_command(host: pytest.MonkeyPatch) -> None:
    host.undo()
    host.setattr("importlib.util.find_spec", lambda _: None)
    assert get_host_error(NAME) == f"export: torch is not installed; run `{make_install_command('cpu,export')}`"


def test_the_cache_holds_different_bundles_for_cpu_and_gpu(host: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert published.choose_default_precision() == "int8"
    host.setattr(published, "detect_provider", lambda _: "cuda")
    assert published.choose_default_precision() == "fp16"
    make_tiny_bundle(tmp_path / f"{NAME}@int8")
    assert published.find_cached_bundle(NAME) is None
    make_tiny_bundle(tmp_path / f"{NAME}@fp16")
    assert published.find_cached_bundle(NAME) == tmp_path / f"{NAME}@fp16"


def make_file(cache: Path) -> None:
    cache.write_text("not a folder")


def make_symlink_to_itself(cache: Path) -> None:
    cache.symlink_to(cache)


@pytest.mark.parametrize("make_unusable", [make_file, make_symlink_to_itself])
def test_an_unwritable_cache_is_an_error_before_downloading(
    host: pytest.MonkeyPatch, tmp_path: Path, make_unusable: Callable[[Path], None]
) -> None:
    cache = tmp_path / "cache"
    make_unusable(cache)
    host.setenv("LANTERN_RT_CACHE", str(cache))
    error = catch_error(OutputError, check_host)
    assert (error.field, error.remedy) == (f"{cache}/{NAME}@int8", "set LANTERN_RT_CACHE to another folder")


def test_an_unreadable_cache_is_an_error_before_downloading(host: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make_symlink_to_itself(tmp_path / "hub")
    host.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    error = catch_error(OutputError, check_host)
    assert (error.field, error.remedy[:11]) == (str(tmp_path / "hub"), "set HF_HOME")


@pytest.mark.parametrize("arguments", [["models"], ["inspect", NAME], ["run", NAME]])
@pytest.mark.parametrize("cache_path", ["x" * 300, "/".join(["y" * 200] * 30)])
def test_commands_report_an_unreadable_bundle_cache(
    program: Any, host: pytest.MonkeyPatch, arguments: list[str], cache_path: str
) -> None:
    host.setenv("LANTERN_RT_CACHE", f"/{cache_path}")
    code, _, err = program(*arguments, *(["--class-id", "3"] if arguments[0] == "run" else []))
    assert (code, err.count("\n")) == (2, 1)
    assert "cannot be read (File name too long), expected a folder of bundles; set LANTERN_RT_CACHE" in err


def test_without_a_home_folder_listing_bundles_is_an_error(host: pytest.MonkeyPatch) -> None:
    for name in ("LANTERN_RT_CACHE", "XDG_CACHE_HOME"):
        host.delenv(name, raising=False)
    host.setattr("os.path.expanduser", lambda path: path)
    assert catch_error(OutputError, published.find_cached_bundle, NAME).found == "no home folder"


@pytest.mark.parametrize(
    ("cache_path", "expected_path"), [("cache/below", "cache"), ("cache", "cache"), ("link", "cache")]
)
def test_free_space_is_measured_on_the_disk_of_the_cache(
    host: pytest.MonkeyPatch, tmp_path: Path, cache_path: str, expected_path: str
) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "cache")
    host.setenv("LANTERN_RT_CACHE", str(tmp_path / cache_path))
    measured_paths: list[Path] = []

    def disk_usage(path: Path) -> SimpleNamespace:
        measured_paths.append(path)
        return SimpleNamespace(free=1 << 50)

    host.setattr(shutil, "disk_usage", disk_usage)
    check_host()
    assert measured_paths[-1] == tmp_path / expected_path


TEXT_MODEL = "simplear-0.5b-sft"  # has prompts and several image sizes
CODES_MODEL = "glm-image-9b"  # has no image decoder: writes codes
# Options of `run` that are rejected, by a word of the error message.
WRONG_OPTIONS = {
    "--method": "--method bogus",
    "window": "--method sjd:window=999",
    "lambda": "--method lantern++:lambda=0.5",
    "tree": "--method lantern++:tree=oak",
    "method eagle": "--method eagle",
    "--quality": "--quality ''",
    "nowhere": "--output nowhere/image.png",
    "image.gif": "--output image.gif",
    "trace": "--trace trace.png",
    "no-engines": "--engines no-engines",
}
WRONG_VALUES = "--size 5x5, --temperature -1, --repetition-penalty 1e-300, --cfg-tokens half, --seed -1, --count 0"
WRONG_VALUES += ", --threads 0, --provider bogus, --negative-prompt blur"
WRONG_OPTIONS |= {option.split()[0]: option for option in WRONG_VALUES.split(", ")}
WRONG_SERVE_VALUES = "--alias x, --map-size 1024x1024=5x5, --batch 0, --waiting -1, --cors nonsense, --methods other"
WRONG_COMMANDS: list[tuple[str, str]] = [
    *((field, f"run {NAME} --class-id 3 {option}") for field, option in WRONG_OPTIONS.items()),
    ("nothing to generate", f"run {NAME}"),
    ("--class-id: found 1000, expected a whole number 0 .. 999", f"run {NAME} --class-id 1000"),
    ("class id 2 of 2: found -1", f"run {NAME} --class-id 3 --class-id -1"),
    ("found a prompt, expected class ids", f"run {NAME} 'a red cube'"),
    ("prompt: found class ids", f"run {TEXT_MODEL} --class-id 3"),
    ("--size", f"run {TEXT_MODEL} 'a red cube' --size large"),
    ("--scale", f"run {CODES_MODEL} 'a red cube' --scale 2"),
    ("none.png", f"run {NAME} --from none.png"),
    *((option.split()[0], f"serve {NAME} {option}") for option in WRONG_SERVE_VALUES.split(", ")),
    ("--provider", f"serve {NAME} --provider bogus"),
    ("bundles", f"serve {NAME} {NAME}"),
    ("no-keys", f"serve {NAME} --api-key-file no-keys"),
    ("no-engines", f"serve {NAME} --engines no-engines"),
]


@pytest.mark.parametrize(("field", "command"), WRONG_COMMANDS)
def test_a_wrong_option_is_rejected_before_downloading(
    program: Any, host: pytest.MonkeyPatch, tmp_path: Path, field: str, command: str
) -> None:
    host.chdir(tmp_path)
    host.setattr(published, "check_host_requirements", lambda *_, **__: pytest.fail("a download begins"))
    code, _, err = program(*shlex.split(command), "--yes")
    assert (code, err.count("\n"), field in err) == (2, 1, True), err


@pytest.mark.parametrize(
    "command",
    [
        f"run {NAME} --class-id 3 --size 256x256 --method sjd:window=5:lambda=1.5 --count 2",
        f"run {NAME} --class-id 3 --output image.png --quality fast --cfg-tokens 50%",
        f"run {TEXT_MODEL} 'a red cube' --size 512x512 --method sjd:delta=0.2 --negative-prompt blur",
        "run anole-7b 'a red cube' --method lantern:delta=0.1 --trace trace.npz",
        f"run {CODES_MODEL} 'a red cube' --output codes.npz",
        f"run {NAME} --class-id 3 --codes --output codes.npz",
        f"serve {CODES_MODEL}",
        f"serve {NAME} {TEXT_MODEL} --alias x={TEXT_MODEL} --map-size 2048x2048=512x512 --batch 4",
    ],
)
def test_a_valid_command_asks_before_the_download(
    program: Any, host: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    host.chdir(tmp_path)
    host.setattr(published, "check_host_requirements", lambda *_, **__: None)
    code, _, err = program(*shlex.split(command))
    assert (code, "--yes: found no terminal to ask in" in err) == (2, True), err
