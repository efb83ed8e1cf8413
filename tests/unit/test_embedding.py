"""`Pipeline` inside another program: records in images, errors, closing, warming up, and logging."""

from __future__ import annotations

import ast
import logging
from pathlib import Path
from typing import Any

import pytest
from package_files import find_package_files
from PIL import Image
from refusals import expect_error
from tiny_bundle import CAPTION, PREFIX, make_tiny_bundle

from lantern_rt import Pipeline, RequestError
from lantern_rt.cli.main import run_program
from lantern_rt.output.recipe import read_recipe

CLOSED = "pipeline: closed; call Pipeline.from_bundle again"


# ---------------------------------------------------------------- records in images


def test_a_saved_image_can_be_generated_again(
    pipe: Pipeline, words_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = pipe(["red cube", "green sphere"], seed=4, method="lantern++:lambda=3")
    result.images[1].save("saved.png")
    recipe = read_recipe(Path("saved.png"))
    assert (recipe.prompt, recipe.seed, recipe.method) == ("green sphere", 4, "lantern++")
    assert recipe.settings == result.settings.as_dict()
    assert run_program(["run", "--threads", "1", str(words_bundle), "--from", "saved.png"]) == 0
    assert Path("saved-again.png").read_bytes() == Path("saved.png").read_bytes()


def test_an_images_record_survives_resizing(pipe: Pipeline, tmp_path: Path) -> None:
    image = pipe("red cube").images[0]
    large = image.resize((48, 48))
    assert large.info == image.info
    assert set(image.info) >= {"Software", "prompt", "seed", "method", "noise", "settings", "bundle", "bundle_digest"}
    image.save(tmp_path / "cube.jpg")
    image.save(tmp_path / "bare.png", pnginfo=None)
    with Image.open(tmp_path / "bare.png") as bare:
        assert "prompt" not in bare.info


def test_an_unfinished_image_has_no_record(pipe: Pipeline) -> None:
    first_step, *_, last_step = pipe.stream("red cube", seed=2)
    assert first_step.image(0).info == {}
    assert last_step.image(0).info == pipe("red cube", seed=2, method=last_step.settings.method).images[0].info
    with pytest.raises(IndexError):
        last_step.image(1)


def test_an_image_from_embeddings_records_no_prompt(tmp_path: Path) -> None:
    pipe = Pipeline.from_bundle(make_tiny_bundle(tmp_path / "tiny", "embeddings"), threads=1)
    record = pipe(embeddings=[[1.0] * CAPTION] * PREFIX, seed=3).images[0].info
    assert record["seed"] == "3"
    assert not {"prompt", "class_id"} & set(record)


# ---------------------------------------------------------------- errors


def test_the_position_of_an_invalid_prompt_is_named(pipe: Pipeline) -> None:
    with expect_error(RequestError, "prompt 2 of 3: found empty text, expected a few words"):
        pipe(["red cube", " ", "green cube"])
    with pytest.raises(RequestError, match=r"^prompt 3 of 3: found unknown word 'blu'"):
        pipe.stream(["red cube", "green cube", "a blu cube"])
    with expect_error(RequestError, "prompt: found empty text, expected a few words"):
        pipe([" "])


# ---------------------------------------------------------------- opening and closing


def test_using_a_closed_pipeline_is_an_error(words_bundle: Path) -> None:
    with Pipeline.from_bundle(words_bundle, threads=1) as pipe:
        stream = pipe.stream("red cube", method="ar")
        unfinished_stream = pipe.stream("red cube")
        next(stream)
        next(unfinished_stream)
    pipe.close()
    with expect_error(RequestError, CLOSED):
        pipe("red cube", method="ar")
    with expect_error(RequestError, CLOSED):
        pipe.warm_up()
    *_, last = stream
    assert last.done == last.total, "a stream that is running keeps its engine until it ends"
    unfinished_stream.close()
    with expect_error(RequestError, CLOSED):
        last.image(0)


def test_closing_a_pipeline_frees_the_engines_at_once(words_bundle: Path) -> None:
    import weakref

    pipe = Pipeline.from_bundle(words_bundle, threads=1)
    pipe("red cube", method="eagle")
    engines = [weakref.ref(engine) for engine in (pipe.engines.target, pipe.engines.drafter)]
    pipe.close()
    assert [engine() for engine in engines] == [None, None]


@pytest.mark.parametrize("kind", ["words", "class", "embeddings"])
def test_a_warmed_up_pipeline_loads_no_further_graph(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import onnxruntime

    pipe = Pipeline.from_bundle(make_tiny_bundle(tmp_path / "tiny", kind), threads=1)
    pipe.warm_up()
    monkeypatch.setattr(onnxruntime, "InferenceSession", None)  # loading a graph would fail now
    subject: dict[str, Any] = {
        "words": {"prompts": "red cube"},
        "class": {"class_ids": 3},
        "embeddings": {"embeddings": [[1.0] * CAPTION] * PREFIX},
    }[kind]
    assert pipe(**subject, method="lantern").images


def test_a_pipeline_without_a_drafter_can_be_warmed_up(tmp_path: Path) -> None:
    pipe = Pipeline.from_bundle(make_tiny_bundle(tmp_path / "tiny", drafter=False), threads=1)
    pipe.warm_up()
    assert pipe("red cube").images


# ---------------------------------------------------------------- logging


def test_opening_and_generating_are_logged_and_not_printed(
    words_bundle: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO, "lantern_rt"):
        pipe = Pipeline.from_bundle(words_bundle, threads=1)
        pipe("red cube", method="eagle")
        pipe("red cube")
    records = [record for record in caplog.records if record.name.startswith("lantern_rt")]
    open_line, eagle_line, default_line = (record.getMessage() for record in records)
    assert open_line == "opened bundle tiny on onnxruntime-cpu, threads: 1"
    assert eagle_line.startswith("eagle:tree=chain-3: 1 images, ")
    assert default_line.startswith("sjd:window=7: 1 images, ")
    assert capfd.readouterr() == ("", "")
    assert [logging.getLogger(name).handlers for name in ("lantern_rt", "lantern_rt.pipeline")] == [[], []]


def test_the_library_neither_prints_nor_sets_up_logging() -> None:
    """Check all modules except `cli`, `train`, `serve.ray` and `serve.log`, which belong to programs."""
    names = {"print", "basicConfig", "addHandler", "StreamHandler", "dictConfig"}
    calls = []
    for name, file in find_package_files().items():
        if name.split(".")[0] in ("cli", "train") or name in ("serve.ray", "serve.log"):
            continue
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Call):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                calls += [f"{name}: {called}"] * (called in names)
    assert calls == []
