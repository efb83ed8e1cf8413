"""Pipelines of tiny bundles: results, streams, and images that do not depend on the rest of the batch."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from same_results import have_same_codes
from tiny_bundle import CAPTION, CELL, PREFIX, make_tiny_bundle

from lantern_rt import EngineError, Pipeline, RequestError, Result
from lantern_rt.output.images import GREY

METHODS = ("ar", "eagle", "lantern", "lantern++", "sjd")
PROMPTS = ["red sphere on sand", "a green cube", "red cube on snow"]


@pytest.fixture(scope="module")
def embeds_pipe(embeddings_bundle: Path) -> Pipeline:
    return Pipeline.from_bundle(embeddings_bundle, threads=1)


def is_same_image(first: Result, second: Result, i: int, j: int = 0) -> bool:
    """Return whether image `i` of one result and image `j` of another have the same tokens and pixels."""
    return np.array_equal(first.codes[i], second.codes[j]) and first.images[i].tobytes() == second.images[j].tobytes()


# ---------------------------------------------------------------- results


def test_a_prompt_generates_an_image_tokens_and_statistics(pipe: Pipeline) -> None:
    result = pipe("red sphere on sand", seed=7)
    (image,) = result.images
    assert image.size == (6 * CELL, 6 * CELL)
    assert image.mode == "RGB"
    assert result.codes[0].shape == (36,)
    assert result.codes[0].dtype == np.int64
    assert (result.seeds, result.prompts) == ([7], ["red sphere on sand"])
    assert result.stats.method == result.settings.method.method
    assert result.settings.method.exact
    assert result.stats.images == 1


def test_results_and_steps_print_as_one_line(pipe: Pipeline) -> None:
    result = pipe(PROMPTS, method="ar")
    assert repr(result).startswith(f"<Result: 3 images of {6 * CELL}x{6 * CELL}, ar, 1.00 tokens per pass, ")
    *_, last = pipe.stream("red cube", method="ar")
    assert repr(last) == "<StreamStep: 36 of 36 codes, ar>"
    assert max(map(len, map(repr, (result, result.stats, result.settings, last)))) < 500


def test_a_notebook_shows_the_images_of_a_result(pipe: Pipeline) -> None:
    result = pipe(PROMPTS)
    assert result._repr_html_().count('<img src="data:image/png;base64,') == 3
    assert repr(pipe) == "<Pipeline: tiny, 24x24, onnxruntime-cpu, threads: 1>"


@pytest.mark.parametrize(
    ("name", "hint"),
    [("to", "provider"), ("save_pretrained", "copy the folder"), ("strem", "did you mean stream"), ("x", "'x'$")],
)
def test_a_missing_attribute_says_what_has_its_place(pipe: Pipeline, name: str, hint: str) -> None:
    with pytest.raises(AttributeError, match=hint):
        getattr(pipe, name)


@pytest.mark.parametrize("method", METHODS)
def test_images_are_the_same_alone_and_in_a_batch(pipe: Pipeline, method: str) -> None:
    batch_result = pipe(PROMPTS, seed=3, num_images=2, method=method)
    for i, prompt in enumerate(PROMPTS):
        for j in range(2):
            assert is_same_image(batch_result, pipe(prompt, seed=3 + j, method=method), 2 * i + j)


def test_several_threads_can_use_one_pipeline(words_bundle: Path) -> None:
    pipe = Pipeline.from_bundle(words_bundle, threads=1)  # its graphs are loaded by the first request that needs them
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda method: pipe(PROMPTS[0], seed=5, method=method), METHODS * 2))
    for method, first, second in zip(METHODS, results[: len(METHODS)], results[len(METHODS) :], strict=True):
        alone = pipe(PROMPTS[0], seed=5, method=method)
        assert is_same_image(first, alone, 0)
        assert is_same_image(second, alone, 0)


def test_drafter_and_neighbours_are_loaded_when_needed(words_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = Pipeline.from_bundle(words_bundle, threads=1)
    loaded_parts: list[str] = []
    engines = type(pipe.engines)
    bundle = type(pipe.bundle)
    drafter = engines.drafter.fget
    table = bundle.neighbor_table.func
    monkeypatch.setattr(engines, "drafter", property(lambda self: loaded_parts.append("drafter") or drafter(self)))
    monkeypatch.setattr(bundle, "neighbor_table", property(lambda self: loaded_parts.append("table") or table(self)))
    pipe("red", method="ar")
    assert loaded_parts == []
    pipe("red", method="eagle")
    assert loaded_parts == ["drafter"]
    pipe("red", method="lantern")
    assert loaded_parts == ["drafter", "drafter", "table"]


# ---------------------------------------------------------------- prompts, classes and embeddings


def test_guidance_moves_away_from_the_negative_prompt(pipe: Pipeline) -> None:
    codes, negative_codes = (pipe("red cube", seed=1, negative_prompt=text).codes[0] for text in ("", "green sphere"))
    assert codes.tolist() == pipe("red cube", seed=1).codes[0].tolist() != negative_codes.tolist()
    # With the same text as negative prompt, both rows are equal, and guidance has no effect.
    same_prompt_codes = pipe("red cube", seed=1, negative_prompt="red cube").codes[0]
    assert same_prompt_codes.tolist() == pipe("red cube", seed=1, cfg_scale=1).codes[0].tolist()


@pytest.mark.parametrize("method", ["ar", "sjd:window=3", "eagle:tree=tree-2-10", "rows:window=2", "lantern"])
def test_guiding_all_or_no_tokens_equals_full_or_no_guidance(pipe: Pipeline, method: str) -> None:
    guided, unguided = (pipe("red cube", seed=1, method=method, cfg_scale=scale).codes[0] for scale in (20, 1))
    assert guided.tolist() != unguided.tolist()
    for count, expected in ((36, guided), ("100%", guided), (0, unguided), ("0%", unguided)):
        result = pipe("red cube", seed=1, method=method, cfg_scale=20, cfg_tokens=count)
        assert result.codes[0].tolist() == expected.tolist()


def test_images_can_be_generated_from_class_ids(class_bundle: Path) -> None:
    class_pipe = Pipeline.from_bundle(class_bundle, threads=1)
    batch_result = class_pipe(class_ids=[3, 9], seed=2)
    assert batch_result.prompts == [3, 9]
    assert is_same_image(batch_result, class_pipe(class_ids=9, seed=2), 1)
    assert is_same_image(batch_result, class_pipe(class_ids=np.array([3, 9]), seed=2), 0)


def test_embeddings_are_padded_on_the_left(embeds_pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    condition_inputs = []
    compute = embeds_pipe.engines.compute_condition

    def record(inputs: Any) -> Any:
        condition_inputs.append(inputs)
        return compute(inputs)

    monkeypatch.setattr(embeds_pipe.engines, "compute_condition", record)
    values = np.arange(2 * PREFIX * CAPTION, dtype=np.float32).reshape(2, PREFIX, CAPTION)
    mask = np.array([[1, 1, 0, 0], [1, 1, 1, 1]])
    values[0, 3] = np.nan  # padding may have any value
    result = embeds_pipe(embeddings=(values, mask))
    assert result.prompts == [None, None]
    np.testing.assert_array_equal(condition_inputs[0]["caption_mask"], [[0, 0, 1, 1]])
    np.testing.assert_array_equal(condition_inputs[0]["caption_embeds"][0, 2:], values[0, :2])
    assert not condition_inputs[0]["caption_embeds"][0, :2].any()
    np.testing.assert_array_equal(condition_inputs[1]["caption_embeds"][0], values[1])


def test_short_embeddings_without_a_mask_have_no_padding(embeds_pipe: Pipeline) -> None:
    values = np.random.default_rng(0).normal(size=(3, CAPTION))
    padded = np.vstack([values, np.zeros((1, CAPTION))])
    short = embeds_pipe(embeddings=values)
    assert is_same_image(short, embeds_pipe(embeddings=(padded, [1, 1, 1, 0])), 0)


# ---------------------------------------------------------------- streams


@pytest.mark.parametrize("method", METHODS)
def test_a_stream_ends_with_the_result_of_a_call(pipe: Pipeline, method: str) -> None:
    result = pipe(PROMPTS, seed=1, method=method)
    streamed_codes = [np.zeros(0, np.int64)] * 3
    done = 0
    for step in pipe.stream(PROMPTS, seed=1, method=method):
        assert step.done > done
        done = step.done
        streamed_codes = [np.append(*pair) for pair in zip(streamed_codes, step.new_codes, strict=True)]
        assert have_same_codes(streamed_codes, step.codes)
        assert step.done == sum(len(codes) for codes in streamed_codes)
        assert (step.stats is None) == (step.done < step.total)
    assert step.stats is not None
    assert step.stats.accepted_lengths == result.stats.accepted_lengths
    assert have_same_codes(step.codes, result.codes)
    assert step.image(1).tobytes() == result.images[1].tobytes()


def test_a_partial_image_is_grey_where_tokens_are_missing(pipe: Pipeline) -> None:
    whole = np.asarray(pipe("red cube", seed=1).images[0])
    for step in pipe.stream("red cube", seed=1):
        known = np.zeros((6, 6), bool)
        known.flat[: len(step.codes[0])] = True
        known = known.repeat(CELL, 0).repeat(CELL, 1)
        partial = np.asarray(step.image(0))
        assert (partial[known] == whole[known]).all()
        assert (partial[~known] == GREY).all()


def test_a_callback_gets_every_step_and_its_error_ends_the_call(pipe: Pipeline) -> None:
    done_counts: list[int] = []
    result = pipe("red cube", method="ar", callback_on_step=lambda step: done_counts.append(step.done))
    assert done_counts == [step.done for step in pipe.stream("red cube", method="ar")]
    assert done_counts[-1] == len(result.codes[0])
    with pytest.raises(ZeroDivisionError):
        pipe("red cube", callback_on_step=lambda step: 1 // 0)


def test_a_call_prints_progress_only_if_requested(
    pipe: Pipeline, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    result = pipe("red cube", progress=True)
    assert f"[{len(result.codes[0])}/{len(result.codes[0])}]" in capsys.readouterr().err
    pipe("red cube")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("kind", ["full", "closed", "missing"])
def test_progress_that_cannot_be_written_does_not_lose_the_image(
    kind: str, pipe: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open("/dev/full", "w", buffering=1) as stream:
        if kind == "closed":
            stream.close()
        monkeypatch.setattr(sys, "stderr", None if kind == "missing" else stream)
        assert pipe("red cube", progress=True).images
        monkeypatch.undo()
        with suppress(OSError, ValueError):
            stream.close()


def test_closing_a_stream_cancels_the_request(pipe: Pipeline) -> None:
    stream = pipe.stream(PROMPTS, seed=1)
    next(stream)
    stream.close()
    with pytest.raises(StopIteration):
        next(stream)
    assert is_same_image(pipe(PROMPTS[0], seed=1), pipe(PROMPTS[0], seed=1), 0)


def test_a_stream_rejects_a_wrong_request_before_its_first_step(pipe: Pipeline) -> None:
    with pytest.raises(RequestError, match="delta"):
        pipe.stream("red cube", delta=2)


# ---------------------------------------------------------------- damaged weights and extreme settings


def test_a_target_with_nan_weights_raises_an_error(tmp_path: Path) -> None:
    pipe = Pipeline.from_bundle(make_tiny_bundle(tmp_path / "tiny", weight_offset=float("nan")), threads=1)
    for options in ({"method": "ar"}, {"method": "eagle"}, {"temperature": 0}):
        with pytest.raises(EngineError, match="NaN"):
            pipe("red cube", **options)


@pytest.mark.parametrize("penalty", [0.01, 100.0])
@pytest.mark.parametrize("temperature", [0.001, 1000.0])
@pytest.mark.parametrize("cfg_scale", [0.0, 1e-300, 1000.0])
def test_extreme_values_of_settings_generate_an_image(
    pipe: Pipeline, cfg_scale: float, temperature: float, penalty: float
) -> None:
    options = {"cfg_scale": cfg_scale, "temperature": temperature, "repetition_penalty": penalty}
    expected = pipe("red cube", method="ar", **options).codes[0]
    for top_p in (1e-300, 1.0):
        assert len(pipe("red cube", method="lantern++", top_p=top_p, **options).codes[0]) == len(expected)
    assert np.array_equal(pipe("red cube", method="eagle", **options).codes[0], expected)


FORKING_PROGRAM = """
import asyncio, os, sys, threading, time
from lantern_rt import AsyncPipeline, Pipeline, RequestError
from lantern_rt.service import Service
pipe = Pipeline.from_bundle(sys.argv[1], threads=2)
pipe("red cube")
service = Service(pipe)
shared = AsyncPipeline(pipe)
def generate(): return asyncio.run(shared.generate("red cube", num_images=64, method="ar"))
threading.Thread(target=generate, daemon=True).start()
while not shared.service.num_images: time.sleep(0.001)
def hold():
    with vars(service)["_changed"]:
        held.set()
        time.sleep(600)
held = threading.Event()
threading.Thread(target=hold, daemon=True).start()
held.wait()
if os.fork() == 0:
    for call in (lambda: pipe("red cube"), lambda: service.submit(print, "red cube"), generate):
        try:
            call()
        except RequestError as error:
            print(error.field, error.problem, flush=True)
    with service, Pipeline.from_bundle(sys.argv[1], threads=2) as other:
        print(len(other("red cube").images), flush=True)
    asyncio.run(shared.close())
    sys.exit(3)
print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
os._exit(0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no os.fork")
def test_a_forked_process_must_load_a_new_pipeline(words_bundle: Path) -> None:
    program = [sys.executable, "-c", FORKING_PROGRAM, str(words_bundle)]
    process = subprocess.run(program, capture_output=True, text=True, check=True, timeout=120)
    assert process.stdout.splitlines() == 3 * ["pipeline loaded before this process was forked"] + ["1", "3"]
