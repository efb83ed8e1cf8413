"""GLM-Image, which generates a small and a large grid in a sequence, and bundles without an image decoder."""

from __future__ import annotations

import asyncio
import json
import runpy
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from device_pipeline import load_device_pipeline
from PIL import Image
from shared_passes import generate_in_shared_passes

from lantern_rt import AsyncPipeline, Pipeline
from lantern_rt.errors import RequestError
from lantern_rt.subjects.source_image import SourceImage

torch = pytest.importorskip("torch")
CHECKPOINTS = Path(__file__).parent.parent / "data/glm-image"
TRACES: list[dict[str, Any]] = [
    trace
    for trace in json.loads((CHECKPOINTS / "traces.json").read_text())
    if not trace["sample"] and trace["name"] != "i2i"
]
(SOURCE_TRACE,) = [trace for trace in json.loads((CHECKPOINTS / "traces.json").read_text()) if trace["name"] == "i2i"]
METHODS = ["ar", "sjd:window=3", "sjd:window=7", "sjd:window=15"]
# These windows are as wide as the widest grid, so that the method `rows` is exact, too.
ROWS_METHODS = ["rows:window=6", "rows:window=6:drafts=2"]
LoadPipeline = Callable[[bool], Pipeline]


@pytest.fixture(scope="module")
def load_pipeline(glm_image_bundle: Path) -> LoadPipeline:
    """Return a function that loads a pipeline; `on_device` runs the graphs for accelerators on the CPU."""

    @cache
    def load(on_device: bool) -> Pipeline:
        return (
            load_device_pipeline(glm_image_bundle) if on_device else Pipeline.from_bundle(glm_image_bundle, threads=1)
        )

    return load


def make_options(trace: dict[str, Any]) -> dict[str, Any]:
    return {"prompts": trace["prompt"], "size": f"{trace['width']}x{trace['height']}", "temperature": 0}


@pytest.mark.parametrize("on_device", [False, True], ids=["cpu", "device"])
@pytest.mark.parametrize("method", [*METHODS, *ROWS_METHODS])
def test_greedy_generations_have_the_published_codes(load_pipeline: LoadPipeline, method: str, on_device: bool) -> None:
    pipe = load_pipeline(on_device)
    for trace in TRACES:
        result = pipe(**make_options(trace), method=method)
        assert result.images == []
        # The last generated id follows the image.
        assert result.codes[0].tolist() == trace["generated_ids"][: trace["max_new_tokens"] - 1]
    requests = [make_options(trace) | {"method": method} for trace in TRACES]
    for step, trace in zip(generate_in_shared_passes(pipe, requests, len(requests)), TRACES, strict=True):
        assert step.codes[0].tolist() == trace["generated_ids"][: trace["max_new_tokens"] - 1]


@pytest.mark.parametrize("method", METHODS[1:])
def test_jacobi_decoding_generates_the_codes_of_plain_decoding(load_pipeline: LoadPipeline, method: str) -> None:
    pipe = load_pipeline(False)
    prompts = [f"a red fox {seed}" for seed in range(20)]
    request: dict[str, Any] = {"prompts": prompts, "seed": [*range(20)], "size": "64x64"}
    expected = pipe(**request, method="ar").codes
    assert len({codes.tobytes() for codes in expected}) == len(prompts)
    assert np.array_equal(pipe(**request, method=method).codes, expected)
    likelihood = pipe.likelihoods(expected[:1], prompts[0], size="64x64", temperature=1.0, top_p=1.0)[0]
    assert 0 < likelihood.nats < 2 * likelihood.entropy


@pytest.mark.parametrize("method", ["rows:window=2", "rows:window=1:drafts=1", "rows:window=3"])
def test_method_rows_is_independent_of_the_batch(load_pipeline: LoadPipeline, method: str) -> None:
    pipe = load_pipeline(False)
    captions = ["a red fox", "a boat on a lake at night in the rain"]
    batch_result = pipe(captions, size="160x96", seed=[1, 2], method=method)
    ar_result = pipe(captions, size="160x96", seed=[1, 2], method="ar")
    assert batch_result.stats.tokens_per_forward_pass > ar_result.stats.tokens_per_forward_pass
    for caption, seed, codes, ar_codes in zip(captions, (1, 2), batch_result.codes, ar_result.codes, strict=True):
        assert np.array_equal(pipe(caption, size="160x96", seed=seed, method=method).codes[0], codes)
        assert np.array_equal(codes[:241], ar_codes[:241])  # the small grid and the first code of the image
        assert (codes >= 0).all()
    request = {"prompts": captions, "size": "160x96", "seed": [1, 2], "method": method}  # not the default size
    (step,) = generate_in_shared_passes(pipe, [request], 2)
    assert np.array_equal(step.codes, batch_result.codes)


