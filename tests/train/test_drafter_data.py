"""Shards of pictures: what is in them, that a folder is gone on with, and what is refused."""

from __future__ import annotations

import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from refusals import refused

from lantern_rt import CheckpointError, OutputError, Pipeline, RequestError
from lantern_rt.compare.turns import Subjects
from lantern_rt.planning.acceptance_statistics import weights_of

pytest.importorskip("safetensors")

from lantern_rt.train.drafter.data import drawing_jobs, encoding_jobs, states_of, write_shards
from lantern_rt.train.drafter.shards import Data, Shard, shard_path, write_shard

CLASSES = Subjects("class_ids", [3, 1, 4])


@pytest.fixture(scope="module")
def pipeline(c2i_bundle: Path) -> Pipeline:
    return Pipeline.from_bundle(c2i_bundle, threads=1)


def write(pipeline: Pipeline, output: Path, count: int = 4, states: bool = True, subjects: Subjects = CLASSES) -> None:
    for _ in write_shards(pipeline, drawing_jobs(pipeline, subjects, count, 2), output, states, lambda *_: None):
        pass


def contents(folder: Path) -> dict[str, Any]:
    """What is in the files; safetensors writes the metadata in any order."""
    found = {}
    for path in sorted(folder.iterdir()):
        shard = Shard(path)
        arrays = vars(shard.read(slice(None)))
        found[path.name] = (shard.source, {name: np.asarray(value).tolist() for name, value in arrays.items()})
    return found


