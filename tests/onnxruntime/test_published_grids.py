"""Whole greedy generations of both Lumina-mGPTs, Emu3 and SimpleAR in grids of several shapes, from prompts to images.

With the published solver of Lumina-mGPT, the model generates the tokens of the size; here they are part of the prompt.
"""

from __future__ import annotations

import json
import queue
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from device_pipeline import device_pipeline
from PIL import Image
from toy_engine import plan_of, raster_layout

from lantern_rt import Pipeline
from lantern_rt.cli.main import run_program
from lantern_rt.engines.ort.engine import OrtDeviceEngine
from lantern_rt.methods import Autoregressive, MethodConfig, SpeculativeJacobi
from lantern_rt.prepared import load_model
from lantern_rt.results import StreamStep
from lantern_rt.runtime.decode import decode
from lantern_rt.runtime.state import PrefixRow, Prompt
from lantern_rt.service import Service

DATA = Path(__file__).parent.parent / "data"
EMU3_SUFFIX = " masterpiece, film grained, best quality."  # the published program, and a bundle, add it to prompts
FOLDERS = {"lumina": "lumina-mgpt", "lumina2": "lumina-mgpt-2", "emu3": "emu3", "simplear": "simplear"}
GOLDEN = {family: np.load(DATA / folder / "golden.npz") for family, folder in FOLDERS.items()}
LUMINA: list[dict[str, Any]] = json.loads((DATA / "lumina-mgpt" / "traces.json").read_text())
LUMINA2: list[dict[str, Any]] = json.loads((DATA / "lumina-mgpt-2" / "traces.json").read_text())
Pipelines = Callable[..., Pipeline]


class Run(NamedTuple):
    """A recorded generation.

    Attributes:
        family: name of the model family.
        options: arguments of the pipeline.
        codes: tokens of the image, `[rows, columns]`.
        generated_ids: ids of the tokens that the published code generated, row ends included.
        first_code: id of code 0.
        row_end: id of the row end; None if it follows from the bundle's as the ids of codes do.
        image_name: name of the recorded image.
    """

    family: str
    options: dict[str, Any]
    codes: list[list[int]]
    generated_ids: list[int]
    first_code: int
    row_end: int | None
    image_name: str

    def __str__(self) -> str:
        penalty = self.options.get("repetition_penalty", 1)
        return f"{self.family}-{self.options['size']}-cfg{self.options['cfg_scale']:g}" + "-penalty" * (penalty > 1)


def lumina(trace: dict[str, Any]) -> Run:
    size = f"{trace['width']}x{trace['height']}"
    ids = trace["generated_ids"]
    options = {"prompts": trace["caption"], "size": size, "temperature": 0, "cfg_scale": trace["cfg"]}
    image_name = f"run{trace['prompt']}_{trace['name']}_image"
    # The last three ids end the row, the image and the turn.
    return Run("lumina", options, trace["codes"], ids[3:-3], ids[3] - trace["codes"][0][0], None, image_name)


def lumina2(trace: dict[str, Any]) -> Run:
    size = f"{trace['width']}x{trace['height']}"
    ids = trace["generated_ids"]
    options = {"prompts": trace["caption"], "size": size, "temperature": 0, "cfg_scale": trace["cfg"]}
    # The last two ids end the row and the image.
    return Run("lumina2", options, trace["codes"], ids[3:-2], 367, 353, f"{trace['name']}_uint8")


def emu3(trace: dict[str, Any]) -> Run:
    rows, columns = trace["grid"]
    options = {"size": f"{2 * columns}x{2 * rows}", "temperature": 0, "cfg_scale": trace["cfg"]}
    options["prompts"] = trace["text"].removesuffix(EMU3_SUFFIX)
    # The last four ids end the row, the frame, the image and the sequence.
    return Run("emu3", options, trace["codes"], trace["generated_ids"][:-4], 557, 549, f"{trace['name']}_uint8")


def simplear(trace: dict[str, Any]) -> Run:
    rows, columns = trace["grid"]
    options = {"size": f"{16 * columns}x{16 * rows}", "temperature": 0, "cfg_scale": trace["cfg"]}
    options["repetition_penalty"] = trace["repetition_penalty"]
    options["prompts"] = trace["text"].split(" image of ")[1].removesuffix("<|soi|>")
    return Run("simplear", options, trace["codes"], trace["generated_ids"], 395, None, f"{trace['name']}_uint8")


EMU3, SIMPLEAR = (json.loads((DATA / family / "traces.json").read_text()) for family in ("emu3", "simplear"))
RUNS = [*map(lumina, LUMINA), *(lumina2(trace) for trace in LUMINA2 if trace["name"] != "i2i")]
RUNS += [*(emu3(trace) for trace in EMU3 if trace["name"].split("_")[-1].startswith("cfg"))]
RUNS += [simplear(trace) for trace in SIMPLEAR if trace["name"].split("_")[-1].startswith(("cfg", "penalty"))]
TREES = ["eagle:tree=chain-4", "eagle:tree=mc-25", "eagle:tree=dynamic-59-5-10"]
METHODS = {  # the windows of `rows` are as wide as any grid, so it is exact, too
    "lumina": ["ar", "sjd:window=1", "sjd:window=7", *TREES, "rows:window=6"],
    "lumina2": ["ar", "sjd:window=3", "sjd:window=15", "rows:window=12"],
    "emu3": ["ar", "sjd:window=1", "sjd:window=7", "rows:window=12"],
    "simplear": ["ar", "sjd:window=1", "sjd:window=7", "rows:window=6"],
}
EXACT = [(family, method) for family, methods in METHODS.items() for method in methods]