def test_run_writes_npz_files_without_an_image_decoder(program: Any, glm_image_bundle: Path, tmp_path: Path) -> None:
    trace = TRACES[0]
    size = make_options(trace)["size"]
    command = ["run", glm_image_bundle, trace["prompt"], "--size", size, "--temperature", 0]
    code, out, err = program(*command, "--output", tmp_path / "codes.npz")
    assert (code, out) == (0, f"{tmp_path / 'codes.npz'}\n")
    assert "bundle tiny-glm-image has no image decoder: writing tokens" in err
    with np.load(tmp_path / "codes.npz") as file:
        assert file["codes"].tolist() == trace["large_codes"]
        assert file["first_codes"].tolist() == trace["small_codes"]
        assert json.loads(str(file["recipe"]))["prompt"] == trace["prompt"]
    code, out, _ = program(*command, "--count", 2)
    assert (code, [Path(line).suffix for line in out.split()]) == (0, [".npz", ".npz"])
    code, _, err = program(*command, "--output", tmp_path / "image.png")
    assert (code, "found the ending .png, expected a .npz file or a folder" in err) == (2, True)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["run", "BUNDLE", "a fox", "--scale", "2"], "--scale: bundle tiny-glm-image has no image decoder"),
        (["run", "BUNDLE", "a fox", "--trace", "t.npz"], "--trace: bundle tiny-glm-image has no image decoder"),
        (
            ["eval", "BUNDLE", "--prompts", "p.txt", "--features", "f.onnx"],
            "image: bundle tiny-glm-image has no image decoder",
        ),
        (["push", "BUNDLE", "owner/name", "PICTURE"], "image: bundle tiny-glm-image has no image decoder"),
        (
            ["edit", "PICTURE", "BUNDLE", "--prompt", "a fox"],
            "tiny-glm-image generates whole images from a source image",
        ),
        (["run", "scenes", "a red cube on sand", "--image", "PICTURE"], "bundle scenes takes no source image"),
        (["run", "BUNDLE", "a fox", "--image", "p.txt"], "p.txt"),
    ],
    ids=lambda value: "-".join(value[:1] + value[3:4]) if isinstance(value, list) else "",
)
def test_options_that_need_an_image_decoder_are_rejected(
    program: Any, glm_image_bundle: Path, tmp_path: Path, command: list[str], message: str
) -> None:
    Image.new("RGBA", (64, 64)).save(tmp_path / "picture.png")
    (tmp_path / "p.txt").write_text("a red fox\na boat\n")
    paths = {"BUNDLE": str(glm_image_bundle), "PICTURE": "picture.png"}
    code, _, err = program(*(paths.get(word, word) for word in command))
    assert code == 2
    assert message in err.splitlines()[-1]


def test_bench_eval_and_inspect_work_without_an_image_decoder(
    program: Any, glm_image_bundle: Path, tmp_path: Path
) -> None:
    (tmp_path / "p.txt").write_text("a red fox\na boat\na house\n")
    code, out, err = program("bench", glm_image_bundle, "--prompts", "p.txt", "--count", 3)
    assert (code, "sjd" in out, "rows" in out) == (0, True, True), err
    code, out, err = program(
        "eval", glm_image_bundle, "--prompts", "p.txt", "--method", "sjd:lambda=2", "--output", "e"
    )
    assert code == 0, err
    assert "has no vq_encoder" in out
    code, out, _ = program("inspect", glm_image_bundle)
    assert code == 0
    assert "none: `run` writes tokens" in out
    assert "source image `run --image`" in " ".join(out.split())


