"""Test `lantern-rt train-drafter`: training, continuation after an interruption, export and rejected input."""

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from refusals import catch_error

from lantern_rt import CheckpointError, OutputError, Pipeline, RequestError, open_bundle
from lantern_rt.cli.main import run_program
from lantern_rt.compare.prompts import Prompts
from lantern_rt.inputs import make_install_command
from lantern_rt.subjects.embeddings import Embedding
from lantern_rt.subjects.prompts import ClassId, Text

torch = pytest.importorskip("torch")
pytest.importorskip("onnx")

from safetensors.torch import load_file  # noqa: E402

from lantern_rt.export.models.eagle import EagleDrafter  # noqa: E402
from lantern_rt.train.drafter.batches import make_training_batch, select_shuffled_images  # noqa: E402
from lantern_rt.train.drafter.data import generate_shards  # noqa: E402
from lantern_rt.train.drafter.fit import DrafterTrainer, TrainingOptions, check_device, get_training_state_path  # noqa: E402
from lantern_rt.train.drafter.folder import convert_to_lantern_weights  # noqa: E402
from lantern_rt.train.drafter.shards import ShardFolder  # noqa: E402
from lantern_rt.train.drafter.target import TrainingTarget, read_training_target  # noqa: E402

pytestmark = pytest.mark.usefixtures("bfloat16")
DATA = Path(__file__).parent.parent / "data"
OPTIONS = TrainingOptions(6, batch=4, cfg_scale=4.0)


@pytest.fixture(scope="module")
def target(c2i_bundle: Path) -> TrainingTarget:
    return read_training_target(open_bundle(c2i_bundle))


def make_trainer(
    shards: Path, target: TrainingTarget, output: Path, options: TrainingOptions = OPTIONS
) -> DrafterTrainer:
    return DrafterTrainer(shards, target, options, output)


def ignore_progress(*_: object) -> None:
    pass


def have_same_weights(drafter: EagleDrafter, expected: EagleDrafter) -> bool:
    weights = convert_to_lantern_weights(drafter)
    expected_weights = convert_to_lantern_weights(expected)
    return all(torch.equal(weights[name], expected_weights[name]) for name in weights)


def test_a_trained_drafter_gives_the_images_of_plain_decoding(
    c2i_bundle: Path, shards: Path, target: TrainingTarget, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    initial_metrics = make_trainer(shards, target, tmp_path / "none").compute_validation_metrics()
    command = ["fit", str(c2i_bundle), "--data", str(shards), "--steps", "80", "--output", str(tmp_path / "drafter")]
    assert run_program(["train-drafter", *command]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'drafter'}\n"
    training = json.loads((tmp_path / "drafter" / "config.json").read_text())["training"]
    assert training["figures"]["overlap"] > initial_metrics["overlap"] + 0.05
    assert training["target_sha256"] == target.shard_source.weights
    export = ["--target", str(DATA / "llamagen-c2i/c2i_tiny.pt"), "--vq", str(DATA / "llamagen-vq/vq_tiny.pt")]
    export += ["--config", str(DATA / "llamagen-c2i/config.json"), "--drafter", str(tmp_path / "drafter")]
    assert run_program(["export", *export, "--output", str(tmp_path / "bundle")]) == 0
    with Pipeline.from_bundle(tmp_path / "bundle", threads=1) as pipeline:
        request = Prompts(ClassId, list(range(10))).request(0, 10)
        expected, result = (pipeline(**request, method=method) for method in ("ar", "eagle:tree=balanced-25"))
        np.testing.assert_array_equal(result.codes, expected.codes)
        assert result.stats.tokens_per_forward_pass > 1.25


def test_interrupted_training_ends_with_the_same_weights(shards: Path, target: TrainingTarget, tmp_path: Path) -> None:
    def interrupt(stage: str, done: int, total: int) -> None:
        if done == 4:
            raise KeyboardInterrupt

    uninterrupted = make_trainer(shards, target, tmp_path / "whole")
    uninterrupted.run(ignore_progress, ignore_progress)
    with pytest.raises(KeyboardInterrupt):
        make_trainer(shards, target, tmp_path / "drafter").run(interrupt, ignore_progress, report_seconds=0)
    assert [path.name for path in tmp_path.iterdir() if "drafter" in path.name] == ["drafter.training.pt"]
    continued = make_trainer(shards, target, tmp_path / "drafter")
    assert continued.step == 4
    continued.run(ignore_progress, ignore_progress)
    assert have_same_weights(continued.average, uninterrupted.average)
    assert have_same_weights(continued.drafter, uninterrupted.drafter)
    stored = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "drafter")]
    assert all(torch.equal(stored[0][name], stored[1][name]) for name in stored[0])
    names = ["config.json", "model.safetensors"]
    assert sorted(path.name for path in (tmp_path / "drafter").iterdir()) == names