@pytest.fixture(scope="module")
def pipes(request: pytest.FixtureRequest) -> Pipelines:
    """Load pipelines by family; `on_device` runs the graphs for accelerators, here on the CPU."""

    @cache
    def load(family: str, on_device: bool = False) -> Pipeline:
        bundle = request.getfixturevalue(f"{family}_bundle")
        pipe = device_pipeline(bundle) if on_device else Pipeline.from_bundle(bundle, threads=1)
        assert isinstance(pipe.engines.target, OrtDeviceEngine) == on_device
        return pipe

    return load


@pytest.mark.parametrize("on_device", [False, True], ids=["cpu", "device"])
@pytest.mark.parametrize(("run", "method"), [(run, method) for run in RUNS for method in METHODS[run.family]], ids=str)
def test_greedy_generations_of_every_grid_have_the_published_ids_and_images(
    pipes: Pipelines, run: Run, method: str, on_device: bool
) -> None:
    pipe = pipes(run.family, on_device)
    shape = np.shape(run.codes)
    result = pipe(**run.options, method=method)
    assert result.codes[0].reshape(shape).tolist() == run.codes
    row_end = pipe.bundle.manifest.row_end
    expected_tokens = raster_layout(result.codes[0].size, shape[1], row_end).insert_row_ends(result.codes[0])
    written = expected_tokens + run.first_code
    if run.row_end is not None:
        written[expected_tokens == row_end] = run.row_end
    assert written.tolist() == run.generated_ids
    golden = GOLDEN[run.family]
    if run.image_name in golden:
        assert np.abs(np.asarray(result.images[0]).astype(int) - golden[run.image_name]).max() <= 1


def test_greedy_generations_have_published_images() -> None:
    assert sum(run.image_name in GOLDEN[run.family] for run in RUNS) >= 13


@pytest.mark.parametrize("method", ["sjd:window=3", "sjd:window=7", "sjd:window=15"])
def test_forty_seeds_generate_the_tokens_of_plain_decoding(pipes: Pipelines, method: str) -> None:
    seeds = range(40)
    for cfg_scale in (4.0, 12.0):  # a constant scale, and a scale with a schedule
        options: dict[str, Any] = {"size": "32x64", "seed": [*seeds], "cfg_scale": cfg_scale}
        prompts = [f"a red fox {seed}" for seed in seeds]
        expected = pipes("lumina2")(prompts, **options, method="ar").codes
        assert np.array_equal(pipes("lumina2")(prompts, **options, method=method).codes, expected)


@pytest.mark.parametrize("method", [Autoregressive(), SpeculativeJacobi(window=7)], ids=str)
def test_the_lower_half_of_an_image_is_the_published_one_below_a_preserved_upper_half(
    pipes: Pipelines, method: MethodConfig
) -> None:
    """Reproduce image-to-image of Lumina-mGPT 2.0, where both batch rows contain the preserved tokens."""
    pipe = pipes("lumina2")
    trace = next(trace for trace in LUMINA2 if trace["name"] == "i2i")
    codes = np.array(trace["codes"])
    rows = trace["given_rows"]
    columns = codes.shape[1]
    uncond = np.array(trace["unconditional_prefix"])
    cond = np.array(trace["prompt_ids"])[: -rows * (columns + 1)]
    inputs = {"token_ids": cond[None], "uncond_ids": uncond[None, :3]}
    assert cond[-3:].tolist() == uncond[:3].tolist()
    first, second = (
        PrefixRow(embeds[0], np.ones(embeds.shape[1], bool)) for embeds in pipe.engines.compute_condition(inputs)
    )
    preserved = np.where(np.arange(codes.size) < rows * columns, codes.ravel(), -1)
    settings = pipe.check("a table", size="32x64", temperature=0, cfg_scale=trace["cfg"]).settings
    model = load_model(pipe.bundle, pipe.engines, [method])
    layout = pipe.bundle.manifest.layout(pipe.bundle.manifest.size("32x64"))
    steps = decode(model, plan_of(layout, settings.sampling, method), [Prompt(first, second, preserved)], [0])
    generated = [code for step in steps for code in step.parts[0].codes]
    assert np.reshape(generated, codes.shape).tolist() == codes.tolist()


@pytest.mark.parametrize("trace", LUMINA, ids=lambda trace: f"{trace['latent']}-cfg{trace['cfg']:g}")
def test_prompts_are_laid_out_as_the_published_solver_does(pipes: Pipelines, trace: dict[str, Any]) -> None:
    (image,) = pipes("lumina").check(**lumina(trace).options).images
    assert image.token_ids is not None
    cond, uncond = (ids.tolist() for ids in image.token_ids)
    assert cond == [*trace["prompt_ids"], *trace["generated_ids"][:3]]
    assert uncond == (trace["unconditional_prefix"] or trace["generated_ids"][:3])


