"""The `lantern-rt` program: what it prints where, what it writes, how it ends."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tiny_bundle import CELL, make_tiny_bundle
from typer.testing import CliRunner

import lantern_rt
from lantern_rt import Pipeline
from lantern_rt.cli.app import app
from lantern_rt.cli.main import run_program
from lantern_rt.methods import PARAMETERS
from lantern_rt.requests import SAMPLING

STATS = ["method", "target_passes", "drafter_passes", "tokens_per_forward_pass", "accepted_lengths", "seconds",
         "target_seconds", "drafter_seconds", "host_seconds", "realised_tvd"]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_bundle(tmp_path_factory.mktemp("words") / "tiny")


@pytest.fixture(scope="module")
def class_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_bundle(tmp_path_factory.mktemp("class") / "tiny", "class")


@pytest.fixture
def run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run `lantern-rt run` in an empty folder; exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, bundle: Path = folder) -> tuple[int, str, str]:
        code = run_program(["run", "--bundle", str(bundle), "--threads", "1", *arguments])
        return code, *capsys.readouterr()

    return run


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# ---------------------------------------------------------------- run


def test_run_writes_a_png_named_after_prompt_and_seed(run: Any, folder: Path, tmp_path: Path) -> None:
    code, out, err = run("--prompt", "Red cube, on SAND!", "--seed", "5")
    assert (code, out) == (0, "red-cube-on-sand-seed5.png\n")
    numbers = r"\d\.\d\d tokens per forward pass, 1 image in [\d.]+ s \([\d.]+ s decoding codes\)"
    assert re.fullmatch(rf"auto: .*\n\w+: {numbers}\n", err)
    with Image.open(tmp_path / "red-cube-on-sand-seed5.png") as image:
        texts = dict(image.text)  # type: ignore[attr-defined]
        pixels = image.tobytes()
    result = Pipeline.from_bundle(folder, threads=1)("red cube on sand", seed=5)
    assert pixels == result.images[0].tobytes()
    assert texts["prompt"] == "Red cube, on SAND!"
    assert (texts["seed"], texts["method"]) == ("5", json.loads(texts["settings"])["method"])
    assert json.loads(texts["settings"]).items() >= result.settings.sampling.model_dump(exclude_none=True).items()
    assert texts["bundle_digest"] == Pipeline.from_bundle(folder).bundle.digest
    assert texts["Software"] == f"lantern-rt {lantern_rt.__version__}"


def test_json_is_one_object_and_all_of_stdout(run: Any, tmp_path: Path) -> None:
    code, out, _ = run("--prompt", "red cube", "--prompt", "green cube", "--num-images", "2", "--json")
    assert code == 0
    report = json.loads(out)
    assert list(report) == ["images", "stats"]
    assert list(report["stats"]) == STATS
    assert [image["seed"] for image in report["images"]] == [0, 1, 0, 1]
    assert [image["prompt"] for image in report["images"]] == ["red cube"] * 2 + ["green cube"] * 2
    assert all(list(image) == ["codes", "seed", "prompt", "output"] for image in report["images"])
    assert all(len(image["codes"]) == 36 for image in report["images"])
    assert files(tmp_path) == sorted(image["output"] for image in report["images"])


def test_class_ids_are_named_in_files_and_json(run: Any, class_folder: Path, tmp_path: Path) -> None:
    code, out, _ = run("--class-id", "3", "--class-id", "7", "--json", bundle=class_folder)
    assert code == 0
    assert [image["class_id"] for image in json.loads(out)["images"]] == [3, 7]
    assert files(tmp_path) == ["class-3-seed0.png", "class-7-seed0.png"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--method", "ar", "--temperature", "0"],
        ["--method", "eagle", "--tree", "mc-25", "--top-p", "0.9"],
        ["--method", "lantern", "--delta", "0.3", "--neighbors", "8", "--cfg-scale", "1"],
        ["--method", "lantern++", "--lambda", "3", "--top-k", "0"],
        ["--method", "sjd", "--window", "4", "--delta", "0.1"],
    ],
)
def test_options_reach_the_pipeline(run: Any, tmp_path: Path, arguments: list[str]) -> None:
    code, out, _ = run("--prompt", "red", "--output", "a.png", "--json", *arguments)
    assert code == 0
    assert json.loads(out)["stats"]["method"] == arguments[1]
    with Image.open(tmp_path / "a.png") as image:
        settings = json.loads(image.text["settings"])  # type: ignore[attr-defined]
    for name, value in zip(arguments[::2], arguments[1::2], strict=True):
        key = name[2:].replace("-", "_")
        assert str(settings[key]) in (value, f"{value}.0")


def test_scale_enlarges_the_png(run: Any, tmp_path: Path) -> None:
    assert run("--prompt", "red", "--scale", "3", "--output", "big.png")[0] == 0
    with Image.open(tmp_path / "big.png") as image:
        assert image.size == (18 * CELL, 18 * CELL)


def test_a_trace_goes_to_a_file_with_a_picture_beside_it(run: Any, tmp_path: Path) -> None:
    assert run("--prompt", "red", "--output", "red.png", "--trace", "red.npz")[0] == 0
    assert files(tmp_path) == ["red.npz", "red.png", "red.trace.png"]
    with np.load(tmp_path / "red.npz") as trace:
        assert trace["codes"].shape == (1, 36)


def test_a_new_output_folder_is_made_where_its_parent_exists(run: Any, tmp_path: Path) -> None:
    code, out, _ = run("--prompt", "red", "--num-images", "2", "--output", "new")
    assert (code, out) == (0, f"new{os.sep}red-seed0.png\nnew{os.sep}red-seed1.png\n")
    assert files(tmp_path) == ["new/red-seed0.png", "new/red-seed1.png"]


def test_the_same_prompt_twice_gives_two_files(run: Any, tmp_path: Path) -> None:
    assert run("--prompt", "red", "--prompt", "red!")[0] == 0
    assert files(tmp_path) == ["red-seed0-2.png", "red-seed0.png"]


def test_force_replaces_a_file(run: Any, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_text("old")
    assert run("--prompt", "red", "--output", "a.png", "--force")[0] == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert files(tmp_path) == ["a.png"]


def test_every_parameter_of_every_method_is_an_option() -> None:
    text = CliRunner().invoke(app, ["run", "--help"]).output
    for name, methods in PARAMETERS.items():
        (_, _, after) = text.partition(f"\n  --{name.replace('_', '-')} ")
        assert f"({', '.join(methods)})" in " ".join(after.partition("\n  --")[0].split())
    assert all(f"\n  --{name.replace('_', '-')} " in text for name in SAMPLING)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "give a prompt, or --class-id"),
        (["--prompt", ""], "prompt: found an empty one"),
        (["--prompt", "red " * 2500], "10,000 characters"),
        (["--prompt", "a purple cube"], "'purple'"),
        (["--class-id", "3"], "found class ids, expected a prompt"),
        (["--prompt", "red", "--delta", "1"], "delta: found 1"),
        (["--prompt", "red", "--delta", "nan"], "delta: found nan"),
        (["--prompt", "red", "--method", "lantern++", "--lambda", "1"], "lambda: found 1"),
        (["--prompt", "red", "--delta", ".1", "--lambda", "2"], "lambda: method lantern"),
        (["--prompt", "red", "--method", "sjd", "--delta", ".1", "--lambda", "2"], "two bounds"),
        (["--prompt", "red", "--neighbors", "9"], "neighbors: found 9"),
        (["--prompt", "red", "--tree", "oak"], "no tree is called 'oak'"),
        (["--prompt", "red", "--method", "ar", "--tree", "mc-25"], "tree: method ar does not take it; leave tree out"),
        (["--prompt", "red", "--seed", "-1"], "seed: found -1"),
        (["--prompt", "red", "--num-images", "0"], "num.images: found 0"),
        (["--prompt", "red", "--threads", "0"], "threads: found 0"),
        (["--prompt", "red", "--scale", "0"], "scale: found 0"),
        (["--prompt", "red", "--scale", "99"], "scale: found 99"),
        (["--prompt", "red", "--output", "there.png"], "there.png: found a file, expected none; .*--force"),
        (["--prompt", "red", "--output", "x" * 300], "cannot be written"),
        (["--prompt", "red", "--output", "x" * 300 + ".png"], "cannot be written"),
        (["--prompt", "red", "--trace", "x" * 300 + ".npz"], "cannot be written"),
        (["--prompt", "red", "--output", "red.jpg"], r"found the ending \.jpg"),
        (["--prompt", "red", "--output", "no/such/red.png"], "found no folder"),
        (["--prompt", "red", "--output", "no/such/"], "found no folder"),
        (["--prompt", "red", "--output", "there.png/x.png"], "found no folder|cannot be written"),
        (["--prompt", "red", "--num-images", "2", "--output", "a.png"], "one file name for 2 images"),
        (["--prompt", "red", "--trace", "t.txt"], r"expected \.npz"),
        (["--prompt", "red", "--trace", "no/t.npz"], "found no folder"),
        (["--prompt", "red", "--output", "t.trace.png", "--trace", "t.npz"], "an image and a trace"),
        (["--prompt", "red", "--seed", "x"], "--seed.*lantern-rt run --help"),
        (["--prompt", "red", "--colour"], "No such option"),
        (["--prompt", "red", "--bundle", "nowhere"], "bundle 'nowhere'"),
    ],
)
def test_bad_input_is_one_line_on_stderr_and_exit_code_2(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], reason: str
) -> None:
    (tmp_path / "there.png").write_text("mine")
    monkeypatch.setattr(Pipeline, "stream", lambda *_: pytest.fail("started to decode"))
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("lantern-rt: ")
    assert err.count("\n") == 1
    assert re.search(reason, err)
    assert files(tmp_path) == ["there.png"]
    assert (tmp_path / "there.png").read_text() == "mine"


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder that nobody can write to")
def test_an_unwritable_folder_is_found_before_decoding(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pipeline, "stream", lambda *_: pytest.fail("started to decode"))
    for arguments in (["--output", "/proc/red.png"], ["--output", "/proc"], ["--trace", "/proc/red.npz"]):
        code, _, err = run("--prompt", "red", *arguments)
        assert code == 2
        assert "cannot be written" in err
        assert err.count("\n") == 1


def test_a_damaged_bundle_is_one_line(run: Any, folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "target.onnx").write_bytes((folder / "target.onnx").read_bytes()[:-7])
    code, _, err = run("--prompt", "red", bundle=copy)
    assert code == 2
    assert err.count("\n") == 1
    assert "target.onnx" in err


# ---------------------------------------------------------------- interruption


def test_an_interrupted_write_leaves_no_file(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    code, out, err = run("--prompt", "red", "--output", "new/")
    assert (code, out) == (130, "")
    assert err == "lantern-rt: interrupted; no file was left half-written\n"
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_line_and_leaves_no_file(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    code, _, err = run("--prompt", "red")
    assert code == 2
    assert "red-seed0.png: cannot be written (No space left on device)" in err
    assert files(tmp_path) == []


def test_a_file_that_appears_while_decoding_is_not_replaced(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Pipeline.stream

    def slow_stream(*arguments: Any, **options: Any) -> Any:
        (tmp_path / "red-seed0.png").write_text("mine")
        return stream(*arguments, **options)

    monkeypatch.setattr(Pipeline, "stream", slow_stream)
    code, _, err = run("--prompt", "red")
    assert code == 2
    assert "appeared meanwhile" in err
    assert (tmp_path / "red-seed0.png").read_text() == "mine"
    assert files(tmp_path) == ["red-seed0.png"]
