"""Greedy generations of both Lumina-mGPT versions, Emu3 and SimpleAR in several grid shapes, from prompt to image."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from device_pipeline import load_device_pipeline
from numpy.typing import NDArray
from PIL import Image
from shared_passes import generate_in_shared_passes
from toy_engine import make_plan

from lantern_rt import Pipeline
from lantern_rt.cli.main import run_program
from lantern_rt.engines.ort.engine import OrtDeviceEngine
from lantern_rt.methods import Autoregressive, MethodConfig, SpeculativeJacobi
from lantern_rt.prepared import load_model
from lantern_rt.runtime.decode import decode
from lantern_rt.runtime.state import PrefixRow, Prompt

DATA = Path(__file__).parent.parent / "data"
LoadPipeline = Callable[..., Pipeline]


class RecordedGeneration(NamedTuple):
    """A greedy generation of a published program."""

    family: str
    options: dict[str, Any]
    codes: list[list[int]]  # [rows, columns]
    image: NDArray[np.uint8] | None

    def __str__(self) -> str:
        penalty = self.options.get("repetition_penalty", 1)
        return f"{self.family}-{self.options['size']}-cfg{self.options['cfg_scale']:g}" + "-penalty" * (penalty > 1)


# By family: folder of the recordings, pixels of a code in names of sizes, and the prompt of a trace.
RECORDED: dict[str, tuple[str, int, Callable[[dict[str, Any]], str]]] = {
    "lumina": ("lumina-mgpt", 16, lambda trace: trace["caption"]),
    "lumina2": ("lumina-mgpt-2", 8, lambda trace: trace["caption"]),
    # The published program and the bundle append this to prompts.
    "emu3": ("emu3", 2, lambda trace: trace["text"].removesuffix(" masterpiece, film grained, best quality.")),
    "simplear": ("simplear", 16, lambda trace: trace["text"].split(" image of ")[1].removesuffix("<|soi|>")),
}


def list_recordings(family: str) -> Iterator[RecordedGeneration]:
    """Yield the greedy runs with the default negative prompt, whose names end with a guidance scale or a penalty."""
    folder, pixels, get_prompt = RECORDED[family]
    golden = np.load(DATA / folder / "golden.npz")
    for trace in json.loads((DATA / folder / "traces.json").read_text()):
        if family in ("emu3", "simplear") and not trace["name"].split("_")[-1].startswith(("cfg", "penalty")):
            continue
        if trace["name"] == "i2i":
            continue
        rows, columns = np.shape(trace["codes"])
        size = f"{pixels * columns}x{pixels * rows}"
        options = {"prompts": get_prompt(trace), "size": size, "temperature": 0, "cfg_scale": trace["cfg"]}
        if "repetition_penalty" in trace:
            options["repetition_penalty"] = trace["repetition_penalty"]
        name = f"run{trace['prompt']}_{trace['name']}_image" if family == "lumina" else f"{trace['name']}_uint8"
        yield RecordedGeneration(family, options, trace["codes"], golden.get(name))


RECORDINGS = [recording for family in RECORDED for recording in list_recordings(family)]
TREES = ["eagle:tree=chain-4", "eagle:tree=mc-25", "eagle:tree=dynamic-59-5-10"]
METHODS = {  # windows of `rows` are as wide as the widest grid, so that the method is exact, too
    "lumina": ["ar", "sjd:window=1", "sjd:window=7", *TREES, "rows:window=6"],
    "lumina2": ["ar", "sjd:window=3", "sjd:window=15", "rows:window=12"],
    "emu3": ["ar", "sjd:window=1", "sjd:window=7", "rows:window=12"],
    "simplear": ["ar", "sjd:window=1", "sjd:window=7", "rows:window=6"],
}
EXACT_METHODS = [(family, method) for family, methods in METHODS.items() for method in methods]


@pytest.fixture(scope="module")
def load_pipeline(request: pytest.FixtureRequest) -> LoadPipeline:
    """Return a function that loads a model family; `on_device` runs the graphs for accelerators on the CPU."""

    @cache
    def load(family: str, on_device: bool = False) -> Pipeline:
        bundle = request.getfixturevalue(f"{family}_bundle")
        pipe = load_device_pipeline(bundle) if on_device else Pipeline.from_bundle(bundle, threads=1)
        assert isinstance(pipe.engines.target, OrtDeviceEngine) == on_device
        return pipe

    return load


@pytest.mark.parametrize("on_device", [False, True], ids=["cpu", "device"])
@pytest.mark.parametrize(
    ("recording", "method"),
    [(recording, method) for recording in RECORDINGS for method in METHODS[recording.family]],
    ids=str,
)
def test_greedy_generations_have_the_published_codes_and_images(
    load_pipeline: LoadPipeline, recording: RecordedGeneration, method: str, on_device: bool
) -> None:
    pipe = load_pipeline(recording.family, on_device)
    shape = np.shape(recording.codes)
    result = pipe(**recording.options, method=method)
    assert result.codes[0].reshape(shape).tolist() == recording.codes
    if recording.image is not None:
        assert np.abs(np.asarray(result.images[0]).astype(int) - recording.image).max() <= 1


@pytest.mark.parametrize("method", ["sjd:window=3", "sjd:window=7", "sjd:window=15"])
def test_jacobi_decoding_generates_the_tokens_of_plain_decoding(load_pipeline: LoadPipeline, method: str) -> None:
    seeds = range(20)
    for cfg_scale in (4.0, 12.0):  # a constant scale, and a scale with a schedule
        options: dict[str, Any] = {"size": "32x64", "seed": [*seeds], "cfg_scale": cfg_scale}
        prompts = [f"a red fox {seed}" for seed in seeds]
        expected = load_pipeline("lumina2")(prompts, **options, method="ar").codes
        assert np.array_equal(load_pipeline("lumina2")(prompts, **options, method=method).codes, expected)


@pytest.mark.parametrize("method", [Autoregressive(), SpeculativeJacobi(window=7)], ids=str)
def test_a_preserved_half_is_continued_as_published(load_pipeline: LoadPipeline, method: MethodConfig) -> None:
    """Regenerate the lower half as Lumina-mGPT 2.0 does: both batch rows contain the preserved tokens."""
    pipe = load_pipeline("lumina2")
    traces = json.loads((DATA / "lumina-mgpt-2/traces.json").read_text())
    trace = next(trace for trace in traces if trace["name"] == "i2i")
    codes = np.array(trace["codes"])
    rows = trace["given_rows"]
    columns = codes.shape[1]
    uncond = np.array(trace["unconditional_prefix"])
    cond = np.array(trace["prompt_ids"])[: -rows * (columns + 1)]
    inputs = {"token_ids": cond[None], "uncond_ids": uncond[None, :3]}
    assert cond[-3:].tolist() == uncond[:3].tolist()
    cond_prefix, uncond_prefix = (
        PrefixRow(embeds[0], np.ones(embeds.shape[1], bool)) for embeds in pipe.engines.compute_condition(inputs)
    )
    preserved = np.where(np.arange(codes.size) < rows * columns, codes.ravel(), -1)
    settings = pipe.check("a table", size="32x64", temperature=0, cfg_scale=trace["cfg"]).settings
    model = load_model(pipe.bundle, pipe.engines, [method])
    layout = pipe.bundle.manifest.layout(pipe.bundle.manifest.size("32x64"))
    steps = decode(
        model,
        make_plan(layout, settings.sampling, method),
        [Prompt(cond_prefix, uncond_prefix, preserved)],
        [0],
    )
    generated = [code for step in steps for code in step.parts[0].codes]
    assert np.reshape(generated, codes.shape).tolist() == codes.tolist()


@pytest.mark.parametrize("on_device", [False, True], ids=["cpu", "device"])
@pytest.mark.parametrize(("family", "method"), EXACT_METHODS)
def test_several_image_sizes_share_passes(
    load_pipeline: LoadPipeline, family: str, method: str, on_device: bool
) -> None:
    recordings = [recording for recording in RECORDINGS if recording.family == family]
    requests = [recording.options | {"method": method} for recording in recordings]
    steps = generate_in_shared_passes(load_pipeline(family, on_device), requests, len(requests))
    for step, recording in zip(steps, recordings, strict=True):
        shape = np.shape(recording.codes)
        assert step.codes[0].reshape(shape).tolist() == recording.codes
        scale = {"lumina": 4, "lumina2": 8, "emu3": 2, "simplear": 16}[family]
        assert step.image(0).size == (scale * shape[1], scale * shape[0])


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("lumina", ("64x64", "64x128", "128x32")),
        ("lumina2", ("64x64", "32x128", "96x32", "32x64")),
        ("emu3", ("8x8", "10x8", "24x4")),
        ("simplear", ("64x64", "96x48")),
    ],
)
def test_near_ties_of_several_sizes_are_decided_as_in_ar(
    load_pipeline: LoadPipeline, family: str, sizes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use a wide margin for near-ties, so that most steps compute the sequence again, including row ends."""
    monkeypatch.setattr("lantern_rt.runtime.sampler.Sampler.compute_rounding_margin", lambda *_: 3.0)
    pipe = load_pipeline(family)
    options: dict[str, Any] = {"prompts": "a red fox", "seed": 3}
    requests = [options | {"size": size, "method": "sjd:window=16"} for size in sizes]
    for step, size in zip(generate_in_shared_passes(pipe, requests, len(sizes)), sizes, strict=True):
        expected = pipe(**options, size=size, method="ar")
        assert step.stats is not None
        assert step.stats.per_image[0].tie_passes > 10
        np.testing.assert_array_equal(step.codes[0], expected.codes[0].ravel(), err_msg=size)