def test_a_folder_is_replaced_only_with_the_same_options(shards: Path, target: TrainingTarget, tmp_path: Path) -> None:
    output = tmp_path / "drafter"
    make_trainer(shards, target, output).run(ignore_progress, ignore_progress)
    longer = make_trainer(shards, target, output, replace(OPTIONS, steps=9))
    assert longer.step == 6
    longer.run(ignore_progress, ignore_progress)
    error = catch_error(CheckpointError, make_trainer, shards, target, output, replace(OPTIONS, seed=1))
    assert error.field == str(get_training_state_path(output))
    get_training_state_path(output).write_bytes(get_training_state_path(output).read_bytes()[:1000])
    with pytest.raises(CheckpointError):
        make_trainer(shards, target, output)
    get_training_state_path(output).unlink()
    os.mkfifo(get_training_state_path(output))
    with pytest.raises(CheckpointError):
        make_trainer(shards, target, output)
    get_training_state_path(output).unlink()
    with pytest.raises(OutputError):
        make_trainer(shards, target, output)


@pytest.mark.parametrize("steps", [1, 0])
def test_training_that_diverges_ends_without_a_drafter(
    shards: Path, target: TrainingTarget, tmp_path: Path, steps: int
) -> None:
    trainer = make_trainer(shards, target, tmp_path / "drafter", replace(OPTIONS, steps=steps))
    # Without steps, only the average of the weights is validated and saved.
    torch.nn.init.constant_((trainer.drafter if steps else trainer.average).fc.weight, float("nan"))
    assert catch_error(CheckpointError, trainer.run, ignore_progress, ignore_progress).found == "nan"
    assert not [*tmp_path.iterdir()]


def make_caption_embeddings(bundle: Path) -> Prompts:
    condition = open_bundle(bundle).manifest.condition
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((2, condition.prefix, condition.caption_dim or 0)).astype(np.float32)
    masks = np.arange(condition.prefix) < np.array([[3], [condition.prefix]])
    return Prompts(Embedding, list(zip(rows, masks, strict=True)))


@pytest.mark.parametrize("name", ["t2i_bundle", "anole_bundle"])
def test_training_batches_have_the_same_prefixes_as_decoding(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Compare the first image slot and the prefix tokens of a batch with the prefixes of the pipeline."""
    bundle = request.getfixturevalue(name)
    pipeline = Pipeline.from_bundle(bundle, threads=1)
    texts = Prompts(Text, ["a dog", "some long cat on a mat"])
    prompts = make_caption_embeddings(bundle) if name == "t2i_bundle" else texts
    list(generate_shards(pipeline, prompts, 4, tmp_path / "data", ignore_progress, images_per_shard=2))
    target = read_training_target(pipeline.bundle)
    data = ShardFolder(tmp_path / "data", [target.shard_source], len(target.embeddings))
    batch = make_training_batch(data, [0, 1], target.code_offset, 2, "cpu")
    prepared = pipeline.prepare(pipeline.check(**prompts.request(0, 2), method="ar"))
    rows = [row for prefix in prepared.prompts() for row in (prefix.cond, prefix.uncond)]
    for row, first_slot, tokens in zip(rows, batch.first_image_positions.tolist(), batch.tokens, strict=True):
        assert first_slot == len(row.embeds) - 1
        expected = np.zeros(first_slot) if row.tokens is None else row.tokens[1:]
        np.testing.assert_array_equal(tokens[:first_slot], expected)
    assert (batch.tokens[:, -4:] >= target.code_offset).any()
    for cfg_scale in (1.0, 4.0):
        options = TrainingOptions(1, batch=2, cfg_scale=cfg_scale)
        figures = DrafterTrainer(tmp_path / "data", target, options, tmp_path / f"guided-{cfg_scale}").run(
            ignore_progress, ignore_progress
        )
        assert 0 < figures["overlap"] <= 1


def test_a_family_without_a_drafter_layout_is_rejected(
    emu3_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train-drafter", "fit", str(emu3_bundle), "--data", str(tmp_path), "--output", str(tmp_path / "o")]
    assert run_program(command) == 2
    err = capsys.readouterr().err
    assert "found emu3, expected llamagen, scenes, anole" in err
    assert "train-drafter heads" in err
    assert err.count("\n") == 1


def test_every_epoch_has_each_image_once_in_a_seeded_order() -> None:
    training = [2, 3, 5, 7, 11]
    numbers = select_shuffled_images(training, 1, 0, 10)
    assert sorted(numbers[:5]) == sorted(numbers[5:]) == training
    assert numbers[:5] != numbers[5:]
    assert select_shuffled_images(training, 1, 3, 4) == numbers[3:7]
    assert select_shuffled_images(training, 2, 0, 10) != numbers


@pytest.mark.parametrize("device", ["cuda", "quantum", "meta"])
def test_a_device_that_torch_does_not_support_is_rejected(device: str) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    error = catch_error(RequestError, check_device, device)
    assert (error.field, error.found) == ("device", repr(device))


def test_missing_data_and_a_missing_pytorch_are_reported(
    c2i_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train-drafter", "fit", str(c2i_bundle), "--data", "/nowhere", "--output", "o"]
    assert run_program(command) == 2
    assert capsys.readouterr().err.count("\n") == 1
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "torch" else find_spec(name, *a))
    assert run_program(command) == 2
    assert make_install_command("cpu,train") in capsys.readouterr().err
