"""Requests of many images: decoded in batches by memory, each image as it would be alone; refused where none fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lantern_rt import Pipeline, Result, memory
from lantern_rt.bundle.files import open_bundle
from lantern_rt.cli.main import run_program
from lantern_rt.engines import host
from lantern_rt.engines.kv_cache import KVCache
from lantern_rt.memory import BATCH_BYTES, MAX_IMAGES, fit_images, image_bytes, largest_settings
from lantern_rt.output.trace import Trace
from lantern_rt.requests import Settings, resolve_settings

METHODS = ("ar", "eagle", "lantern", "sjd:window=5", None)


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every cache that is made."""
    made: list[int] = []
    real = KVCache.empty

    def empty(count: int, *sizes: Any) -> KVCache:
        made.append(count)
        return real(count, *sizes)

    monkeypatch.setattr(KVCache, "empty", empty)
    return made


def settings(words_bundle: Path, **options: Any) -> Settings:
    return resolve_settings(open_bundle(words_bundle).manifest, options)


def room_for(monkeypatch: pytest.MonkeyPatch, words_bundle: Path, images: int) -> None:
    """Memory for so many images at a time, with guidance."""
    manifest = open_bundle(words_bundle).manifest
    size = sum(image_bytes(manifest, largest_settings(manifest)).values())
    monkeypatch.setattr(memory, "BATCH_BYTES", images * size)


def same(one: Result, other: Result) -> bool:
    pairs = zip(one.codes, other.codes, strict=True)
    return all(np.array_equal(a, b) for a, b in pairs) and [a.tobytes() for a in one.images] == [
        b.tobytes() for b in other.images
    ]


@pytest.mark.parametrize("method", METHODS)
def test_images_are_the_same_however_a_request_is_split(
    pipe: Pipeline, words_bundle: Path, monkeypatch: pytest.MonkeyPatch, method: str | None, rows: list[int]
) -> None:
    asked = {"prompts": ["red cube", "a green sphere"], "seed": [3, 90], "num_images": 4, "method": method}
    whole = pipe(**asked)
    assert max(rows) == 16
    rows.clear()
    room_for(monkeypatch, words_bundle, 3)
    parts = pipe(**asked)
    assert max(rows) == 6
    assert same(whole, parts)
    assert parts.seeds == [3, 4, 5, 6, 90, 91, 92, 93]
    if method is not None:  # whose window follows the load
        assert parts.stats.images == 8
        assert parts.stats.per_image == whole.stats.per_image
        assert parts.stats.accepted_lengths == whole.stats.accepted_lengths
        assert parts.stats.tokens_per_forward_pass == pytest.approx(whole.stats.tokens_per_forward_pass)
        assert parts.stats.realised_tvd == pytest.approx(whole.stats.realised_tvd)
        assert parts.stats.target_passes > whole.stats.target_passes


