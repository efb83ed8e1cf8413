"""Requests for many images: they run in batches that fit in memory, with the same images, or are rejected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from same_results import are_same_results, have_same_codes

from lantern_rt import Pipeline, memory
from lantern_rt.bundle.files import open_bundle
from lantern_rt.cli.main import run_program
from lantern_rt.engines import host
from lantern_rt.engines.kv_cache import KVCache
from lantern_rt.memory import BATCH_BYTES, MAX_IMAGES, compute_max_images, estimate_image_memory, largest_settings
from lantern_rt.output.trace import Trace
from lantern_rt.requests import GenerationSettings, resolve_settings

METHODS = ("ar", "eagle", "lantern", "sjd:window=5", None)


@pytest.fixture
def cache_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which every new KV cache appends its number of batch rows."""
    row_counts: list[int] = []
    make_empty_cache = KVCache.empty

    def record_new_cache(count: int, *sizes: Any) -> KVCache:
        row_counts.append(count)
        return make_empty_cache(count, *sizes)

    monkeypatch.setattr(KVCache, "empty", record_new_cache)
    return row_counts


def make_settings(words_bundle: Path, **options: Any) -> GenerationSettings:
    return resolve_settings(open_bundle(words_bundle).manifest, options)


def limit_batches(monkeypatch: pytest.MonkeyPatch, words_bundle: Path, images: int) -> None:
    """Set the maximum memory of a batch to the memory of `images` guided images."""
    manifest = open_bundle(words_bundle).manifest
    size = sum(estimate_image_memory(manifest, largest_settings(manifest)).values())
    monkeypatch.setattr(memory, "BATCH_BYTES", images * size)


@pytest.mark.parametrize("method", METHODS)
def test_splitting_into_batches_does_not_change_the_images(
    pipe: Pipeline, words_bundle: Path, monkeypatch: pytest.MonkeyPatch, method: str | None, cache_rows: list[int]
) -> None:
    request = {"prompts": ["red cube", "a green sphere"], "seed": [3, 90], "num_images": 4, "method": method}
    unsplit = pipe(**request)
    assert max(cache_rows) == 16
    cache_rows.clear()
    limit_batches(monkeypatch, words_bundle, 3)
    split = pipe(**request)
    assert max(cache_rows) == 6
    assert are_same_results(unsplit, split)
    assert split.seeds == [3, 4, 5, 6, 90, 91, 92, 93]
    if method is not None:  # the window of the default method depends on the load
        assert split.stats.images == 8
        assert split.stats.per_image == unsplit.stats.per_image
        assert split.stats.accepted_lengths == unsplit.stats.accepted_lengths
        assert split.stats.tokens_per_forward_pass == pytest.approx(unsplit.stats.tokens_per_forward_pass)
        assert split.stats.realised_tvd == pytest.approx(unsplit.stats.realised_tvd)
        assert split.stats.target_passes > unsplit.stats.target_passes