@pytest.mark.parametrize("on_device", [False, True], ids=["cpu", "device"])
@pytest.mark.parametrize(("family", "method"), EXACT)
def test_requests_for_several_sizes_share_passes_and_get_the_published_tokens(
    pipes: Pipelines, family: str, method: str, on_device: bool
) -> None:
    runs = [run for run in RUNS if run.family == family]
    news_queue: queue.Queue[tuple[int, StreamStep | BaseException]] = queue.Queue()
    with Service(pipes(family, on_device), max_images_per_pass=len(runs)) as service:
        for i, run in enumerate(runs):
            listener = partial(lambda i, news: news_queue.put((i, news)), i)
            service.submit(listener, **run.options, wants_all_steps=False, method=method)
        last_news = dict(news_queue.get(timeout=60) for _ in runs)
    for i, run in enumerate(runs):
        step = last_news[i]
        shape = np.shape(run.codes)
        assert isinstance(step, StreamStep), step
        assert step.codes[0].reshape(shape).tolist() == run.codes
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
def test_near_ties_of_images_of_several_sizes_do_not_depend_on_the_batch(
    pipes: Pipelines, family: str, sizes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Make near-ties in most steps: each of them computes the sequence again, row ends included."""
    monkeypatch.setattr("lantern_rt.runtime.batch.compute_rounding_margin", lambda model, sampling: 3.0)
    pipe = pipes(family)
    news_queue = queue.Queue[tuple[int, StreamStep | BaseException]]()
    options: dict[str, Any] = {"prompts": "a red fox", "seed": 3}
    with Service(pipe, max_images_per_pass=len(sizes)) as service:
        for i, size in enumerate(sizes):
            listener = partial(lambda i, news: news_queue.put((i, news)), i)
            service.submit(listener, **options, size=size, wants_all_steps=False, method="sjd:window=16")
        last_news = dict(news_queue.get(timeout=120) for _ in sizes)
    for i, size in enumerate(sizes):
        step = last_news[i]
        expected = pipe(**options, size=size, method="ar")
        assert isinstance(step, StreamStep), step
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
def test_every_exact_method_generates_the_same_image_of_a_seed(pipes: Pipelines, family: str, size: str) -> None:
    pipe = pipes(family)
    expected = pipe("a red fox", size=size, seed=5, method="ar")
    for method in METHODS[family][1:-1]:
        assert np.array_equal(pipe("a red fox", size=size, seed=5, method=method).codes[0], expected.codes[0])
    nats = pipe.likelihoods(expected.codes, "a red fox", size=size)[0]
    assert 0 < nats.nats < 2 * nats.entropy


@pytest.mark.parametrize(
    ("family", "method"),
    [("lumina", "lantern"), ("lumina", "lantern++")]
    + [(family, method) for family in METHODS for method in ("sjd:lambda=2", "rows:window=2")],
)
def test_images_of_inexact_methods_do_not_depend_on_the_batch(pipes: Pipelines, family: str, method: str) -> None:
    pipe = pipes(family)
    captions = ["a red fox", "a boat on a lake at night in the rain"]
    size = {"lumina": "64x96", "lumina2": "32x96", "emu3": "6x10", "simplear": "96x48"}[family]
    together = pipe(captions, size=size, seed=[1, 2], method=method)
    for caption, seed, codes in zip(captions, (1, 2), together.codes, strict=True):
        assert np.array_equal(pipe(caption, size=size, seed=seed, method=method).codes[0], codes)


def test_an_image_file_records_its_size_and_can_be_generated_again(lumina_bundle: Path, tmp_path: Path) -> None:
    first = tmp_path / "fox.png"
    again = tmp_path / "again.png"
    common = ["run", str(lumina_bundle)]
    options = ["a red fox", "--size", "96x64", "--method", "ar", "--trace", str(tmp_path / "fox.trace.npz")]
    assert run_program([*common, *options, "--output", str(first)]) == 0
    assert run_program([*common, "--from", str(first), "--output", str(again)]) == 0
    with Image.open(first) as image, Image.open(again) as repeated:
        assert image.size == (24, 16)
        assert json.loads(image.info["settings"])["size"] == "96x64"
        assert image.tobytes() == repeated.tobytes()
    with np.load(tmp_path / "fox.trace.npz") as trace:
        assert trace["grid"].tolist() == [4, 6]


def test_an_unsupported_size_is_rejected_with_a_list_of_the_supported_ones(
    lumina_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_program(["run", str(lumina_bundle), "a fox", "--size", "512x512"]) == 2
    listed = "128x32, 128x64, 96x64, 96x96, 64x96, 64x128, 32x128, 64x64"
    assert f"--size: found '512x512', expected {listed}" in capsys.readouterr().err
    assert run_program(["inspect", str(lumina_bundle)]) == 0
    assert listed in " ".join(capsys.readouterr().out.split())