@pytest.mark.parametrize(
    ("family", "size"),
    [
        ("lumina", "64x64"),
        ("lumina", "64x128"),
        ("lumina", "128x32"),
        ("lumina2", "64x64"),
        ("lumina2", "96x32"),
        ("lumina2", "32x64"),
        ("lumina2", "32x128"),
        ("emu3", "8x8"),
        ("emu3", "10x8"),
        ("emu3", "24x4"),
        ("simplear", "96x48"),
    ],
)
def test_every_exact_method_generates_the_same_codes_for_a_seed(
    load_pipeline: LoadPipeline, family: str, size: str
) -> None:
    pipe = load_pipeline(family)
    expected = pipe("a red fox", size=size, seed=5, method="ar")
    for method in METHODS[family][1:-1]:
        assert np.array_equal(pipe("a red fox", size=size, seed=5, method=method).codes[0], expected.codes[0])
    likelihood = pipe.likelihoods(expected.codes, "a red fox", size=size)[0]
    assert 0 < likelihood.nats < 2 * likelihood.entropy


@pytest.mark.parametrize(
    ("family", "method"),
    [("lumina", "lantern"), ("lumina", "lantern++")]
    + [(family, method) for family in METHODS for method in ("sjd:lambda=2", "rows:window=2")],
)
def test_inexact_images_do_not_depend_on_the_batch(load_pipeline: LoadPipeline, family: str, method: str) -> None:
    pipe = load_pipeline(family)
    captions = ["a red fox", "a boat on a lake at night in the rain"]
    size = {"lumina": "64x96", "lumina2": "32x96", "emu3": "6x10", "simplear": "96x48"}[family]
    batch_result = pipe(captions, size=size, seed=[1, 2], method=method)
    for caption, seed, codes in zip(captions, (1, 2), batch_result.codes, strict=True):
        assert np.array_equal(pipe(caption, size=size, seed=seed, method=method).codes[0], codes)


