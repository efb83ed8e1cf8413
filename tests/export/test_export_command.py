"""Tests of the command `lantern-rt export`: its output, warnings and errors."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_copies import (
    C2I,
    DRAFTER,
    LUMINA,
    LUMINA2,
    MOVQGAN,
    T2I,
    VQ,
    VQGAN,
    config_path,
    copy_checkpoint,
    copy_weights,
)
from family_readers import read_llamagen_transformer, read_lumina
from PIL import Image
from refusals import catch_error

from lantern_rt.bundle.files import open_bundle
from lantern_rt.errors import CheckpointError
from lantern_rt.export.checkpoints.files import Weights, read_weights
from lantern_rt.export.registry import check_family_options


def test_an_export_prints_the_bundle_and_the_presets_command(program: Any, tmp_path: Path) -> None:
    bundle = tmp_path / "b"
    command = ["export", "--target", C2I, "--vq", VQ, "--config", config_path(C2I), "--output", bundle]
    exit_code, out, err = program(*command, "--compute", "float16")
    assert exit_code == 0
    manifest = open_bundle(bundle).manifest
    assert (manifest.target.dtype, manifest.target.precision, [*manifest.presets]) == ("float16", "fp16", ["strict"])
    assert out.strip() == str(bundle)
    assert "writing target.onnx" in err
    assert "GB without mapped files" in err
    assert any(line.startswith("wrote ") and " MB in " in line for line in err.splitlines())
    assert f"`lantern-rt eval {bundle} --write-presets`" in err.splitlines()[-1]
    exit_code, _, err = program(*command, "--precision", "fp8", "--force")
    assert (exit_code, "precision: found 'fp8', expected one of fp32, fp16" in err) == (2, True)


def test_the_error_in_a_deleted_current_folder_is_one_line(
    program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "deleted"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    exit_code, _, err = program("export", "--target", C2I, "--vq", VQ, "--output", tmp_path / "b")
    assert (exit_code, err) == (2, "lantern-rt: export: the current folder was deleted; go to another with `cd`\n")


def test_a_lumina_bundle_is_exported_and_verified(program: Any) -> None:
    files = ["--target", LUMINA, "--vq", VQGAN, "--grid", 4, "--output", "lumina"]
    assert program("export", "--family", "lumina", *files)[0] == 0
    exit_code, out, _ = program("verify", "lumina", LUMINA, VQGAN)
    assert (exit_code, "passed" in out) == (0, True)
    assert program("bench", "lumina", "--method", "ar", "--count", 1)[0] == 0
    Path("own.txt").write_text("a cat\n")
    assert program("export", "--family", "lumina", *files, "--prompts", "own.txt", "--force")[0] == 0
    assert open_bundle("lumina").example_prompts == ["a cat"]


def test_lumina2_is_exported_from_the_layout_of_its_repository(program: Any) -> None:
    files = ["--target", LUMINA2, "--vq", MOVQGAN, "--grid", 8, "--output", "lumina2"]
    assert program("export", "--family", "lumina2", *files)[0] == 0
    exit_code, out, _ = program("run", "lumina2", "a red fox", "--size", "32x64", "--output", "fox.png")
    assert exit_code == 0, out
    with Image.open("fox.png") as image:
        assert image.size == (32, 64)


def test_weights_that_overflow_float32_are_rejected_by_name(program: Any, tmp_path: Path) -> None:
    def enlarge_weights(weights: Weights) -> None:
        weights["layers.0.attention.wqkv.weight"] *= 1e30

    target = copy_weights(tmp_path, C2I, enlarge_weights)
    exit_code, _, err = program(
        "export", "--target", target, "--vq", VQ, "--config", config_path(C2I), "--output", "bundle"
    )
    assert exit_code == 2
    assert err.splitlines()[-1].startswith(f"lantern-rt: {target}: the weights overflow float32, found NaN or infinite")


def test_the_error_of_a_missing_configuration_shows_an_example(program: Any, tmp_path: Path) -> None:
    error = catch_error(CheckpointError, read_llamagen_transformer, Path(shutil.copy(C2I, tmp_path)))
    assert error.remedy.startswith(
        'give {"n_head": 12}, with your number, in a JSON file: as --config, or as config.json '
    )
    exit_code, out, _ = program("export", "--help")
    assert exit_code == 0
    assert '{"n_head": 12, "block_size": 256' in " ".join(out.replace("│", " ").split())


def test_a_missing_file_named_like_an_option_is_rejected_by_name(program: Any) -> None:
    exit_code, _, err = program("export", "--target", "vq", "--vq", "model", "--output", "b")
    assert (exit_code, err.splitlines()[-1]) == (
        2,
        "lantern-rt: vq: no such file or folder; give a path or hf:owner/name",
    )


def test_a_drafter_of_another_target_is_exported_with_a_warning(program: Any, t2i_bundle: Path, tmp_path: Path) -> None:
    files = open_bundle(t2i_bundle).manifest.files
    target_sha256 = files.get("target.data", files["target"]).sha256
    for i, training_sha256 in enumerate((target_sha256, "0" * 64)):
        drafter = copy_checkpoint(DRAFTER, tmp_path / f"drafter{i}", training={"target_sha256": training_sha256})
        command = ["--target", T2I, "--vq", VQ, "--config", config_path(T2I), "--drafter", drafter]
        exit_code, _, err = program("export", *command, "--output", tmp_path / f"b{i}")
        warning = f"warning: the drafter learned from target weights 000000000000..., not {target_sha256[:12]}..."
        assert (exit_code, warning in err) == (0, bool(i))


def test_a_lumina_image_may_exceed_max_position_embeddings(tmp_path: Path) -> None:
    model = read_lumina(copy_checkpoint(LUMINA, tmp_path / "short", max_position_embeddings=20), VQGAN, grid=6)
    assert model.manifest_fields["condition"].prefix == 2048


@pytest.mark.parametrize(
    ("family", "options", "field"),
    [
        ("anole", {"vq": "v", "config": "c"}, "config"),
        ("janus", {"vq": "v"}, "vq"),
        ("anole", {}, "vq"),
        ("llama", {}, "family"),
    ],
)
def test_unsupported_or_missing_options_of_a_family_are_rejected(
    family: str, options: dict[str, str], field: str
) -> None:
    assert catch_error(CheckpointError, check_family_options, family, {"target": "t"} | options).field == field


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothere"], "model: found 'nothere', expected the name of a published model"),
        (["folder/nothere.pt"], "folder/nothere.pt: no such file or folder; give a path or hf:owner/name"),
        (["--target", "nothere"], "nothere: no such file or folder"),
        (["janus-pro-1bb"], "did you mean janus-pro-1b?"),
        ([LUMINA / "model.safetensors"], f"model.safetensors: one file of a checkpoint; give its folder, {LUMINA}"),
        (["adapter"], "adapter: a LoRA adapter, not a model; give it as --lora"),
        ([C2I], "--vq: found nothing, expected a checkpoint, which family llamagen needs; llamagen is a guess"),
    ],
)
def test_export_finds_out_what_a_word_is_before_it_guesses_a_family(
    program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[object], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    exit_code, _, err = program("export", *words, "--output", "b")
    assert (exit_code, message in err) == (2, True), err


def test_sizes_come_from_the_arguments_of_llamagens_training_program(program: Any, tmp_path: Path) -> None:
    weights = torch.load(C2I, weights_only=True)["model"]
    path, config, bundle = tmp_path / "0050000.pt", tmp_path / "heads.json", tmp_path / "b"
    config.write_text('{"n_head": 4}')
    arguments = argparse.Namespace(gpt_model="GPT-B", image_size=64, downsample_size=16, num_classes=10)
    torch.save({"model": weights, "steps": 50_000, "args": arguments}, path)
    command = ["export", path, "--vq", VQ, "--config", config, "--output", bundle]
    exit_code, _, err = program(*command, "--grid", 8)
    assert (exit_code, "block_size: found a grid of 4, expected 8 rows" in err) == (2, True), err
    assert program(*command)[0] == 0
    assert open_bundle(bundle).manifest.grid_rows == 4
    torch.save({f"base_model.model.{name}": value for name, value in weights.items()}, tmp_path / "merged.pt")
    assert read_weights(tmp_path / "merged.pt").keys() == weights.keys()