def test_a_stream_of_many_images_yields_all_tokens(
    pipe: Pipeline, words_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_batches(monkeypatch, words_bundle, 2)
    streamed_codes = [np.zeros(0, np.int64)] * 5
    done = 0
    trace = Trace(6, 6)
    for step in pipe.stream("red cube", num_images=5, method="eagle"):
        assert (step.stats is None) == (step.done < step.total)
        assert (step.done > done, step.total) == (True, 5 * 36)
        done = step.done
        streamed_codes = [np.append(*pair) for pair in zip(streamed_codes, step.new_codes, strict=True)]
        assert have_same_codes(streamed_codes, step.codes)
        assert all(len(step.new_codes[part.sequence]) for part in step.parts)
        assert step.image(4).size == step.image(0).size
        trace.add_step(step)
    assert len({part.image_index for part in trace.trace_steps}) == 5
    assert have_same_codes(streamed_codes, pipe("red cube", num_images=5).codes)


def test_a_short_prompt_needs_less_memory_than_a_long_one(words_bundle: Path) -> None:
    manifest = open_bundle(words_bundle).manifest
    settings = make_settings(words_bundle, method="ar")
    longest = estimate_image_memory(manifest, settings)
    assert estimate_image_memory(manifest, settings, manifest.condition.prefix) == longest
    spec = manifest.condition.model_copy(update={"prefix": 4096})
    large = manifest.model_copy(update={"condition": spec})
    short = estimate_image_memory(large, settings, manifest.condition.prefix)
    maximum = estimate_image_memory(large, settings)
    assert short == longest
    assert maximum["passes"] > 10 * short["passes"]
    assert maximum["cache of the target"] > 10 * short["cache of the target"]


def test_a_batch_has_maximum_images_and_memory(words_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = open_bundle(words_bundle).manifest
    settings = make_settings(words_bundle)
    bytes_per_image = sum(estimate_image_memory(manifest, settings).values())
    monkeypatch.setattr(memory, "available_memory", lambda: 1 << 50)
    assert compute_max_images(manifest, [], settings, 1 << 20, None) == MAX_IMAGES
    # At most 9 rows, and guidance needs two rows per image.
    assert compute_max_images(manifest, [], settings, 9, None) == 4
    assert compute_max_images(manifest, [], settings, 1, None) == 1
    large = manifest.model_copy(update={"target": manifest.target.model_copy(update={"num_layers": 20_000})})
    large_bytes_per_image = sum(estimate_image_memory(large, settings).values())
    assert compute_max_images(large, [], settings, 1 << 20, None) == BATCH_BYTES // large_bytes_per_image < MAX_IMAGES
    monkeypatch.setattr(memory, "available_memory", lambda: 6 * bytes_per_image + 1)
    assert compute_max_images(manifest, [], settings, 1 << 20, None) == 3  # batches use at most half of the free memory
    monkeypatch.setattr(memory, "available_memory", lambda: 0)
    assert compute_max_images(manifest, [], settings, 1 << 20, None) == 1


# ---------------------------------------------------------------- requests that do not fit


def test_too_large_requests_are_rejected_before_loading(
    words_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(memory, "available_memory", lambda: 100_000)
    monkeypatch.setattr(Pipeline, "from_bundle", lambda *_, **__: pytest.fail("a graph was loaded"))
    commands = [["run", str(words_bundle), "red", "--method", "eagle"], ["eval", str(words_bundle)]]
    for command in [*commands, ["bench", str(words_bundle)]]:
        prompt_options = [] if command[0] == "run" else ["--prompts", str(tmp_path / "prompts.txt")]
        (tmp_path / "prompts.txt").write_text("red\ngreen\n")
        assert run_program([*command, *prompt_options]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert "memory: found 0.1 MiB free, expected " in err
        for part in ("weights ", "cache of the target ", "cache of the drafter ", "passes ", "image decoding "):
            assert part in err
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.txt"]


def test_available_memory_respects_the_limit_of_a_control_group(system_files: dict[str, str]) -> None:
    free = host.available_memory()
    assert 0 < free < 1 << 50
    for name, text in (("max", "5000000"), ("current", "4000000"), ("stat", "anon 1\ninactive_file 200000\n")):
        system_files[f"/sys/fs/cgroup/memory.{name}"] = text
    assert host.available_memory() == 1_200_000
    system_files["/sys/fs/cgroup/memory.max"] = "max"
    assert host.available_memory() > 1_200_000


@pytest.mark.parametrize("folder", ["memory", "memory/docker/a"])
def test_available_memory_respects_control_groups_of_version_1(system_files: dict[str, str], folder: str) -> None:
    system_files["/proc/self/cgroup"] = "5:cpu,cpuacct:/docker/a\n4:memory:/docker/a"
    stat = "inactive_file 1\ntotal_inactive_file 200000\n"
    for name, text in (("limit_in_bytes", "5000000"), ("usage_in_bytes", "4000000"), ("stat", stat)):
        system_files[f"/sys/fs/cgroup/{folder}/memory.{name}"] = text
    assert host.available_memory() == 1_200_000
    system_files[f"/sys/fs/cgroup/{folder}/memory.limit_in_bytes"] = "9223372036854771712"  # no limit
    assert host.available_memory() > 1_200_000
