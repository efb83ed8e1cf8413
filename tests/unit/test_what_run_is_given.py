"""What `run` draws: a prompt without an option, a bundle before it, embeddings from a file; and its help."""

from __future__ import annotations

import json
import os
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tiny_bundle import CAPTION, PREFIX, make_tiny_bundle
from typer.testing import CliRunner

from lantern_rt import Pipeline
from lantern_rt.cli.app import app
from lantern_rt.cli.main import run_program
from lantern_rt.text import embeddings as embeddings_module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_bundle(tmp_path_factory.mktemp("words") / "tiny")


@pytest.fixture(scope="module")
def class_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_bundle(tmp_path_factory.mktemp("class") / "tiny", "class")


@pytest.fixture(scope="module")
def embeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_bundle(tmp_path_factory.mktemp("embeds") / "tiny", "embeddings")


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run `lantern-rt` in an empty folder; exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def program(*arguments: object) -> tuple[int, str, str]:
        code = run_program([*map(str, arguments), "--threads", "1"])
        return code, *capsys.readouterr()

    return program


def states(prompts: int = 3, tokens: int = PREFIX) -> dict[str, Any]:
    values = np.random.default_rng(1).normal(size=(prompts, tokens, CAPTION)).astype(np.float32)
    return {"embeddings": values, "mask": np.arange(tokens) < np.array([[2], [tokens], [1]])[:prompts]}


# ---------------------------------------------------------------- words without an option


def test_a_word_without_an_option_is_the_prompt_and_a_bundle_may_come_before_it(
    program: Any, folder: Path, class_folder: Path
) -> None:
    assert program("run", folder, "red cube")[:2] == (0, "red-cube-seed0.png\n")
    assert program("run", "green cube", "--bundle", folder)[:2] == (0, "green-cube-seed0.png\n")
    out = program("run", folder, "red", "--prompt", "green")[1]
    assert out.splitlines() == ["red-seed0.png", "green-seed0.png"]
    assert program("run", class_folder, "--class-id", "3")[:2] == (0, "class-3-seed0.png\n")


def test_the_embedded_bundle_is_drawn_from_by_its_name_or_without_it(program: Any) -> None:
    one, two = "a red sphere on sand", "a blue cube on grass"
    assert program("run", one)[:2] == (0, "a-red-sphere-on-sand-seed0.png\n")
    assert program("run", "scenes", two)[:2] == (0, "a-blue-cube-on-grass-seed0.png\n")


def test_what_a_folder_in_the_way_is_called_is_a_prompt_unless_it_is_a_bundle(program: Any, folder: Path) -> None:
    Path("red").mkdir()
    assert program("run", "red", "--bundle", folder)[0] == 0
    os.symlink(folder, "cube")
    assert program("run", "cube", "green")[:2] == (0, "green-seed0.png\n")
    assert program("run", "cube", "--bundle", folder)[:2] == (0, "cube-seed0.png\n")  # the option is the bundle


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ((), "found nothing to draw; give a prompt, or --class-id or --embeddings where a bundle takes those"),
        (("scenes",), "found bundle scenes and nothing to draw; give a prompt"),
        (("a", "red", "sphere"), "--prompt: found 'a' and 'red', expected a bundle's folder or name and one prompt in"),
        (("bundles/none", "red"), "--prompt: found 'bundles/none' and 'red', expected a bundle's folder or name"),
        (("scenes", "a", "red"), "--prompt: found 'a' and 'red'"),
        (("",), "--prompt: found an empty one"),
        (("x" * 5000,), "--prompt: found 5,000 characters, expected at most"),
        (("red", "--num-images", "0"), "--num-images: found 0, expected a whole number 1 .. 1024"),
        (("red", "--seed", "-1"), "--seed: found -1"),
        (("red", "--cfg-scale", "-1"), "--cfg-scale: found -1"),
        (("red", "--method", "lantern++", "--lambda", "1"), "--lambda: found 1"),
        (("red", "--class-id", "3"), "found class ids, expected a prompt"),
        (("red", "--from", "a.png"), "--prompt: found together with --from"),
    ],
)
def test_what_cannot_be_meant_is_one_line_that_names_the_option(program: Any, words: Any, reason: str) -> None:
    code, out, err = program("run", *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"lantern-rt: {reason}")