def test_an_image_can_be_generated_again_from_its_file(lumina_bundle: Path, tmp_path: Path) -> None:
    first_path = tmp_path / "fox.png"
    regenerated_path = tmp_path / "again.png"
    command = ["run", str(lumina_bundle)]
    options = ["a red fox", "--size", "96x64", "--method", "ar", "--trace", str(tmp_path / "fox.trace.npz")]
    assert run_program([*command, *options, "--output", str(first_path)]) == 0
    assert run_program([*command, "--from", str(first_path), "--output", str(regenerated_path)]) == 0
    with Image.open(first_path) as image, Image.open(regenerated_path) as regenerated:
        assert image.size == (24, 16)
        assert json.loads(image.info["settings"])["size"] == "96x64"
        assert image.tobytes() == regenerated.tobytes()
    with np.load(tmp_path / "fox.trace.npz") as trace:
        assert trace["grid"].tolist() == [4, 6]


def test_an_unsupported_size_is_rejected_with_the_supported_ones(
    lumina_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_program(["run", str(lumina_bundle), "a fox", "--size", "512x512"]) == 2
    supported_sizes = "128x32, 128x64, 96x64, 96x96, 64x96, 64x128, 32x128, 64x64"
    assert f"--size: found '512x512', expected {supported_sizes}" in capsys.readouterr().err
    assert run_program(["inspect", str(lumina_bundle)]) == 0
    assert supported_sizes in " ".join(capsys.readouterr().out.split())