def test_a_shard_holds_what_the_pipeline_draws_and_the_targets_hidden_states(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    write(pipeline, tmp_path)
    shard = Shard(shard_path(tmp_path, 1))
    assert shard.subjects == [4, 3]
    found = shard.read(slice(None))
    request = CLASSES.request(1, 2, 700_000)
    drawn = pipeline(**request, method="ar")
    np.testing.assert_array_equal(found.codes, drawn.codes)
    assert found.lengths.tolist() == [[1, 1], [1, 1]]
    assert found.tokens.shape == (2, 2, 0)
    prompts = list(pipeline.prefixes(pipeline.engines, pipeline.check(**request, method="ar").images))
    states = states_of(pipeline, prompts, found.codes)
    assert found.states is not None
    np.testing.assert_allclose(found.states.reshape(4, 16, 64), states, rtol=1e-3, atol=1e-3)
    hidden = found.states[0].astype(np.float32)  # each predicts a code: their logits are what decoding sees
    assert np.isfinite(hidden).all()


def test_without_hidden_states_a_shard_is_small(pipeline: Pipeline, tmp_path: Path) -> None:
    write(pipeline, tmp_path / "with")
    write(pipeline, tmp_path / "without", states=False)
    sizes = [shard_path(tmp_path / kind, 0).stat().st_size for kind in ("with", "without")]
    assert sizes[1] < 0.2 * sizes[0]


def test_a_folder_is_gone_on_with_and_its_shards_are_left(pipeline: Pipeline, tmp_path: Path) -> None:
    write(pipeline, tmp_path / "whole", 6)
    write(pipeline, tmp_path / "parts", 2)
    before = shard_path(tmp_path / "parts", 0).stat().st_mtime_ns
    write(pipeline, tmp_path / "parts", 6)
    assert shard_path(tmp_path / "parts", 0).stat().st_mtime_ns == before
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


def test_an_interrupted_folder_holds_whole_shards_only(pipeline: Pipeline, tmp_path: Path) -> None:
    def interrupt(what: str, done: int, total: int) -> None:
        if done > 0.7 * total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(write_shards(pipeline, drawing_jobs(pipeline, CLASSES, 4, 2), tmp_path / "data", False, interrupt))
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["shard-00000.safetensors"]
    write(pipeline, tmp_path / "data", states=False)
    write(pipeline, tmp_path / "whole", states=False)
    assert contents(tmp_path / "data") == contents(tmp_path / "whole")


def test_a_full_disk_leaves_no_half_shard(pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> int:
        with path.open("wb") as file:
            file.write(data[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with refused(OutputError, "shard-00000", "cannot be written (No space left on device)"):
        write(pipeline, tmp_path / "data")
    assert list(tmp_path.rglob("*")) == []


def test_too_small_a_disk_is_refused_before_anything_is_drawn(
    pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1000))
    monkeypatch.setattr(pipeline, "stream", None)
    with refused(OutputError, "4 pictures take up to 0.00 GB, but the disk has 0.00 GB free", "no hidden states"):
        write(pipeline, tmp_path / "data")


def test_a_folder_of_other_prompts_or_options_is_refused(pipeline: Pipeline, tmp_path: Path) -> None:
    write(pipeline, tmp_path)
    for other in ({"subjects": Subjects("class_ids", [3, 2])}, {"states": False}):
        with refused(OutputError, "shard-00000.safetensors: is of another bundle, other prompts", "another --output"):
            write(pipeline, tmp_path, **other)  # type: ignore[arg-type]


def test_data_of_other_weights_and_damaged_data_are_refused(pipeline: Pipeline, tmp_path: Path) -> None:
    weights = weights_of(pipeline.bundle.manifest)["target"]
    with refused(CheckpointError, "found no shards", "train-drafter data"):
        Data(tmp_path, weights)
    write(pipeline, tmp_path)
    assert len(Data(tmp_path, weights)) == 4
    with refused(CheckpointError, "was drawn with the weights", "give the bundle that it was made with"):
        Data(tmp_path, "0" * 64)
    path = shard_path(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:-100])
    with refused(CheckpointError, "shard-00001", "expected drafter data in safetensors", "make the data again"):
        Data(tmp_path, weights)


@pytest.mark.parametrize(("field", "change"), [("codes", 500), ("lengths", 9), ("tokens", -1)])
def test_numbers_out_of_range_are_refused(pipeline: Pipeline, tmp_path: Path, field: str, change: int) -> None:
    write(pipeline, tmp_path / "good", 2)
    good = Shard(shard_path(tmp_path / "good", 0))
    pictures = good.read(slice(None))
    changed: dict[str, Any] = {field: np.full_like(getattr(pictures, field), change)}
    if field == "tokens":
        changed = {"tokens": np.full((2, 2, 1), change, np.int32), "states": None}
    source = replace(good.source, states=changed.get("states", 1) is not None)
    write_shard(tmp_path / "bad.safetensors", source, replace(pictures, **changed))
    with refused(CheckpointError, "bad.safetensors", "outside"):
        Shard(tmp_path / "bad.safetensors")


def test_pictures_of_validation_stay_the_same_when_more_are_drawn(pipeline: Pipeline, tmp_path: Path) -> None:
    weights = weights_of(pipeline.bundle.manifest)["target"]
    write(pipeline, tmp_path, 24, states=False)
    few = Data(tmp_path, weights)
    assert few.validation == [22]
    write(pipeline, tmp_path, 46, states=False)
    many = Data(tmp_path, weights)
    assert many.validation == [22, 45]
    assert sorted(many.training + many.validation) == list(range(46))
    np.testing.assert_array_equal(many.picture(21).codes, few.picture(21).codes)
    assert many.picture(23).subjects == [CLASSES.items[23 % 3]]


def test_a_folder_of_pictures_is_encoded_with_its_captions(pipeline: Pipeline, tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    drawn = pipeline(class_ids=[2, 5], seed=1, method="ar")
    for name, image, label in zip("ba", drawn.images, (2, 5), strict=True):
        image.resize((image.width * 2, image.height * 2), Image.Resampling.NEAREST).save(photos / f"{name}.png")
        (photos / f"{name}.txt").write_text(f" {label}\n")
    list(write_shards(pipeline, encoding_jobs(pipeline, photos), tmp_path / "data", True, lambda *_: None))
    shard = Shard(shard_path(tmp_path / "data", 0))
    assert shard.subjects == [5, 2]  # in order of names
    pixels = np.asarray(drawn.images[1].convert("RGB"), np.float32).transpose(2, 0, 1)[None] / 127.5 - 1
    encoded = pipeline.engines.vq_encoder(pixels)[0]
    assert (shard.read(slice(0, 1)).codes[0] == encoded).mean() > 0.3  # of 128; sizes were changed on the way


def test_pictures_without_captions_are_refused(pipeline: Pipeline, tmp_path: Path) -> None:
    with refused(RequestError, "pictures", "found none", ".png"):
        encoding_jobs(pipeline, tmp_path)
    Image.new("RGB", (8, 8)).save(tmp_path / "x.png")
    with refused(RequestError, "x.txt: cannot be read", "write one for x.png"):
        encoding_jobs(pipeline, tmp_path)
    (tmp_path / "x.txt").write_text("a dog")
    with refused(RequestError, "x.txt: found 'a dog', expected a class id"):
        encoding_jobs(pipeline, tmp_path)
    (tmp_path / "x.txt").write_text("3")
    (tmp_path / "x.png").write_bytes(b"no picture")
    jobs = encoding_jobs(pipeline, tmp_path)
    with refused(RequestError, "x.png: cannot be read", "expected a picture; save it again"):
        list(write_shards(pipeline, jobs, tmp_path / "data", False, lambda *_: None))
    assert not (tmp_path / "data").exists()
