"""Shards of pictures: what is in them, that a folder is continued, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lantern_rt import CheckpointError, OutputError, Pipeline
from lantern_rt.compare.turns import Prompts

pytest.importorskip("safetensors")

from lantern_rt.train.drafter.data import hidden_states, write_shards
from lantern_rt.train.drafter.shards import Shard, ShardFolder, shard_path, target_hash, write_shard

CLASSES = Prompts("class_ids", [3, 1, 4])


@pytest.fixture(scope="module")
def pipeline(c2i_bundle: Path) -> Pipeline:
    return Pipeline.from_bundle(c2i_bundle, threads=1)


def write(pipeline: Pipeline, output: Path, count: int = 4, subjects: Prompts = CLASSES) -> None:
    for _ in write_shards(pipeline, subjects, count, output, lambda *_: None, shard=2):
        pass


def contents(folder: Path) -> dict[str, Any]:
    """What is in the files; safetensors writes the metadata in any order."""
    files = {}
    for path in sorted(folder.iterdir()):
        shard = Shard(path)
        arrays = vars(shard.read(slice(None)))
        files[path.name] = (shard.source, {name: np.asarray(value).tolist() for name, value in arrays.items()})
    return files


def test_a_shard_holds_what_the_pipeline_draws_and_the_targets_hidden_states(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    write(pipeline, tmp_path)
    shard = Shard(shard_path(tmp_path, 1))
    assert shard.subjects == [4, 3]
    pictures = shard.read(slice(None))
    request = CLASSES.request(1, 2, 700_000)
    result = pipeline(**request, method="ar")
    np.testing.assert_array_equal(pictures.codes, result.codes)
    assert pictures.lengths.tolist() == [[1, 1], [1, 1]]
    assert pictures.tokens.shape == (2, 2, 0)
    prompts = list(pipeline.prefixes(pipeline.engines, pipeline.check(**request, method="ar").images))
    states = hidden_states(pipeline, prompts, pictures.codes)
    np.testing.assert_allclose(pictures.states.reshape(4, 16, 64), states, rtol=1e-3, atol=1e-3)


def test_a_folder_is_continued_and_its_shards_are_left(pipeline: Pipeline, tmp_path: Path) -> None:
    write(pipeline, tmp_path / "whole", 6)
    write(pipeline, tmp_path / "parts", 2)
    before = shard_path(tmp_path / "parts", 0).stat().st_mtime_ns
    write(pipeline, tmp_path / "parts", 6)
    assert shard_path(tmp_path / "parts", 0).stat().st_mtime_ns == before
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


def test_an_interrupted_folder_holds_whole_shards_only(pipeline: Pipeline, tmp_path: Path) -> None:
    begun = []

    def interrupt(what: str, done: int, total: int) -> None:
        if what == "computing hidden states":
            begun.append(done)
            if len(begun) == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(write_shards(pipeline, CLASSES, 4, tmp_path / "data", interrupt, shard=2))
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["shard-00000.safetensors"]
    write(pipeline, tmp_path / "data")
    write(pipeline, tmp_path / "whole")
    assert contents(tmp_path / "data") == contents(tmp_path / "whole")


def test_a_folder_of_other_prompts_is_refused(pipeline: Pipeline, tmp_path: Path) -> None:
    write(pipeline, tmp_path)
    with pytest.raises(OutputError) as refusal:
        write(pipeline, tmp_path, subjects=Prompts("class_ids", [3, 2]))
    assert refusal.value.field == str(shard_path(tmp_path, 0))


def test_data_of_other_weights_and_damaged_data_are_refused(pipeline: Pipeline, tmp_path: Path) -> None:
    weights = target_hash(pipeline.bundle.manifest)

    def refusal(weights: str) -> CheckpointError:
        with pytest.raises(CheckpointError) as caught:
            ShardFolder(tmp_path, weights)
        return caught.value

    assert refusal(weights).found == "no shards"
    write(pipeline, tmp_path)
    assert len(ShardFolder(tmp_path, weights)) == 4
    assert weights[:12] in refusal("0" * 64).found
    path = shard_path(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:-100])
    assert path.name in str(refusal(weights))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("codes", np.full((2, 16), 500, np.int32)),
        ("codes", np.zeros((2, 15), np.int32)),
        ("lengths", np.full((2, 2), 9, np.int32)),
        ("tokens", np.full((2, 2, 1), -1, np.int32)),
        ("states", np.zeros((2, 2, 16, 63), np.float16)),
    ],
)
def test_numbers_out_of_range_and_other_shapes_are_refused(
    pipeline: Pipeline, tmp_path: Path, field: str, value: Any
) -> None:
    write(pipeline, tmp_path / "good", 2)
    good = Shard(shard_path(tmp_path / "good", 0))
    pictures = replace(good.read(slice(None)), **{field: value})
    if field == "tokens":
        pictures = replace(pictures, states=np.zeros((2, 2, 17, 64), np.float16))
    write_shard(tmp_path / "bad.safetensors", good.source, pictures)
    with pytest.raises(CheckpointError):
        Shard(tmp_path / "bad.safetensors")


def test_pictures_of_validation_stay_the_same_when_more_are_drawn(pipeline: Pipeline, tmp_path: Path) -> None:
    weights = target_hash(pipeline.bundle.manifest)
    write(pipeline, tmp_path, 24)
    few = ShardFolder(tmp_path, weights)
    assert few.validation == [22]
    write(pipeline, tmp_path, 46)
    many = ShardFolder(tmp_path, weights)
    assert many.validation == [22, 45]
    assert sorted(many.training + many.validation) == list(range(46))
    np.testing.assert_array_equal(many.picture(21).codes, few.picture(21).codes)
    assert many.picture(23).subjects == [CLASSES.items[23 % 3]]