def test_a_stream_of_more_images_than_fit_grows_to_all_and_has_statistics_once(
    pipe: Pipeline, words_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room_for(monkeypatch, words_bundle, 2)
    grown = [np.zeros(0, np.int64)] * 5
    done = 0
    trace = Trace(6, 6)
    for step in pipe.stream("red cube", num_images=5, method="eagle"):
        assert (step.stats is None) == (step.done < step.total)
        assert (step.done > done, step.total) == (True, 5 * 36)
        done = step.done
        grown = [np.append(old, new) for old, new in zip(grown, step.new_codes, strict=True)]
        assert all(np.array_equal(one, other) for one, other in zip(grown, step.codes, strict=True))
        assert {part.sequence for part in step.parts} <= {i for i, new in enumerate(step.new_codes) if len(new)}
        assert step.image(4).size == step.image(0).size
        trace.add(step)
    assert trace.accepted_per_cell().shape == (5, 36)
    assert all(
        np.array_equal(one, other) for one, other in zip(grown, pipe("red cube", num_images=5).codes, strict=True)
    )


def test_a_short_prompt_takes_less_memory_than_the_longest_one(words_bundle: Path) -> None:
    manifest = open_bundle(words_bundle).manifest
    asked = settings(words_bundle, method="ar")
    longest = image_bytes(manifest, asked)
    assert image_bytes(manifest, asked, manifest.condition.prefix) == longest
    spec = manifest.condition.model_copy(update={"prefix": 4096})
    large = manifest.model_copy(update={"condition": spec})
    short = image_bytes(large, asked, manifest.condition.prefix)
    most = image_bytes(large, asked)
    assert short == longest
    assert most["passes"] > 10 * short["passes"]
    assert most["cache of the target"] > 10 * short["cache of the target"]


def test_images_together_are_bounded_in_number_and_memory(words_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = open_bundle(words_bundle).manifest
    asked = settings(words_bundle)
    one = sum(image_bytes(manifest, asked).values())
    monkeypatch.setattr(memory, "available_memory", lambda: 1 << 50)
    assert fit_images(manifest, [], asked, 1 << 20, None) == MAX_IMAGES
    assert fit_images(manifest, [], asked, 9, None) == 4  # rows of an engine; guidance makes two of an image
    assert fit_images(manifest, [], asked, 1, None) == 1
    large = manifest.model_copy(update={"target": manifest.target.model_copy(update={"num_layers": 20_000})})
    each = sum(image_bytes(large, asked).values())
    assert fit_images(large, [], asked, 1 << 20, None) == BATCH_BYTES // each < MAX_IMAGES
    monkeypatch.setattr(memory, "available_memory", lambda: 6 * one + 1)
    assert fit_images(manifest, [], asked, 1 << 20, None) == 3  # half of what is free
    monkeypatch.setattr(memory, "available_memory", lambda: 0)
    assert fit_images(manifest, [], asked, 1 << 20, None) == 1


# ---------------------------------------------------------------- what does not fit


def test_run_refuses_with_the_numbers_before_anything_is_loaded(
    words_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(memory, "available_memory", lambda: 100_000)
    monkeypatch.setattr(Pipeline, "from_bundle", lambda *_, **__: pytest.fail("loaded"))
    commands = [["run", str(words_bundle), "red", "--method", "eagle"], ["eval", str(words_bundle)]]
    for command in [*commands, ["bench", str(words_bundle)]]:
        more = [] if command[0] == "run" else ["--prompts", str(tmp_path / "prompts.txt")]
        (tmp_path / "prompts.txt").write_text("red\ngreen\n")
        assert run_program([*command, *more]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert "memory: found 0.1 MiB free, expected " in err
        for part in ("weights ", "cache of the target ", "cache of the drafter ", "passes ", "image decoding "):
            assert part in err
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.txt"]


def test_the_memory_of_a_control_group_counts(system_files: dict[str, str]) -> None:
    free = host.available_memory()
    assert 0 < free < 1 << 50
    for name, text in (("max", "5000000"), ("current", "4000000"), ("stat", "anon 1\ninactive_file 200000\n")):
        system_files[f"/sys/fs/cgroup/memory.{name}"] = text
    assert host.available_memory() == 1_200_000
    system_files["/sys/fs/cgroup/memory.max"] = "max"
    assert host.available_memory() > 1_200_000


@pytest.mark.parametrize("folder", ["memory", "memory/docker/a"])
def test_the_memory_of_a_control_group_of_version_1_counts(system_files: dict[str, str], folder: str) -> None:
    system_files["/proc/self/cgroup"] = "5:cpu,cpuacct:/docker/a\n4:memory:/docker/a"
    stat = "inactive_file 1\ntotal_inactive_file 200000\n"
    for name, text in (("limit_in_bytes", "5000000"), ("usage_in_bytes", "4000000"), ("stat", stat)):
        system_files[f"/sys/fs/cgroup/{folder}/memory.{name}"] = text
    assert host.available_memory() == 1_200_000
    system_files[f"/sys/fs/cgroup/{folder}/memory.limit_in_bytes"] = "9223372036854771712"  # no limit
    assert host.available_memory() > 1_200_000