def test_other_commands_name_their_options_too(program: Any, folder: Path) -> None:
    Path("prompts.txt").write_text("red\ngreen\n")
    for command, reason in (
        (("bench", folder, "--images", "0"), "--images: found 0"),
        (("bench", folder, "--methods", "ar", "--sweep"), "--methods: says what to run"),
        (("tune", folder, "--minutes", "0"), "--minutes: found 0"),
        (
            ("eval", folder, "--prompts", "prompts.txt", "--feature-size", "9"),
            "--feature-size: says how images are prepared",
        ),
    ):
        code, _, err = program(*command)
        assert (code, err.partition(reason)[0]) == (2, "lantern-rt: "), err


def test_the_help_of_run_groups_its_options() -> None:
    text = CliRunner().invoke(app, ["run", "--help"]).output
    headings = re.findall(r"^(\w[\w ]*):$", text, re.MULTILINE)
    assert headings == ["Arguments", "What to draw", "Output", "Method", "Sampling", "Engine", "Options"]
    for heading, option in (("What to draw", "--seed"), ("Method", "--window"), ("Sampling", "--top-k"),
                            ("Engine", "--threads"), ("Output", "--scale"), ("Options", "--force")):  # fmt: skip
        assert f"\n  {option}" in text.partition(f"\n{heading}:")[2].partition("\n\n")[0]


# ---------------------------------------------------------------- embeddings


def test_embeddings_of_a_file_are_drawn_as_from_python(program: Any, embeds: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "Two Texts.npz", **states(2))
    code, out, _ = program("run", embeds, "--embeddings", "Two Texts.npz", "--num-images", "2", "--seed", "4", "--json")
    assert code == 0
    images = json.loads(out)["images"]
    assert [(one["embedding"], one["seed"]) for one in images] == [(0, 4), (0, 5), (1, 4), (1, 5)]
    assert images[3]["output"] == "two-texts-1-seed5.png"
    given = states(2)
    result = Pipeline.from_bundle(embeds, threads=1)(
        embeddings=(given["embeddings"], given["mask"]), seed=4, num_images=2
    )
    assert [one["codes"] for one in images] == [codes.tolist() for codes in result.codes]
    with Image.open(images[0]["output"]) as image:
        assert image.text["seed"] == "4"  # type: ignore[attr-defined]
    code, _, err = program("run", embeds, "--from", images[0]["output"])
    assert code == 2
    assert err.count("\n") == 1


def test_without_a_mask_all_tokens_count_and_half_and_double_floats_do(program: Any, embeds: Path) -> None:
    for kind in (np.float16, np.float64):
        np.savez("states.npz", embeddings=states(1, 2)["embeddings"].astype(kind))
        assert program("run", embeds, "--embeddings", "states.npz", "--force")[:2] == (0, "states-0-seed0.png\n")