@pytest.mark.parametrize("has_source", [False, True], ids=["text", "image"])
def test_the_example_passes_published_prior_token_ids_to_diffusers(
    glm_image_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_source: bool, request: Any
) -> None:
    calls: list[dict[str, Any]] = []

    class DiffusersStub:
        """Stub of the diffusers pipeline; `test_diffusers.py` calls the real pipeline."""

        @classmethod
        def from_pretrained(cls, model: str, **components: Any) -> DiffusersStub:
            assert components["vision_language_encoder"] is None
            return cls()

        def to(self, device: str) -> DiffusersStub:
            return self

        def __call__(self, **arguments: Any) -> Any:
            calls.append(arguments)
            return SimpleNamespace(images=[Image.new("RGB", (arguments["width"], arguments["height"]))])

    monkeypatch.setitem(sys.modules, "diffusers", SimpleNamespace(GlmImagePipeline=DiffusersStub))
    trace = SOURCE_TRACE | {"width": 96, "height": 128} if has_source else TRACES[0]
    arguments = [str(glm_image_bundle), "GLM-Image", trace["prompt"], "--size", f"{trace['width']}x{trace['height']}"]
    if has_source:
        request.getfixturevalue("source_codes")
        Image.new("RGB", (64, 96)).save(tmp_path / "source.png")
        arguments += ["--image", str(tmp_path / "source.png")]
    monkeypatch.setattr(
        sys, "argv", ["glm_image.py", *arguments, "--device", "cpu", "--output", str(tmp_path / "a.png")]
    )
    check_request = Pipeline.check
    monkeypatch.setattr(
        Pipeline, "check", lambda pipe, *arguments, **named: check_request(pipe, *arguments, **named, temperature=0)
    )
    runpy.run_path(str(Path(__file__).parents[2] / "examples/glm_image.py"), run_name="__main__")
    (call,) = calls
    codes = np.array(trace["large_codes"]).repeat(2, 0).repeat(2, 1)
    assert (call["prior_token_ids"].dtype, call["prior_token_ids"].tolist()) == (torch.int64, [codes.ravel().tolist()])
    assert (call["width"], call["height"], call["prompt"]) == (trace["width"], trace["height"], trace["prompt"])
    assert ("image" in call) == has_source
    if has_source:
        codes = np.array(trace["source_codes"]).repeat(2, 0).repeat(2, 1)
        assert [image.size for image in call["image"]] == [(64, 96)]
        assert [ids.tolist() for ids in call["prior_token_image_ids"]] == [codes.ravel().tolist()]
        assert [grid.tolist() for grid in call["source_image_grid_thw"]] == [[[1, 6, 4]]]
    assert (tmp_path / "a.png").is_file()


