"""Test shards of training images: content, continuation of a folder, and rejection of invalid data."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals import catch_error
from tiny_bundle import make_order_bundle

from lantern_rt import CheckpointError, OutputError, Pipeline, RequestError
from lantern_rt.compare.prompts import Prompts
from lantern_rt.subjects.prompts import ClassId

pytest.importorskip("safetensors")

from lantern_rt.train.drafter.data import choose_images_per_shard, compute_hidden_states, generate_shards
from lantern_rt.train.drafter.shards import (
    Shard,
    ShardFolder,
    ShardSource,
    TrainingImages,
    describe_shard_source,
    get_shard_path,
    write_shard,
)
from lantern_rt.train.drafter.target import read_head_training_target, read_training_target

CLASSES = Prompts(ClassId, [3, 1, 4])


@pytest.fixture(scope="module")
def pipeline(c2i_bundle: Path) -> Pipeline:
    return Pipeline.from_bundle(c2i_bundle, threads=1)


@pytest.fixture(scope="module")
def source(pipeline: Pipeline) -> ShardSource:
    return describe_shard_source(pipeline.bundle.manifest)


def write_shards(pipeline: Pipeline, output: Path, count: int = 4, prompts: Prompts = CLASSES) -> None:
    for _ in generate_shards(pipeline, prompts, count, output, lambda *_: None, images_per_shard=2):
        pass


def read_file_contents(folder: Path) -> dict[str, Any]:
    """Return the content of each shard; bytes differ, as safetensors writes metadata in any order."""
    files = {}
    for path in sorted(folder.iterdir()):
        shard = Shard(path)
        arrays = vars(shard.read_images(slice(None)))
        files[path.name] = (shard.source, {name: np.asarray(value).tolist() for name, value in arrays.items()})
    return files


def test_a_shard_has_the_pipelines_codes_and_hidden_states(pipeline: Pipeline, tmp_path: Path) -> None:
    write_shards(pipeline, tmp_path)
    shard = Shard(get_shard_path(tmp_path, 1))
    assert shard.prompts == [4, 3]
    images = shard.read_images(slice(None))
    request = CLASSES.request(1, 2, 700_000)
    result = pipeline(**request, method="ar")
    np.testing.assert_array_equal(images.codes, result.codes)
    assert images.prefix_lengths.tolist() == [[1, 1], [1, 1]]
    assert images.tokens.shape == (2, 2, 0)
    prompts = list(pipeline.prepare(pipeline.check(**request, method="ar")).prompts())
    states = compute_hidden_states(pipeline, prompts, images.codes)
    np.testing.assert_allclose(images.states.reshape(4, 16, 64), states, rtol=1e-3, atol=1e-3)


def test_a_continued_folder_equals_an_uninterrupted_folder(pipeline: Pipeline, tmp_path: Path) -> None:
    write_shards(pipeline, tmp_path / "whole", 6)
    write_shards(pipeline, tmp_path / "parts", 2)
    before = get_shard_path(tmp_path / "parts", 0).stat().st_mtime_ns
    write_shards(pipeline, tmp_path / "parts", 6)
    assert get_shard_path(tmp_path / "parts", 0).stat().st_mtime_ns == before
    assert read_file_contents(tmp_path / "parts") == read_file_contents(tmp_path / "whole")


def test_an_interrupted_generation_leaves_only_complete_shards(pipeline: Pipeline, tmp_path: Path) -> None:
    calls = []

    def interrupt(stage: str, done: int, total: int) -> None:
        if stage == "computing hidden states":
            calls.append(done)
            if len(calls) == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(generate_shards(pipeline, CLASSES, 4, tmp_path / "data", interrupt, images_per_shard=2))
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["shard-00000.safetensors"]
    write_shards(pipeline, tmp_path / "data")
    write_shards(pipeline, tmp_path / "whole")
    assert read_file_contents(tmp_path / "data") == read_file_contents(tmp_path / "whole")


def test_shards_of_other_prompts_are_rejected(
    pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shards(pipeline, tmp_path)
    error = catch_error(OutputError, write_shards, pipeline, tmp_path, prompts=Prompts(ClassId, [3, 2]))
    assert error.field == str(get_shard_path(tmp_path, 0))
    get_shard_path(tmp_path, 0).unlink()
    get_shard_path(tmp_path, 0).symlink_to(tmp_path / "nowhere")
    monkeypatch.setattr(Pipeline, "stream", lambda *_, **__: pytest.fail("generated images"))
    with pytest.raises(CheckpointError):
        write_shards(pipeline, tmp_path)


def test_a_bundle_that_generates_groups_of_cells_is_rejected(tmp_path: Path) -> None:
    pipeline = Pipeline.from_bundle(make_order_bundle(tmp_path / "tiny"), threads=1)
    expected = "bundle: bundle tiny generates groups of cells, in an order of its own; use another bundle"
    assert str(catch_error(RequestError, write_shards, pipeline, tmp_path / "data")) == expected
    for read in (read_head_training_target, read_training_target):
        assert str(catch_error(RequestError, read, pipeline.bundle)) == expected


def test_too_few_images_and_damaged_shards_are_rejected(
    pipeline: Pipeline, source: ShardSource, tmp_path: Path
) -> None:
    def expect_open_error() -> CheckpointError:
        return catch_error(CheckpointError, ShardFolder, tmp_path, [source], 256)

    assert expect_open_error().found == "0 images"
    write_shards(pipeline, tmp_path)
    assert len(ShardFolder(tmp_path, [source], 256)) == 4
    path = get_shard_path(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:-100])
    assert str(path) in str(expect_open_error())
    path.unlink()
    os.mkfifo(path)
    assert "a pipe or a device" in str(expect_open_error())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weights", "0" * 64),
        ("weights", 7),
        ("rows", 2),
        ("columns", 8.0),
        ("codes", 512),
        ("width", "64"),
        ("kind", []),
    ],
)
def test_shards_that_contradict_the_bundle_are_rejected(
    pipeline: Pipeline, source: ShardSource, tmp_path: Path, field: str, value: Any
) -> None:
    write_shards(pipeline, tmp_path, 2)
    valid_images = Shard(get_shard_path(tmp_path, 0)).read_images(slice(None))
    write_shard(get_shard_path(tmp_path, 1), replace(source, **{field: value}), valid_images)
    assert str(get_shard_path(tmp_path, 1)) in str(catch_error(CheckpointError, ShardFolder, tmp_path, [source], 256))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("codes", np.full((2, 16), 500, np.int32)),
        ("codes", np.zeros((2, 16), np.float32)),
        ("codes", np.zeros((2, 15), np.int32)),
        ("prefix_lengths", np.full((2, 2), 9, np.int32)),
        ("tokens", np.full((2, 2, 1), 1, np.int32)),
        ("states", np.zeros((2, 2, 16, 63), np.float16)),
        ("states", np.full((2, 2, 16, 64), np.nan, np.float16)),
        ("states", np.full((2, 2, 16, 64), -np.inf, np.float16)),
        ("unaccepted_cells", np.full((2, 16), 16, np.int32)),
        ("unaccepted_states", np.full((2, 2, 16, 64), np.nan, np.float16)),
        ("prompts", [3]),
    ],
)
def test_invalid_numbers_types_or_shapes_are_rejected(
    pipeline: Pipeline, tmp_path: Path, field: str, value: Any
) -> None:
    write_shards(pipeline, tmp_path / "good", 2)
    valid_images = Shard(get_shard_path(tmp_path / "good", 0))
    images = replace(valid_images.read_images(slice(None)), **{field: value})
    if field == "tokens":  # the tokens imply a prefix of two positions, but the prefix of the bundle has one position
        images = replace(images, states=np.zeros((2, 2, 17, 64), np.float16))
    write_shard(tmp_path / "bad.safetensors", valid_images.source, images)
    with pytest.raises(CheckpointError):
        Shard(tmp_path / "bad.safetensors")


def test_tokens_beyond_the_vocabulary_are_rejected(source: ShardSource, tmp_path: Path) -> None:
    two_token_source = replace(source, prefix=2)
    tokens = np.full((2, 2, 1), 256, np.int32)
    states = np.zeros((2, 2, 17, 64), np.float16)
    zeros = np.zeros((2, 16), np.int32)
    unaccepted_states = np.zeros((2, 2, 16, 64), np.float16)
    images = TrainingImages(
        [1, 2], zeros, np.full((2, 2), 2, np.int32), tokens, states, zeros, zeros, unaccepted_states
    )
    write_shard(get_shard_path(tmp_path, 0), two_token_source, images)
    assert len(ShardFolder(tmp_path, [two_token_source], 257)) == 2
    with pytest.raises(CheckpointError):
        ShardFolder(tmp_path, [two_token_source], 256)


@pytest.mark.parametrize("field", ["codes", "states", "prompts"])
def test_a_folders_digest_depends_on_codes_states_and_prompts(
    pipeline: Pipeline, source: ShardSource, tmp_path: Path, field: str
) -> None:
    write_shards(pipeline, tmp_path / "first", 2)
    images = Shard(get_shard_path(tmp_path / "first", 0)).read_images(slice(None))
    changed_value = [1, 2] if field == "prompts" else np.flip(getattr(images, field), 0)
    write_shard(get_shard_path(tmp_path / "second", 0), source, replace(images, **{field: changed_value}))
    assert (
        ShardFolder(tmp_path / "first", [source], 256).digest != ShardFolder(tmp_path / "second", [source], 256).digest
    )


def test_a_folder_is_continued_only_with_the_same_size(
    emu3_bundle: Path, tmp_path: Path, program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lantern_rt.train.drafter.data.IMAGES_PER_SHARD", 2)
    (tmp_path / "prompts.txt").write_text("a red cube")
    command = ["train-drafter", "data", emu3_bundle, "--prompts", "prompts.txt", "--output", "data", "--count", 3]
    code, _, err = program(*command, "--size", "7x7")
    assert (code, err.count("\n")) == (2, 1)
    assert "size: found '7x7', expected 8x8, 10x8, 6x10, 24x4" in err
    assert program(*command, "--size", "10x8")[0] == 0
    shards = [Shard(path) for path in sorted((tmp_path / "data").iterdir())]
    assert [(shard.source.rows, shard.source.columns) for shard in shards] == [(4, 5)] * 2
    code, _, err = program(*command)
    assert (code, err.splitlines()[-1].count("another bundle or size")) == (2, 1)


def test_a_shard_has_fewer_images_if_the_images_are_large(pipeline: Pipeline) -> None:
    manifest = pipeline.bundle.manifest

    def count_images(grid_size: int, hidden_size: int) -> int:
        """Return the images per shard for a square grid of `grid_size` rows."""
        target = manifest.target.model_copy(update={"hidden_size": hidden_size})
        size = manifest.size().model_copy(update={"rows": grid_size, "columns": grid_size})
        return choose_images_per_shard(manifest.model_copy(update={"target": target}), [manifest.size(), size])

    assert [count_images(*sizes) for sizes in ((24, 2048), (32, 4096), (90, 4096), (256, 65_536))] == [64, 64, 8, 1]


def test_more_images_leave_the_validation_images_the_same(
    pipeline: Pipeline, source: ShardSource, tmp_path: Path
) -> None:
    write_shards(pipeline, tmp_path, 24)
    smaller = ShardFolder(tmp_path, [source], 256)
    assert smaller.validation_indices == [22]
    write_shards(pipeline, tmp_path, 46)
    larger = ShardFolder(tmp_path, [source], 256)
    assert larger.validation_indices == [22, 45]
    assert sorted(larger.training_indices + larger.validation_indices) == list(range(46))
    np.testing.assert_array_equal(larger.read_image(21)[0].codes, smaller.read_image(21)[0].codes)
    assert larger.read_image(23)[0].prompts == [CLASSES.items[23 % 3]]