def test_bundles_of_embeddings_are_benched_tuned_and_evaluated(program: Any, embeds: Path) -> None:
    pytest.importorskip("scipy")
    np.savez("states.npz", **states())
    given = ("--embeddings", "states.npz", "--json")
    code, out, _ = program("bench", embeds, "--methods", "sjd:window=3", "--images", "2", *given)
    assert (code, [row["label"] for row in json.loads(out)["rows"]]) == (0, ["ar", "sjd:window=3"])
    code, out, _ = program("eval", embeds, "--methods", "sjd", "--seeds", "2", *given)
    report = json.loads(out)
    assert (code, report["prompts"]) == (0, ["embedding 0", "embedding 1", "embedding 2"])
    assert report["images_per_method"] == 6
    code, out, _ = program("tune", embeds, "--minutes", "0.05", *given)
    assert (code, "situation" in json.loads(out)) == (0, True)


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ({"states": np.zeros((1, 2, CAPTION))}, "found arrays states, expected embeddings, and mask if need be"),
        ({**states(1), "more": np.zeros(1)}, "found arrays embeddings, mask, more, expected"),
        ({"embeddings": np.zeros((1, 2, CAPTION), int)}, r"found embeddings int64 \[1, 2, 6\], expected floats \[prom"),
        ({"embeddings": np.zeros((2, CAPTION))}, r"found embeddings float64 \[2, 6\], expected floats"),
        ({"embeddings": np.zeros((0, 2, CAPTION))}, r"found embeddings float64 \[0, 2, 6\]"),
        ({"embeddings": np.array([["x"]], object)}, "pickle|Object arrays"),
        ({"embeddings": np.zeros((1, 2, CAPTION)), "mask": np.full((1, 2), 0.5)}, r"found mask float64 .* 0 and 1"),
        (
            {"embeddings": np.zeros((1, 2, CAPTION)), "mask": np.full((1, 2), 2)},
            r"found mask int64 .* 0 and 1",
        ),
        ({"embeddings": np.zeros((1, 2, CAPTION)), "mask": np.ones((1, 3), bool)}, r"found mask \[1, 3\] for embedd"),
        ({"embeddings": np.zeros((1, 2, 5))}, r"--embeddings: found \[1, 2, 5\] .* expected \[prompts, 1 .. 4, 6\]"),
        ({"embeddings": np.zeros((1, 2, CAPTION)), "mask": np.array([[0, 1]])}, "--embeddings: found a mask with gaps"),
        ({"embeddings": np.full((1, 2, CAPTION), np.nan)}, "--embeddings: found NaN or infinity"),
        ({"embeddings": np.full((1, 2, CAPTION), 1e300)}, "--embeddings: found NaN or infinity"),
    ],
)
def test_a_file_that_holds_anything_else_is_one_line(program: Any, embeds: Path, arrays: Any, reason: str) -> None:
    np.savez("states.npz", **arrays)
    for command in (("run",), ("bench",), ("tune", "--minutes", "0.1")):
        code, out, err = program(command[0], embeds, *command[1:], "--embeddings", "states.npz")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert re.search(reason, err), err
    assert os.listdir() == ["states.npz"]


def test_files_that_are_no_archives_are_one_line(
    program: Any, embeds: Path, folder: Path, class_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("text.npz").write_text("not an archive")
    np.save("array.npy", np.zeros((1, 2, CAPTION)))
    os.mkfifo("fifo.npz")
    with zipfile.ZipFile("damaged.npz", "w") as archive:
        archive.writestr("embeddings.npy", b"\x93NUMPY\x01\x00" + b"\xff" * 40)
    for name in ("text.npz", "array.npy", "fifo.npz", "damaged.npz", "none.npz", "."):
        code, _, err = program("run", embeds, "--embeddings", name)
        assert (code, err.count("\n")) == (2, 1), err
        assert err.startswith(f"lantern-rt: {name}: ")
    np.savez("states.npz", **states())
    assert "--embeddings: bundle tiny takes prompts; leave --embeddings out" in program(
        "bench", folder, "--embeddings", "states.npz")[2]  # fmt: skip
    assert "found text embeddings (`--embeddings FILE.npz`, in Python `embeddings=`), expected class ids" in program(
        "run", class_folder, "--embeddings", "states.npz")[2]  # fmt: skip
    assert "takes text embeddings; give --embeddings FILE.npz, or export it with" in program("bench", embeds)[2]
    monkeypatch.setattr(embeddings_module, "BYTES_LIMIT", 100)
    assert "embeddings.npy of " in program("run", embeds, "--embeddings", "states.npz")[2]
