"""Tests of the errors of wrong downloads: other models, other layouts, Git LFS pointers, web pages, missing files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from checkpoint_copies import (
    ANOLE,
    C2I,
    EMU3,
    JANUS,
    LUMINA,
    LUMINA2,
    SIMPLEAR,
    VQ,
    VQGAN,
    config_path,
    copy_checkpoint,
    copy_json,
)
from edited_checkpoints import LFS_POINTER, READERS, Reader
from family_readers import (
    read_anole,
    read_llamagen,
    read_llamagen_transformer,
)
from refusals import catch_error

from lantern_rt.errors import CheckpointError
from lantern_rt.export.checkpoints.files import read_config, read_tokenizer, read_weights
from lantern_rt.export.checkpoints.folders import read_weight_index
from lantern_rt.export.models.t5 import read_text_encoder

WEB_PAGES = (
    "<!DOCTYPE html>\n<html>not found</html>",
    "\n <HTML>log in</HTML>",
    '<?xml version="1.0"?><Error>denied</Error>',
)
# By family, or the text encoder: function that reads a checkpoint as this family.
FAMILY_READERS: dict[str, Reader] = {
    "llamagen": lambda folder: read_llamagen(folder, VQ),
    "anole": READERS[ANOLE],
    "lumina": READERS[LUMINA],
    "lumina2": READERS[LUMINA2],
    "janus": READERS[JANUS],
    "emu3": READERS[EMU3],
    "simplear": READERS[SIMPLEAR],
    "text encoder": lambda folder: read_text_encoder(folder, 32),
}
# The keys are values of `model_type` in `config.json`.
FOLDERS = {"chameleon": ANOLE, "emu3": EMU3, "qwen2": SIMPLEAR, "multi_modality": JANUS}
FAMILIES = {"chameleon": "anole or lumina or lumina2", "emu3": "emu3", "qwen2": "simplear", "multi_modality": "janus"}


@pytest.mark.parametrize("family", FAMILY_READERS)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_folder_of_another_model_is_rejected_with_its_family(tmp_path: Path, model_type: str, family: str) -> None:
    read = FAMILY_READERS[family]
    folder = FOLDERS[model_type]
    if family == FAMILIES[model_type].partition(" ")[0]:
        read(folder)
        return
    error = catch_error(CheckpointError, read, folder)
    if model_type == "chameleon" and family in ("lumina", "lumina2"):
        assert error.remedy == "family anole takes Anole, family lumina Lumina-mGPT"
        return
    assert error.field == f"{folder / 'config.json'}: model_type"
    assert error.found == repr(model_type)
    if family == "text encoder":
        assert "google/flan-t5-xl" in error.remedy
    else:
        assert error.expected == f"a model of family {family}"
        assert error.remedy == f"give `--family {FAMILIES[model_type]}`, or another target"


@pytest.mark.parametrize("value", [["chameleon"], {"a": 1}, 7, None, "x" * 10_000])
def test_an_invalid_model_type_is_rejected_with_a_short_error(tmp_path: Path, value: Any) -> None:
    error = catch_error(
        CheckpointError, read_anole, copy_checkpoint(ANOLE, tmp_path / "target", model_type=value), VQGAN
    )
    assert error.field.endswith("config.json: model_type")
    assert len(error.found) <= 80


@pytest.mark.parametrize("text", [LFS_POINTER, *WEB_PAGES])
@pytest.mark.parametrize("name", ["a.pt", "model.safetensors", "config.json", "tokenizer.json"])
def test_a_git_lfs_pointer_or_web_page_is_named_so(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    read = {"config.json": read_config, "tokenizer.json": lambda path: read_tokenizer(path, 9)}.get(name, read_weights)
    error = catch_error(CheckpointError, read, path)
    assert error.field == str(path)
    assert error.found == ("a Git LFS pointer" if text == LFS_POINTER else "a web page")


def test_hidden_files_of_macos_are_not_read_as_weights(tmp_path: Path) -> None:
    shutil.copy(C2I, tmp_path)
    (tmp_path / f"._{C2I.name}").write_bytes(b"\0\5\26\7\0\2\0\0Mac OS X        ")
    assert read_llamagen_transformer(tmp_path, config=config_path(C2I)).checkpoint.sources[0] == (
        "target",
        tmp_path / C2I.name,
    )


@pytest.mark.parametrize("name", ["*", "model-[0-9].safetensors", ".hidden", "a/b", "a\\b", "a b", "-rf", "", "..", 7])
def test_an_index_with_an_invalid_file_name_is_rejected(tmp_path: Path, name: Any) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"x": "model-1.safetensors", "y": name}}))
    error = catch_error(CheckpointError, read_weight_index, path)
    assert error.field == f"{path}: 'y'"
    assert error.found == repr(name)


def test_the_error_of_a_missing_configuration_shows_an_example(program: Any, tmp_path: Path) -> None:
    error = catch_error(CheckpointError, read_llamagen_transformer, Path(shutil.copy(C2I, tmp_path)))
    assert error.remedy.startswith(
        'give {"n_head": 12}, with your number, in a JSON file: as --config, or as config.json '
    )
    exit_code, out, _ = program("export", "--help")
    assert exit_code == 0
    assert '{"n_head": 12, "block_size": 256' in " ".join(out.replace("│", " ").split())


def test_a_matching_configuration_beside_a_file_is_read(tmp_path: Path) -> None:
    assert read_llamagen_transformer(C2I).checkpoint.sources == [("target", C2I), ("target_config", config_path(C2I))]
    path = Path(shutil.copy(C2I, tmp_path))
    copy_json(config_path(C2I), tmp_path / "config.json", architectures=["T5EncoderModel"])
    assert "n_head" in catch_error(CheckpointError, read_llamagen_transformer, path).remedy