@pytest.fixture
def source_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the codes of source images by the codes of the recorded run. The recording has no source pixels."""
    codes = np.array(SOURCE_TRACE["source_codes"]).ravel()
    monkeypatch.setattr(SourceImage, "encode", lambda source, encoder: setattr(source, "codes", codes))


@pytest.mark.parametrize("on_device", [False, True], ids=["cpu", "device"])
@pytest.mark.parametrize("method", [*METHODS, *ROWS_METHODS])
@pytest.mark.usefixtures("source_codes")
def test_source_images_lead_to_the_published_codes(load_pipeline: LoadPipeline, method: str, on_device: bool) -> None:
    pipe = load_pipeline(on_device)
    rows, columns = SOURCE_TRACE["source_grid"]
    source = Image.new("RGB", (32 * columns, 32 * rows))
    request: dict[str, Any] = {"prompts": SOURCE_TRACE["prompt"], "image": source, "size": "96x128", "temperature": 0}
    (image,) = pipe.check(**request).images
    assert image.prefix.cond.inputs["token_ids"][0].tolist() == SOURCE_TRACE["prompt_ids"]
    assert pipe(**request, method=method).codes[0].tolist() == SOURCE_TRACE["generated_ids"][:-1]
    # The unconditional batch row has no source image.
    guided_codes = pipe(**request, method=method, cfg_scale=2.0).codes
    assert np.array_equal(guided_codes, pipe(**request, method="ar", cfg_scale=2.0).codes)


def test_requests_with_and_without_a_source_image_share_passes(load_pipeline: LoadPipeline) -> None:
    pipe = load_pipeline(False)
    source = Image.fromarray(np.random.default_rng(0).integers(0, 256, (96, 64, 3), np.uint8))
    requests: list[dict[str, Any]] = [
        {"prompts": "a red fox", "size": "96x128", "seed": 1, "image": source},
        {"prompts": "a red fox", "size": "96x128", "seed": 1},
        {"prompts": ["a boat", "a house"], "seed": [2, 3], "image": source},  # the size is that of the image
    ]
    expected_codes = [pipe(**request).codes for request in requests]
    assert [codes.shape for request_codes in expected_codes for codes in request_codes] == [
        (12,),
        (12 + 18 * 13,),
        (6,),
        (6,),
    ]
    for step, expected in zip(generate_in_shared_passes(pipe, requests, 4), expected_codes, strict=True):
        assert all(map(np.array_equal, step.codes, expected))
    request = requests[0] | {"temperature": 1.0, "top_p": 1.0}
    (likelihood,) = pipe.likelihoods(expected_codes[0], **request)
    assert 0 < likelihood.nats < 2 * likelihood.entropy


def test_run_with_a_source_image_writes_the_pipelines_codes(
    program: Any, glm_image_bundle: Path, load_pipeline: LoadPipeline, tmp_path: Path
) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (120, 90, 4), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "picture.png")  # partly transparent; scaled to 96 x 128 pixels
    command = ["run", glm_image_bundle, "a red fox", "--image", "picture.png", "--seed", 3]
    code, _, err = program(*command, "--output", "codes.npz")
    assert code == 0, err
    result = load_pipeline(False)("a red fox", image=tmp_path / "picture.png", seed=3)
    with np.load(tmp_path / "codes.npz") as file:
        assert np.array_equal(file["codes"].ravel(), result.codes[0])
        assert (file["codes"].shape, file["first_codes"].size) == ((4, 3), 0)
        assert len(json.loads(str(file["recipe"]))["edit"]) == 64
    for word in (["--keep-rows", 1], ["--mask", "picture.png"]):
        code, _, err = program("edit", "picture.png", glm_image_bundle, "--prompt", "a fox", *word)
        assert (code, "`lantern-rt run --image`, without a mask" in err) == (2, True)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"keep_rows": 1}, "image"),
        ({"mask": np.ones((64, 64), bool)}, "image"),
        ({"image": np.zeros((0, 64, 3), np.uint8)}, "image"),
        ({"prompts": "a fox " * 333}, "prompt"),
        ({"token_ids": [1, 2, 3], "prompts": None}, "token_ids"),
    ],
)
def test_options_that_do_not_fit_a_source_image_are_rejected(
    load_pipeline: LoadPipeline, options: dict[str, Any], field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = load_pipeline(False)
    short_condition = pipe.bundle.manifest.condition.model_copy(update={"prefix": 64})
    monkeypatch.setattr(
        pipe,
        "bundle",
        replace(pipe.bundle, manifest=pipe.bundle.manifest.model_copy(update={"condition": short_condition})),
    )
    source = Image.new("RGB", (64, 64))
    with pytest.raises(RequestError) as caught:
        pipe(**{"prompts": "a red fox", "image": source, "size": "64x64"} | options)
    assert caught.value.field == field


def test_edit_rejects_a_bundle_of_image_to_image(load_pipeline: LoadPipeline) -> None:
    with pytest.raises(RequestError, match="generates whole images from a source image"):
        load_pipeline(False).edit(Image.new("RGBA", (64, 64)), prompts="a red fox")


def test_an_asynchronous_pipeline_returns_codes_without_images(glm_image_bundle: Path) -> None:
    async def generate() -> list[int]:
        async with await AsyncPipeline.from_bundle(glm_image_bundle, threads=1) as pipe:
            result = await pipe.generate(**make_options(TRACES[1]))
            assert result.images == []
            return result.codes[0].tolist()

    assert asyncio.run(generate()) == TRACES[1]["generated_ids"][:-1]


def test_decoding_a_step_without_an_image_decoder_is_rejected(load_pipeline: LoadPipeline) -> None:
    *_, step = load_pipeline(False).stream("a fox", size="64x64")
    with pytest.raises(RequestError, match="has no image decoder"):
        step.image(0)
