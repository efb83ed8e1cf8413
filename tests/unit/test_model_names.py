"""What words mean that may name a model: names, repositories, folders and prompts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lantern_rt import Pipeline
from lantern_rt.errors import BundleError, RequestError
from lantern_rt.hints import suggest_name
from lantern_rt.model_names import find_model_name, open_model


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Go to a folder with a checkpoint, a file of weights, and a folder of images."""
    monkeypatch.chdir(tmp_path)
    for name in ("janus-ft/config.json", "weights/c2i.pt", "cones/a.png"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("{}")
    return tmp_path


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("scenes", "scenes"),
        ("janus-pro-1b", "janus-pro-1b"),
        ("deepseek-ai/Janus-Pro-1B", "janus-pro-1b"),
        ("hf:deepseek-ai/Janus-Pro-1B", "janus-pro-1b"),
        ("hf:me/bundle@v1", "hf:me/bundle@v1"),
        ("me/model", "me/model"),
        ("janus-ft", "janus-ft"),
        ("weights/c2i.pt", "weights/c2i.pt"),
        ("cones", None),
        ("cat", None),
        ("a red cube", None),
        ("", None),
        ("x" * 5000, None),
        ("a\0b", None),
    ],
)
def test_a_word_is_a_model_or_may_be_a_prompt(folder: Path, word: str, name: str | None) -> None:
    assert find_model_name(word) == name


def test_a_repository_of_several_models_lists_their_names() -> None:
    with pytest.raises(RequestError, match="one of its models: llamagen-c2i-b-256, "):
        find_model_name("FoundationVision/LlamaGen")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (
            "janus-ft",
            "a checkpoint, not a bundle; `lantern-rt export janus-ft --output janus-ft-bundle` makes a bundle",
        ),
        ("weights/c2i.pt", "`lantern-rt export weights/c2i.pt --output c2i.pt-bundle`"),
        ("me/model", "write hf:me/model; for a checkpoint run `lantern-rt export me/model --output model-bundle`"),
        ("cones", "contains no bundle.json"),
        ("nothing", "neither a folder nor an embedded bundle"),
    ],
)
def test_what_is_no_bundle_gets_the_command_that_makes_one(folder: Path, word: str, message: str) -> None:
    for open_by_name in (open_model, Pipeline.from_bundle):
        with pytest.raises(BundleError, match=re.escape(message)):
            open_by_name(word)


def test_a_path_is_a_folder_whatever_its_name(folder: Path) -> None:
    (folder / "scenes").mkdir()
    with pytest.raises(BundleError, match="contains no bundle"):
        open_model(Path("scenes"))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("num_inference_steps", "leave it out: an image has tokens, not steps"),
        ("generator", "use seed"),
        ("num_images_per_prompt", "use num_images"),
        ("temprature", "did you mean temperature?"),
        ("seeds", "did you mean seed?"),
        ("sed", "did you mean seed?"),
        ("sead", "did you mean seed?"),
        ("seeks", ""),
        ("temprture", "did you mean temperature?"),
        ("temprtur", ""),
        ("n", ""),
        ("", ""),
        ("strength", ""),
    ],
)
def test_hints_know_other_programs_and_names_within_two_letters(name: str, hint: str) -> None:
    assert suggest_name(name, ["temperature", "seed", "size", "num_images"]) == hint
