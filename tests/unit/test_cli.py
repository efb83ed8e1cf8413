"""The `lantern-rt` program: its output, the files that it writes, the input that it rejects, and its help."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

import lantern_rt
from lantern_rt import Pipeline
from lantern_rt.cli.app import COMMANDS, app
from lantern_rt.inputs import make_install_command
from lantern_rt.output.formats import IMAGE_FORMATS, find_format
from lantern_rt.output.names import choose_output_paths, make_slug
from lantern_rt.text.words import ANY_WORDS

Image.init()
# Before 11.3, and on some platforms, Pillow has no AVIF.
INSTALLED_FORMATS = [each for each in IMAGE_FORMATS.values() if each.name.upper() in Image.SAVE]
STATS_KEYS = ["method", "target_passes", "drafter_passes", "tokens_per_forward_pass", "accepted_lengths", "seconds",
              "target_seconds", "drafter_seconds", "host_seconds", "realised_tvd"]  # fmt: skip


def list_files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# ---------------------------------------------------------------- run


def test_run_writes_a_png_named_after_prompt_and_seed(program: Any, words_bundle: Path, tmp_path: Path) -> None:
    code, out, err = program("run", words_bundle, "Red cube, on SAND!", "--seed", 5)
    assert (code, out) == (0, "red-cube-on-sand-seed5.png\n")
    assert re.search(r"^sjd:window=7 \(strict\): \d\.\d\d tokens per pass, 1 image in [\d.]+ s, seed 5\n", err)
    with Image.open(tmp_path / "red-cube-on-sand-seed5.png") as image:
        texts = dict(image.text)  # type: ignore[attr-defined]
        pixels = image.tobytes()
    pipeline = Pipeline.from_bundle(words_bundle, threads=1)
    result = pipeline("red cube on sand", seed=5)
    assert pixels == result.images[0].tobytes()
    assert (texts["prompt"], texts["seed"]) == ("Red cube, on SAND!", "5")
    assert json.loads(texts["settings"])["method"] == texts["method"]
    assert texts["bundle_digest"] == pipeline.bundle.digest
    assert texts["Software"] == f"lantern-rt {lantern_rt.__version__}"


def test_run_with_the_option_json_prints_a_single_json_object(program: Any, words_bundle: Path, tmp_path: Path) -> None:
    code, out, _ = program("run", words_bundle, "red cube", "green cube", "--count", 2, "--seed", 0, "--json")
    report = json.loads(out)
    assert (code, list(report), list(report["stats"])) == (0, ["images", "stats"], STATS_KEYS)
    assert [image["seed"] for image in report["images"]] == [0, 1, 0, 1]
    assert [image["prompt"] for image in report["images"]] == ["red cube"] * 2 + ["green cube"] * 2
    assert all(list(image) == ["codes", "seed", "prompt", "output"] for image in report["images"])
    assert all(len(image["codes"]) == 36 for image in report["images"])
    assert list_files(tmp_path) == sorted(image["output"] for image in report["images"])


def test_class_ids_are_in_file_names_and_the_json_output(program: Any, class_bundle: Path, tmp_path: Path) -> None:
    code, out, _ = program("run", class_bundle, "--class-id", 3, "--class-id", 7, "--seed", 0, "--json")
    assert code == 0
    assert [image["class_id"] for image in json.loads(out)["images"]] == [3, 7]
    assert list_files(tmp_path) == ["class-3-seed0.png", "class-7-seed0.png"]


def test_run_with_more_threads_than_cores_prints_a_note(
    program: Any, words_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lantern_rt.engines.host.count_usable_cores", lambda: 1)
    code, _, err = program("run", words_bundle, "red", "--threads", 2)
    assert (code, err.splitlines()[0]) == (0, "note: --threads 2 on 1 core; one per core is faster")


def test_an_existing_image_is_not_generated_again(
    program: Any, words_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("run", words_bundle, "red cube", "--seed", 0, "--output", "out/")
    first_line, second_line, third_line = (f"out{os.sep}red-cube-seed{name}.png\n" for name in ("0", "1", "0-2"))
    assert program(*command)[:2] == (0, first_line)
    existing_bytes = (tmp_path / "out" / "red-cube-seed0.png").read_bytes()
    code, out, err = program(*command, "--count", 2)
    assert (code, out) == (0, first_line + second_line)
    assert err.startswith("1 of 2 images exist already; --force generates them again\n")
    assert "1 image in" in err
    assert program(*command, "--method", "rows")[:2] == (0, third_line)
    for options in (["--scale", 2], ["--top-k", 3]):
        assert program(*command, *options)[1] not in (first_line, third_line)
    assert (tmp_path / "out" / "red-cube-seed0.png").read_bytes() == existing_bytes
    assert json.loads(program(*command, "--json")[1])["images"][0]["output"] == first_line.strip()
    assert (tmp_path / "out" / "red-cube-seed0.png").read_bytes() == existing_bytes
    assert program(*command, "--method", "eagle", "--count", 1)[1] == first_line  # an exact method, so the same image
    assert program(*command, "--force", "--method", "rows")[1] == first_line
    assert (tmp_path / "out" / "red-cube-seed0.png").read_bytes() != existing_bytes
    monkeypatch.setattr(Pipeline, "from_bundle", lambda *_, **__: pytest.fail("loaded a graph"))
    assert program(*command, "--method", "rows", "--count", 1)[1] == first_line


@pytest.mark.parametrize("suffix", [suffix for each in INSTALLED_FORMATS for suffix in each.suffixes])
def test_the_ending_of_the_output_selects_the_format(program: Any, words_bundle: Path, suffix: str) -> None:
    command = ("run", words_bundle, "red cube", "--seed", 0, "--scale", 2, "--output", f"cube{suffix.upper()}")
    code, out, err = program(*command)
    assert (code, out) == (0, f"cube{suffix.upper()}\n"), err
    with Image.open(out.strip()) as image:
        assert image.format is not None
        assert (image.format.lower(), image.size) == (find_format(Path(suffix[1:] + suffix)).name, (48, 48))
    code, out, err = program(*command)  # only PNG files show that they hold the image
    assert (code, "none; give another name, or --force" in err) == ((0, False) if suffix == ".png" else (2, True))


def test_a_format_without_codec_is_rejected(program: Any, words_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(Image.SAVE, "AVIF", raising=False)
    monkeypatch.setattr(Pipeline, "from_bundle", lambda *_, **__: pytest.fail("loaded a graph"))
    code, _, err = program("run", words_bundle, "red cube", "--output", "cube.avif")
    assert (code, err.count("\n")) == (2, 1)
    assert re.search(r"cube\.avif: Pillow [\d.]+ is installed without AVIF; use png, or", err)


def test_run_accepts_prompts_as_options(program: Any, words_bundle: Path, tmp_path: Path) -> None:
    prompts = ("--prompt", "red cube", "--prompt", "green")
    assert program("run", words_bundle, *prompts, "--method", "ar", "--seed", 0)[0] == 0
    assert list_files(tmp_path) == ["green-seed0.png", "red-cube-seed0.png"]


def test_short_options_and_a_trace(program: Any, words_bundle: Path, tmp_path: Path) -> None:
    code, _, err = program("run", words_bundle, "red", "-o", "red.png", "--trace", "red.npz")
    assert (code, "trace: red.npz" in err) == (0, True)
    assert program("run", words_bundle, "red", "-n", 2, "--seed", 1)[0] == 0
    assert list_files(tmp_path) == ["red-seed1.png", "red-seed2.png", "red.npz", "red.png"]


def test_output_paths_with_the_same_file_name_are_numbered(tmp_path: Path) -> None:
    (tmp_path / "red-2.png").touch()
    outputs = choose_output_paths(str(tmp_path), ["red", "red", "blue"], False)
    assert outputs == [(tmp_path / name, False) for name in ("red.png", "red-3.png", "blue.png")]
    assert make_slug("A red cube, " * 9) == "a-red-cube-a-red-cube-a-red-cube-a-red-cube-a-red-cube-a-red"
    assert (make_slug("w" * 99), make_slug("\N{SNOWMAN}")) == ("w" * 60, "image")


def test_runs_first_argument_is_a_bundle_only_if_one_exists(program: Any, words_bundle: Path) -> None:
    assert program("run", "a red sphere on sand", "--seed", 4)[:2] == (0, "a-red-sphere-on-sand-seed4.png\n")
    Path("red").mkdir()
    os.symlink(words_bundle, "cube")
    assert program("run", "cube", "red", "--seed", 0)[:2] == (0, "red-seed0.png\n")


# ---------------------------------------------------------------- rejected input


@pytest.mark.parametrize(("subject", "value"), [("--class-id", 3), ("--prompt", "red cube"), ("--from", "own.png")])
def test_an_argument_beside_a_prompt_option_is_a_missing_bundle(
    program: Any, words_bundle: Path, subject: str, value: object
) -> None:
    assert program("run", words_bundle, "red cube", "--output", "own.png")[0] == 0
    code, _, err = program("run", "bundels/none", subject, value)
    assert (code, err.startswith("lantern-rt: bundels/none: neither a folder nor the repository")) == (2, True), err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "found bundle BUNDLE and nothing to generate; give a prompt"),
        ([""], "prompt: found"),
        (["red " * 2500], "prompt: found 10,000 characters"),
        (["a purple cube"], "prompt: found unknown word 'purple'"),
        (["a", "red", "cube"], "prompt: found the single word 'a' among 3"),
        (["bundles/none", "a red cube"], "prompt: found the single word 'bundles/none' among 2"),
        (["--class-id", "3"], "prompt: found class ids, expected a prompt"),
        (["red", "--method", "lantern:delta=1"], "delta: found 1"),
        (["red", "--method", "lantern:delta=nan"], "delta: found nan"),
        (["red", "--method", "sjd:delta=.1:lambda=2"], ".*two bounds"),
        (["red", "--method", "lantern:tree=oak"], ".*oak"),
        (["red", "--method", "ar:tree=mc-25"], "tree: method ar does not take it"),
        (["red", "--method", "sjd:win=3"], "--method: found 'win=3' in 'sjd:win=3', .*; did you mean window\\?"),
        (["red", "--quality", "perfect"], "--quality: found 'perfect'"),
        (["red", "--cfg-scale", "-1"], "--cfg-scale: found -1"),
        (["red", "--seed", "-1"], "--seed: found -1"),
        (["red", "--count", "0"], "--count: found 0, expected a whole number 1 .. 1024"),
        (["red", "--threads", "0"], ".*threads: found 0"),
        (["red", "--scale", "99"], "--scale: found 99"),
        (["red", "--from", "a.png"], "prompt: is recorded in a.png already"),
        (["red", "--output", "there.png"], "there.png: found a file, expected none; .*--force"),
        (["red", "--output", "x" * 300], "x+: cannot be written"),
        (["red", "--trace", "x" * 300 + ".npz"], "x+.npz: cannot be written"),
        (["red", "--output", "red.gif"], r"red.gif: found the ending \.gif, expected a \.png, .* file or a folder"),
        (["red", "--output", "red.npz"], r"red.npz: found the ending \.npz"),
        (["red", "--codes", "--output", "red.jpg"], r"red.jpg: .* ending \.jpg, expected a \.npz file or a folder"),
        (["red", "--output", "no/such/red.png"], "no/such/red.png: found no folder"),
        (["red", "--output", "/proc/red.png"], "/proc/red.png: cannot be written"),
        (["red", "--count", "2", "--output", "a.png"], "a.png: found one file name for 2 images"),
        (["red", "--trace", "t.txt"], r"trace t.txt: found the ending .txt, expected \.npz"),
        (["red", "--codes", "--output", "t.npz", "--trace", "t.npz"], "trace t.npz: is the path of an image, too"),
        (["red", "--count", "x"], "--count: found 'x', expected a whole number; see `lantern-rt run --help`"),
        (["red", "--colour"], "--colour: no such option; see `lantern-rt run --help`"),
        (["red", "--num-inference-steps", "20"], "--num-inference-steps: .*tokens, not steps"),
        (["red", "--temprature", "1"], ".*did you mean --temperature"),
    ],
)
def test_run_rejects_invalid_input_with_one_line(
    program: Any, words_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], reason: str
) -> None:
    (tmp_path / "there.png").write_text("mine")
    monkeypatch.setattr(Pipeline, "decode", lambda *_: pytest.fail("started to decode"))
    code, out, err = program("run", words_bundle, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert re.match(f"lantern-rt: {reason.replace('BUNDLE', str(words_bundle))}", err), err
    assert list_files(tmp_path) == ["there.png"]
    assert (tmp_path / "there.png").read_text() == "mine"


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(28, "No space left on device"), 2, ".*No space left on device"),
    ],
)
def test_a_failed_write_of_an_image_leaves_no_file(
    program: Any, words_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    error: BaseException, code: int, reason: str,
) -> None:  # fmt: skip
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(os, "replace", fail)
    result, out, err = program("run", words_bundle, "red", "--output", "new/", "--method", "sjd")
    assert (result, out) == (code, "")
    assert re.match(f"lantern-rt: {reason}", err.splitlines()[-1])
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_appears_during_decoding_is_not_replaced(
    program: Any, words_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = Pipeline.decode

    def decode_slowly(*arguments: Any) -> Any:
        (tmp_path / "red-seed0.png").write_text("mine")
        return decode(*arguments)

    monkeypatch.setattr(Pipeline, "decode", decode_slowly)
    code, _, err = program("run", words_bundle, "red", "--seed", 0)
    assert (code, "created by another program" in err) == (2, True)
    assert (tmp_path / "red-seed0.png").read_text() == "mine"
    assert list_files(tmp_path) == ["red-seed0.png"]


def test_an_invalid_prompt_names_the_three_most_similar_prompts(program: Any) -> None:
    code, _, err = program("run", "a red dog on sand")
    assert (code, err.count("\n")) == (2, 1)
    suggestions = re.findall(r"'([^']{12,})'", err.partition("similar valid prompts: ")[2])
    assert len(suggestions) == 3
    assert any("on sand" in prompt for prompt in suggestions)
    assert f"; {ANY_WORDS}; " in err


@pytest.mark.parametrize("edit", [False, True])
def test_without_a_seed_a_random_seed_is_printed_and_recorded(program: Any, words_bundle: Path, edit: bool) -> None:
    Image.linear_gradient("L").save("own.png")
    command = ("edit", "own.png", "a red cube", "--keep-rows", 12) if edit else ("run", words_bundle, "red")
    seeds = []
    for _ in range(2):
        code, out, err = program(*command, "--method", "sjd")
        seeds.append(int(re.findall(r", seed (\d+)$", err, re.MULTILINE)[0]))
        assert (code, f"seed{seeds[-1]}.png" in out) == (0, True)
        with Image.open(out.strip()) as image:
            assert image.info["seed"] == str(seeds[-1])
    assert seeds[0] != seeds[1]
    code, out, err = program(*command, "--method", "sjd", "--seed", seeds[0])
    assert (code, "exist" in err) == (0, True)


def test_edit_regenerates_only_transparent_pixels(program: Any, words_bundle: Path) -> None:
    image = Image.linear_gradient("L").convert("RGBA")
    image.paste((0, 0, 0, 0), (0, 0, 32, 16))
    image.save("own.png")
    command = ("edit", "own.png", "--prompt", "a red cube on sand", "--seed", 2)
    assert program(*command)[:2] == (0, "own-edit-seed2.png\n")
    with Image.open("own-edit-seed2.png") as edited:
        assert edited.getpixel((200, 200)) == image.getpixel((200, 200))[:3]
    assert "exists already" in program(*command)[2]
    assert "give that image to `lantern-rt edit`" in program("run", "--from", "own-edit-seed2.png")[2]
    assert "no image encoder" in program("edit", "own.png", words_bundle, "--prompt", "red cube")[2]


def test_the_command_edit_generates_the_pipelines_images(program: Any) -> None:
    Image.linear_gradient("L").save("own.png")
    command = ("edit", "own.png", "--prompt", "a red cube on sand", "--keep-rows", 12, "--count", 2, "--seed", 0)
    code, output, err = program(*command, "--method", "sjd:window=3")
    assert (code, output) == (0, "own-edit-seed0.png\nown-edit-seed1.png\n")
    assert err.startswith("sjd:window=3")
    pipeline = Pipeline.from_bundle("scenes")
    result = pipeline.edit("own.png", prompts="a red cube on sand", keep_rows=12, num_images=2)
    for name, image in zip(output.split(), result.images, strict=True):
        with Image.open(name) as written:
            assert written.tobytes() == image.tobytes()
    assert "exist already" in program(*command)[2]
    for option, value in (("--count", 0), ("--count", 2000), ("--keep-rows", 99), ("--quality", "odd")):
        assert program(*command, option, value)[0] == 2


# ---------------------------------------------------------------- other commands, and help


def test_the_help_of_export_names_every_model_family(program: Any) -> None:
    from lantern_rt.export.registry import FAMILIES

    described = program("export", "--help")[1].partition("Family: ")[2].partition("[default")[0]
    assert re.findall(r"[a-z0-9_]{3,}", described) == [*FAMILIES]


def test_inspect_prints_a_summary_words_or_the_manifest(program: Any, words_bundle: Path, class_bundle: Path) -> None:
    code, out, _ = program("inspect", words_bundle)
    assert (code, out.splitlines()[0]) == (0, "tiny")
    assert re.search(r"^  tokens +36 per image, of 32$", out, re.MULTILINE)
    lines = program("inspect", "scenes")[1].splitlines()
    assert [line for line in lines if len(line) > 80 and not line.startswith("  folder ")] == []
    assert program("inspect", words_bundle, "--words")[1].split()[:3] == ["a", "cube", "green"]
    assert json.loads(program("inspect", words_bundle, "--json")[1])["manifest"]["name"] == "tiny"
    assert re.search(r"^  takes +class ids 0 \.\. \d+$", program("inspect", class_bundle)[1], re.MULTILINE)
    code, _, err = program("inspect", class_bundle, "--words")
    assert (code, err.partition(" found")[0]) == (2, "lantern-rt: --words:")


@pytest.mark.parametrize(
    ("command", "library", "extras"),
    [
        (["export", "--target", "a.pt", "--vq", "b.pt", "--output", "out"], "torch", "cpu,export"),
        (["serve", "scenes"], "uvicorn", "serve"),
    ],
)
def test_a_missing_library_names_the_extras_to_install(
    program: Any, monkeypatch: pytest.MonkeyPatch, command: list[str], library: str, extras: str
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == library else find(name))
    code, _, err = program(*command)
    line = f"lantern-rt: {command[0]}: {library} is not installed; run `{make_install_command(extras)}`"
    assert (code, err.strip()) == (2, line)


TRAINING_COMMANDS = [["train-drafter", step] for step in ("data", "fit")]
# The help says count, batch, token and image instead of these words.
DISCOURAGED_WORDS = r"--(num-images|images|together)\b|(?<!--)\bcodes\b|\bpictures?\b|\banew\b"


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS), *TRAINING_COMMANDS])
def test_help_texts_have_examples_and_fit_80_columns(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "80"})
    assert [line for line in result.output.splitlines() if len(line) > 80 and "'{" not in line] == []
    assert result.exit_code == 0
    assert re.search(DISCOURAGED_WORDS, result.output, re.IGNORECASE) is None
    assert f"  lantern-rt {' '.join(command)}" in result.output.partition("Examples:\n")[2]


def test_the_program_prints_help_or_its_version(program: Any) -> None:
    assert program()[1] == program("--help")[1]
    assert program("--version")[:2] == (0, f"lantern-rt {lantern_rt.__version__}\n")


NO_SEED = "--seed: found 'random', expected a whole number; without it, a random seed "


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["run", "a red cube", "--seed", "random"], NO_SEED),
        (["edit", "a.png", "--seed", "random"], NO_SEED),
        (["run", "a red cube", "--top-p", "most"], "--top-p: found 'most', expected a number"),
        (["run", "--class-id", "3.5"], "--class-id: found '3.5', expected a whole number"),
        (["bench", "--count", "few"], "--count: found 'few', expected a whole number"),
        (["serve", "--port", "http"], "--port: found 'http', expected a whole number"),
        (["run", "a red cube", "--size", "512"], "--size: found '512', expected 256x256; --scale 2 "),
    ],
)
def test_an_invalid_option_value_is_named_with_the_expected(program: Any, arguments: list[str], line: str) -> None:
    code, _, err = program(*arguments)
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith(f"lantern-rt: {line}")


@pytest.mark.parametrize("arguments", [["dance"], ["run", "--seed"], ["train-drafter", "dance"]])
def test_wrong_usage_is_rejected_with_one_line(program: Any, arguments: list[str]) -> None:
    code, _, err = program(*arguments)
    assert (code, err.count("\n"), "--help" in err) == (2, 1, True)


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's record of peak memory")
@pytest.mark.parametrize(
    ("arguments", "unneeded"),
    [
        (["--help"], {"numpy", "pydantic", "torch", "onnx", "onnxruntime", "scipy"}),
        (["run", "a red sphere", "--threads", "1"], {"torch", "onnx", "scipy", "matplotlib", "ftfy"}),
    ],
)
def test_commands_import_no_unneeded_libraries(tmp_path: Path, arguments: list[str], unneeded: set[str]) -> None:
    code = (
        "import sys; from lantern_rt.cli.main import run_program; "
        f"print(run_program({arguments!r}), *({unneeded!r} & set(sys.modules))); "
        "print(open('/proc/self/status').read())"
    )
    process = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "\n0\n" in process.stdout
    assert int(re.findall(r"VmHWM:\s+(\d+) kB", process.stdout)[0]) < 400 * 1024
